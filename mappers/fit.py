"""Fitting a mapper for an ordered pair of models: read, accumulate, choose, solve, judge, write.

Knows the other modules of this package and where their results go; holds no mathematics itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cluster.errors import MapperError
from mappers.capture import TokenSequences, load_model, pack, position_free_kv, windows
from mappers.fingerprint import ModelFingerprint, fingerprint
from mappers.manifest import DataRecord, LayerR2, MapperManifest, Ridge, Support
from mappers.mapper import LinearMapper, LinearWeights
from mappers.moments import (
    PairMoments,
    available_memory_bytes,
    require_memory,
)
from mappers.ridge import feature_width, r2_L, solve_layers
from mappers.rope import Rope
from mappers.score import score_mapper
from mappers.select import choose_layers, single_source_r2_SL
from mappers.store import mapper_id, require_replaceable, save_mapper

# Below this many observations per feature the held-out error of a fit is dominated by its variance.
COMFORTABLE_RATIO = 5.0
_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class FitReport:
    """What a fit wrote and what it cost. `seconds` are wall-clock, by stage."""

    folder: Path
    mapper_id: str
    manifest: MapperManifest
    parameters: int
    seconds: dict[str, float]


def fit(
    source_dir: Path,
    target_dir: Path,
    texts: Iterable[str],
    heldout_texts: Iterable[str],
    out_dir: Path,
    *,
    k: int | None = 8,
    support: Support = "full",
    ridge: Ridge | float = 0.01,
    tokens: int = 65_536,
    heldout_tokens: int = 8_192,
    sequence_tokens: int = 512,
    first_token_weight: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> FitReport:
    """Fit, judge and write the mapper from `source_dir`'s model to `target_dir`'s into `out_dir`.

    `k` is the number of source layers per target layer, None for all. `tokens` and
    `heldout_tokens` bound what is read of each set of texts, cut into sequences of
    `sequence_tokens`, whose first half is the prefix when the mapper is judged. Attention rests on
    the first token of a sequence, whose KV is far from all others; a fit in which it counts once
    misses it and loses a fifth of the top-1 agreement it could have, so it counts
    `first_token_weight` times.
    Writes nothing unless everything succeeds; a refused mapper is written with its verdict.

    Raises MapperError when the tokenizers differ, memory or observations do not suffice, or
    `out_dir` holds something else. Warns below five observations per feature.
    """
    console = console or Console()
    penalty = ridge if isinstance(ridge, Ridge) else Ridge(value=ridge)
    require_replaceable(out_dir)
    source, target = fingerprint(source_dir), fingerprint(target_dir)
    _require_one_tokenizer(source, target)
    k = source.layers if k is None else k
    width = feature_width(support, k, source.geometry, target.geometry)
    # One set of moments for calibration and one for held-out text.
    needed = require_memory(source.geometry, target.geometry, available_memory_bytes(), sets=2)
    console.print(f"moments of this pair take {needed / 1e9:.2f} GB of memory")
    calibration = pack(_mixed(texts), source_dir, sequence_tokens, tokens)
    heldout = windows(_mixed(heldout_texts), source_dir, sequence_tokens, heldout_tokens)
    _require_observations(calibration.tokens, width)

    clock = _Stages()
    with clock.stage("load"):
        small = load_model(source_dir, dtype, device)
        large = load_model(target_dir, dtype, device)
    with _progress(console) as progress:

        def bar(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total)
            return lambda done: progress.advance(task, done)

        ropes = Rope(source.rope, device), Rope(target.rope, device)
        moments = PairMoments(source.geometry, target.geometry)
        unseen = PairMoments(source.geometry, target.geometry)
        with clock.stage("accumulate"):
            for into, data, name, weight in (
                (moments, calibration, "calibration tokens", first_token_weight),
                (unseen, heldout, "held-out tokens", 1),
            ):
                accumulate(
                    into,
                    data,
                    small,
                    large,
                    ropes,
                    bar(name, data.tokens),
                    first_token_weight=weight,
                )
        with clock.stage("solve"):
            weights, heldout_r2 = solve(moments, unseen, k, support, penalty)
        with clock.stage("score"):
            mapper = LinearMapper(source, target, weights, device=device, dtype=dtype)
            score = score_mapper(
                small,
                large,
                mapper,
                heldout,
                prefix_tokens=sequence_tokens // 2,
                advance=bar("held-out windows", len(heldout.ids_ST)),
            )
    manifest = save_mapper(
        out_dir,
        weights,
        MapperManifest(
            source=source,
            target=target,
            support=support,
            k=k,
            source_layers=weights.source_layers,
            ridge=penalty,
            first_token_weight=first_token_weight,
            calibration=_record(calibration),
            heldout=_record(heldout),
            heldout_r2=heldout_r2,
            score=score,
            weights_sha256="",
            created_by=_created_by(),
        ),
    )
    parameters = weights.k_weight_LGFO.numel() + weights.v_weight_LGFO.numel()
    return FitReport(out_dir, mapper_id(out_dir), manifest, parameters, clock.seconds)


@torch.inference_mode()
def accumulate(
    moments: PairMoments,
    data: TokenSequences,
    small: Any,
    large: Any,
    ropes: tuple[Rope, Rope],
    advance: Callable[[int], None] = lambda tokens: None,
    *,
    first_token_weight: int = 1,
) -> None:
    """Run both models over `data` and add their position-free KV to `moments`, batch by batch.

    Every sequence's first token counts `first_token_weight` times.
    """
    per_batch = max(1, _BATCH_TOKENS // data.ids_ST.shape[1])
    for ids_BT in torch.split(data.ids_ST, per_batch):
        sources = position_free_kv(small, ropes[0], ids_BT)
        targets = position_free_kv(large, ropes[1], ids_BT)
        for part, kv_x, kv_y in zip((moments.k, moments.v), sources, targets, strict=True):
            x_NF, y_NO = _observations(kv_x), _observations(kv_y)
            part.update(x_NF, y_NO)
            if first_token_weight > 1:
                step = ids_BT.shape[1]
                part.update(x_NF[::step], y_NO[::step], first_token_weight - 1)
        advance(ids_BT.numel())


def solve(
    moments: PairMoments, unseen: PairMoments, k: int, support: Support, ridge: Ridge
) -> tuple[LinearWeights, LayerR2]:
    """Choose layers and fit keys and values from moments; R2 is that on the `unseen` moments."""
    source, target = moments.source, moments.target
    chosen = choose_layers(single_source_r2_SL(moments), k)
    k_fit = solve_layers(moments.k, source, target, chosen, support, ridge)
    v_fit = solve_layers(moments.v, source, target, chosen, support, ridge)
    weights = LinearWeights(
        chosen, k_fit.weight_LGFO, k_fit.bias_LGO, v_fit.weight_LGFO, v_fit.bias_LGO
    )
    r2 = LayerR2(
        k=tuple(r2_L(unseen.k, k_fit, source, target, chosen).tolist()),
        v=tuple(r2_L(unseen.v, v_fit, source, target, chosen).tolist()),
    )
    return weights, r2


def _mixed(texts: Iterable[str]) -> list[str]:
    """The texts in a fixed random order, so that a bound on tokens takes some of every kind."""
    mixed = list(texts)
    Random(0).shuffle(mixed)
    return mixed


def _observations(kv_LNHD: torch.Tensor) -> torch.Tensor:
    """[L, N, H, D] -> [N, L*H*D], the order of `ridge.feature_index`."""
    return kv_LNHD.transpose(0, 1).flatten(1).cpu()


def _require_one_tokenizer(source: ModelFingerprint, target: ModelFingerprint) -> None:
    if source.tokenizer_sha256 != target.tokenizer_sha256:
        raise MapperError(
            "tokenizer.json differs between source and target: positions of their caches would not "
            "line up; use two models of one family, or copy one tokenizer.json over the other if "
            "they are known to be equal"
        )


def _require_observations(observations: int, width: int) -> None:
    if observations <= width:
        raise MapperError(
            f"{observations} calibration tokens cannot determine {width} features per output; give "
            f"more text (at least {int(COMFORTABLE_RATIO * width)} tokens), a smaller k or "
            f"support head_local"
        )
    if observations < COMFORTABLE_RATIO * width:
        warnings.warn(
            f"only {observations / width:.1f} calibration tokens per feature; below "
            f"{COMFORTABLE_RATIO:.0f} a mapper follows its calibration text too closely",
            stacklevel=3,
        )


def _record(data: TokenSequences) -> DataRecord:
    return DataRecord(
        tokens=data.tokens,
        texts=data.texts,
        sequence_tokens=data.ids_ST.shape[1],
        sha256=data.sha256,
    )


def _created_by() -> str:
    try:
        return f"kvcascade {version('kvcascade')}"
    except PackageNotFoundError:
        return "kvcascade, run from its source tree"


class _Stages:
    """Wall-clock seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[name] = perf_counter() - start


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
