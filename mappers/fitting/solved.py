"""Judging what a fit solved, on the held-out text it was given: R2 of KV, and what is predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cluster.errors import MapperError
from mappers.fitting.accumulate import solve_all
from mappers.fitting.blocks import PairMoments
from mappers.fitting.inputs import FitInputs
from mappers.fitting.ridge import LinearFit, StreamedR2, r2_L
from mappers.fitting.sweep import DEFAULT_KS, SweepResult, SweepRow, choose, predict
from mappers.manifest import LayerR2, Support
from mappers.mapper import LinearMapper, LinearWeights, Mapper
from mappers.mlp import MlpMapper, MlpWeights
from mappers.supports import feature_width

Choice = tuple[tuple[int, ...], ...]
"""Source layers of every target layer."""

Fits = tuple[LinearFit, LinearFit]
"""Keys and values."""


def weights_of(chosen: Choice, fits: Fits) -> LinearWeights:
    """What a mapper is made of."""
    keys, values = fits
    return LinearWeights(
        chosen, keys.weight_LGFO, keys.bias_LGO, values.weight_LGFO, values.bias_LGO
    )


def mapper_of(inputs: FitInputs, weights: LinearWeights | MlpWeights) -> Mapper:
    """The mapper as it will be served, on the fit's device."""
    device, dtype = inputs.device, inputs.settings.dtype
    if isinstance(weights, MlpWeights):
        return MlpMapper(inputs.source, inputs.target, weights, device=device, dtype=dtype)
    return LinearMapper(inputs.source, inputs.target, weights, device=device, dtype=dtype)


def heldout_r2(inputs: FitInputs, chosen: Choice, fits: Fits) -> LayerR2:
    """R2 of position-free keys and values on the held-out tokens."""
    shapes = inputs.source.geometry, inputs.target.geometry
    sums = [
        StreamedR2(
            *shapes,
            replace(
                one,
                weight_LGFO=one.weight_LGFO.to(inputs.device),
                bias_LGO=one.bias_LGO.to(inputs.device),
            ),
            chosen,
        )
        for one in fits
    ]
    for at in range(len(inputs.heldout.batches)):
        seen = inputs.heldout.read(at)
        for part, x_NF, y_NC in zip(sums, seen.x, seen.y, strict=True):
            part.update(x_NF, y_NC)
    keys, values = (tuple(part.r2_L().tolist()) for part in sums)
    return LayerR2(k=keys, v=values)


def row_of(
    inputs: FitInputs,
    chosen: Choice,
    fits: Fits,
    support: Support,
    k: int,
    moments: PairMoments | None,
) -> SweepRow:
    """A solved setting, judged. Without moments it is one with attention weights."""
    r2 = heldout_r2(inputs, chosen, fits)
    seen = predict(
        inputs.models.source,
        inputs.models.target,
        mapper_of(inputs, weights_of(chosen, fits)),
        inputs.heldout.data,
        inputs.settings.prefix_tokens,
    )
    width = feature_width(support, k, inputs.source.geometry, inputs.target.geometry)
    in_sample: list[float] | None = None
    if moments is not None:
        parts = zip((moments.k, moments.v), fits, strict=True)
        in_sample = [float(r2_L(part, one, chosen).mean()) for part, one in parts]
    return SweepRow(
        k=k,
        support=support,
        attention_weights=moments is None,
        width=width,
        observations_per_feature=inputs.feed.data.tokens / width,
        parameters=sum(one.weight_LGFO.numel() for one in fits),
        in_sample_r2_keys=in_sample[0] if in_sample else None,
        in_sample_r2_values=in_sample[1] if in_sample else None,
        heldout_r2_keys=r2.mean_k,
        heldout_r2_values=r2.mean_v,
        **seen.model_dump(),
    )


def sweep(
    inputs: FitInputs,
    moments: PairMoments,
    choose_k: Callable[[int], Choice],
    bar: Callable[[str, int], Callable[[int], None]],
) -> SweepResult:
    """Solve and judge every k with every support; `choose_k` gives the source layers for a k."""
    settings, observations = inputs.settings, inputs.feed.data.tokens
    source, target = inputs.source.geometry, inputs.target.geometry
    supports: tuple[Support, ...] = ("full", "head_local")
    left_out = []
    if source.kv_heads != target.kv_heads:
        supports = ("full",)
        left_out.append("head_local: the models differ in KV heads")
    if settings.attention_weights:
        left_out.append("attention weights: of the best setting only")
    else:
        left_out.append("attention weights: not asked for")
    todo: list[tuple[Support, int]] = []
    for support in supports:
        for k in _ks(source.layers):
            width = feature_width(support, k, source, target)
            if observations > width:
                todo.append((support, k))
            else:
                left_out.append(f"{support}, k {k}: {observations} tokens for {width} features")
    if not todo:
        raise MapperError(
            f"{observations} are too few calibration tokens for any setting of a sweep; give more"
        )
    rows = []
    advance = bar("sweep: settings", len(todo))
    for support, k in todo:
        chosen = choose_k(k)
        fits = solve_all(moments, chosen, support, settings.ridge)
        rows.append(row_of(inputs, chosen, fits, support, k, moments))
        advance(1)
    return SweepResult(
        rows=tuple(rows),
        chosen=choose(rows),
        windows=len(inputs.heldout.data.ids_ST),
        prefix_tokens=settings.prefix_tokens,
        not_swept=tuple(left_out),
    )


def _ks(layers: int) -> list[int]:
    return sorted({*(k for k in DEFAULT_KS if k < layers), layers})
