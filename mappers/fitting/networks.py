"""The nonlinear fallback of a fit: networks on top of a linear map that failed its test.

Captures both caches once into the work folder and trains from there. Holds no mathematics.

Shapes: N tokens, S source layers, L target layers, H KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.fitting.inputs import FitInputs
from mappers.fitting.mlp_fit import fit_mlp
from mappers.fitting.mlp_train import Batch, Batches, MlpSettings, Spread
from mappers.geometry import KVGeometry
from mappers.manifest import LayerR2, Support
from mappers.mapper import Mapper
from mappers.mlp import MlpWeights
from mappers.weights import LinearWeights

# One batch in so many decides when to stop; it is trained on no more than judged on.
_STOP_EVERY = 8


def fit_networks(
    inputs: FitInputs,
    weights: LinearWeights,
    support: Support,
    bar: Callable[[str, int], Callable[[int], None]],
) -> tuple[MlpWeights, MlpSettings]:
    """Train networks on what `weights` leave over of the calibration text.

    Needs the work folder's disk for both caches of the text (`spool_bytes`), which is freed again.
    Raises MapperError when the text is a single batch or memory does not suffice.
    """
    count = len(inputs.feed.batches)
    if count < 2:
        raise MapperError("networks need more calibration text than one batch; give more tokens")
    every = min(_STOP_EVERY, count)
    stop = range(every - 1, count, every)
    names = [f"networks-{at:05}" for at in range(count)]
    advance = bar("both caches, calibration tokens", inputs.feed.data.tokens)
    for at, name in enumerate(names):
        _keep(inputs, at, name)
        advance(inputs.feed.batches[at].numel())
    settings = MlpSettings(
        hidden=inputs.settings.network_units,
        first_token_weight=inputs.settings.first_token_weight,
        sequence_tokens=inputs.settings.sequence_tokens,
    )
    train = [name for at, name in enumerate(names) if at not in stop]
    held = [name for at, name in enumerate(names) if at in stop]
    tokens = sum(batch.numel() for at, batch in enumerate(inputs.feed.batches) if at not in stop)
    trained, _ = fit_mlp(
        inputs.source.geometry,
        inputs.target.geometry,
        weights.source_layers,
        support,
        _batches(inputs, train),
        _batches(inputs, held),
        settings,
        linear=weights,
        device=inputs.device,
        advance=bar("training networks", settings.max_epochs * tokens),
    )
    for name in names:
        inputs.work.discard(name)
    return trained, settings


def mapper_r2(inputs: FitInputs, mapper: Mapper) -> LayerR2:
    """R2 of any mapper's position-free keys and values on the held-out tokens, as it is served."""
    ropes, length = inputs.models.ropes, inputs.heldout.sequence_tokens
    positions = ropes[0].positions(0, length)
    k_error_L, v_error_L = torch.zeros(2, mapper.target.layers, dtype=torch.float64)
    spreads = Spread(), Spread()
    for at in range(len(inputs.heldout.batches)):
        seen = inputs.heldout.read(at)
        x = [_by_layer(rows, mapper.source).split(length, dim=1) for rows in seen.x]
        y = [_by_layer(rows, mapper.target).split(length, dim=1) for rows in seen.y]
        for k_x, v_x, k_y, v_y in zip(*x, *y, strict=True):
            k_LTHD, v_LTHD = mapper.apply(ropes[0].apply(k_x, positions), v_x, 0)
            k_LTHD = ropes[1].strip(k_LTHD, positions)
            k_error_L += (k_LTHD - k_y).double().square().sum((1, 2, 3)).cpu()
            v_error_L += (v_LTHD.float() - v_y).double().square().sum((1, 2, 3)).cpu()
            spreads[0].add(k_y)
            spreads[1].add(v_y)
    keys, values = (
        tuple((1 - error_L / spread.deviation.sum((-1, -2)).cpu()).tolist())
        for error_L, spread in zip((k_error_L, v_error_L), spreads, strict=True)
    )
    return LayerR2(k=keys, v=values)


def spool_bytes(inputs: FitInputs) -> int:
    """Disk that both caches of the calibration text take."""
    shapes = inputs.source.geometry, inputs.target.geometry
    per_token = sum(shape.kv_bytes_per_token(torch.bfloat16.itemsize) for shape in shapes)
    return inputs.feed.data.tokens * per_token


def _keep(inputs: FitInputs, at: int, name: str) -> None:
    """Both models' position-free caches of one batch on disk, unless they are there."""
    if inputs.work.path(name).is_file():
        return
    seen = inputs.feed.read(at)
    tensors = dict(zip(("k_x", "v_x", "k_y", "v_y"), (*seen.x, *seen.y), strict=True))
    inputs.work.save(name, {key: x.to(torch.bfloat16).cpu() for key, x in tensors.items()})


def _batches(inputs: FitInputs, names: list[str]) -> Batches:
    def read() -> Iterator[Batch]:
        source, target = inputs.source.geometry, inputs.target.geometry
        for name in names:
            loaded = inputs.work.load(name)
            assert loaded is not None, "captured before training begins"
            tensors = loaded[0]
            yield (
                _by_layer(tensors["k_x"], source),
                _by_layer(tensors["v_x"], source),
                _by_layer(tensors["k_y"], target),
                _by_layer(tensors["v_y"], target),
            )

    return read


def _by_layer(rows_NF: Tensor, geometry: KVGeometry) -> Tensor:
    """[N, L*H*D] -> [L, N, H, D]."""
    shape = (geometry.layers, geometry.kv_heads, geometry.head_dim)
    return rows_NF.view(len(rows_NF), *shape).transpose(0, 1)
