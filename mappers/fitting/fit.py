"""Fitting a mapper for an ordered pair of models: the two calls that do it.

What they are given is gathered in `inputs`; `run` does the work, stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from cluster.errors import MapperError
from mappers.fitting.accumulate import ShardWritten
from mappers.fitting.inputs import FitSettings, gather
from mappers.fitting.passes import FitPlan
from mappers.fitting.progress import Bars, Stages
from mappers.fitting.run import FitRun
from mappers.fitting.sizes import COMFORTABLE_RATIO
from mappers.fitting.sweep import SweepResult
from mappers.manifest import MapperManifest
from mappers.store import mapper_id

__all__ = ["COMFORTABLE_RATIO", "FitReport", "FitSettings", "fit", "fit_shard"]


@dataclass(frozen=True, slots=True)
class FitReport:
    """What a fit wrote and what it cost. `seconds` are wall-clock, by stage."""

    folder: Path
    mapper_id: str
    manifest: MapperManifest
    parameters: int
    seconds: dict[str, float]
    plan: FitPlan
    sweep: SweepResult | None


def fit(
    source_dir: Path,
    target_dir: Path,
    texts: Iterable[str],
    heldout_texts: Iterable[str],
    out_dir: Path,
    settings: FitSettings | None = None,
    *,
    device: torch.device | str = "cpu",
    sequential: bool | None = None,
    work_dir: Path | None = None,
    checkpoint_s: float = 300.0,
    shards: int | None = None,
    memory_bytes: int | None = None,
    console: Console | None = None,
) -> FitReport:
    """Fit, judge and write the mapper from `source_dir`'s model to `target_dir`'s into `out_dir`.

    With `sequential`, by default where both models do not fit into memory, one model is loaded
    after the other; where both cannot even be judged together, the mapper is written without a
    score. `work_dir`, by default `<out_dir>.work`, holds checkpoints; a call with the same models,
    data and settings goes on from them, and success removes it. With `shards` n the moments are
    those that n calls of `fit_shard` left there. `memory_bytes` overrides what is free.
    Writes nothing to `out_dir` unless everything succeeds; a refused mapper is written with its
    verdict.

    Raises MapperError when the tokenizers differ, memory or observations do not suffice, shards are
    missing, or `out_dir` holds something else. Warns below five observations per feature.
    """
    console = console or Console()
    inputs = gather(
        (source_dir, target_dir),
        (texts, heldout_texts),
        out_dir,
        settings or FitSettings(),
        device=device,
        sequential=sequential,
        work_dir=work_dir,
        memory_bytes=memory_bytes,
        console=console,
    )
    clock = Stages()
    with Bars(console) as bars:
        run = FitRun(inputs, bars, clock, checkpoint_s=checkpoint_s, shards=shards)
        manifest, parameters, sweep = run.whole(out_dir)
    inputs.work.remove()
    return FitReport(
        out_dir, mapper_id(out_dir), manifest, parameters, clock.seconds, inputs.plan, sweep
    )


def fit_shard(
    source_dir: Path,
    target_dir: Path,
    texts: Iterable[str],
    heldout_texts: Iterable[str],
    out_dir: Path,
    settings: FitSettings | None = None,
    *,
    shard: tuple[int, int],
    device: torch.device | str = "cpu",
    sequential: bool | None = None,
    work_dir: Path | None = None,
    checkpoint_s: float = 300.0,
    memory_bytes: int | None = None,
    console: Console | None = None,
) -> Path:
    """Do the i-th of n shares of the reading, `shard` (i, n) from 1, and leave it for `fit`.

    Gives the file that it left in the work folder. Where the plan has several passes, every pass is
    read in shards and merged by `fit` before the next. Other parameters and errors as in `fit`.
    """
    index, count = shard
    if not 1 <= index <= count:
        raise MapperError(f"shard {index}/{count}: count from 1/{count} to {count}/{count}")
    console = console or Console()
    inputs = gather(
        (source_dir, target_dir),
        (texts, heldout_texts),
        out_dir,
        settings or FitSettings(),
        device=device,
        sequential=sequential,
        work_dir=work_dir,
        memory_bytes=memory_bytes,
        console=console,
    )
    with Bars(console) as bars:
        run = FitRun(inputs, bars, Stages(), checkpoint_s=checkpoint_s, shard=shard)
        try:
            run.read_shard()
        except ShardWritten as written:
            return written.path
    raise MapperError(f"nothing is left for shards in {inputs.work.folder}; run with --shards")
