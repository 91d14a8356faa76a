"""What a fit is given, checked and made ready: models, text, a plan of passes and a work folder."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch
from rich.console import Console

from cluster.errors import MapperError
from mappers.capture import TokenSequences, pack, windows
from mappers.fingerprint import ModelFingerprint, fingerprint
from mappers.fitting.moments import available_memory_bytes
from mappers.fitting.passes import FitPlan, batch_tokens, plan_fit
from mappers.fitting.sizes import COMFORTABLE_RATIO
from mappers.fitting.spool import Feed, ModelPair, checkpoint_bytes
from mappers.fitting.work import Work
from mappers.manifest import Ridge, Selection, Support
from mappers.mlp import HIDDEN_UNITS
from mappers.rope import Rope
from mappers.store import require_replaceable
from mappers.supports import feature_width

# Of what is free; the rest is for what no estimate counts.
_USABLE = 0.9


@dataclass(frozen=True, slots=True)
class FitSettings:
    """All that decides a mapper besides models and text.

    `k` is the number of source layers per target layer, None for all. `tokens` and
    `heldout_tokens` bound what is read of each set of texts, cut into sequences of
    `sequence_tokens`, whose first half is the prefix when the mapper is judged. Attention rests on
    the first token of a sequence, whose KV is far from all others; a fit in which it counts once
    misses it and loses a fifth of the top-1 agreement it could have, so it counts
    `first_token_weight` times. With `attention_weights` every token counts by what the target's
    attention reads of it (`attention_weights`), to the power `attention_power`, a first token as
    often as the larger of both says.
    A `sweep` chooses k and support itself, from `sweep.DEFAULT_KS` and all. With `fallback` a
    linear map that is refused gets networks of `network_units` on top of it, which are kept if they
    are accepted.
    """

    k: int | None = 8
    support: Support = "full"
    ridge: Ridge = field(default_factory=Ridge)
    selection: Selection = "top"
    attention_weights: bool = False
    attention_power: float = 0.5
    sweep: bool = False
    fallback: bool = False
    network_units: int = HIDDEN_UNITS
    tokens: int = 65_536
    heldout_tokens: int = 8_192
    sequence_tokens: int = 512
    first_token_weight: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def prefix_tokens(self) -> int:
        """Tokens of a held-out window that are mapped; the rest is scored."""
        return self.sequence_tokens // 2

    def k_of(self, layers: int) -> int:
        """Source layers per target layer for a source of so many."""
        return layers if self.k is None else self.k


@dataclass(frozen=True, slots=True)
class FitInputs:
    """Everything a fit needs, nothing of it loaded or run yet."""

    settings: FitSettings
    source: ModelFingerprint
    target: ModelFingerprint
    feed: Feed
    heldout: Feed
    models: ModelPair
    plan: FitPlan
    work: Work
    device: torch.device | str
    both_fit: bool


def gather(
    folders: tuple[Path, Path],
    texts: tuple[Iterable[str], Iterable[str]],
    out_dir: Path,
    settings: FitSettings,
    *,
    device: torch.device | str,
    sequential: bool | None,
    work_dir: Path | None,
    memory_bytes: int | None,
    console: Console,
) -> FitInputs:
    """Read fingerprints and text, plan, and say on `console` what will be done; see `fit.fit`."""
    require_replaceable(out_dir)
    source, target = (fingerprint(folder) for folder in folders)
    _require_one_tokenizer(source, target)
    length = settings.sequence_tokens
    calibration = pack(_mixed(texts[0]), folders[0], length, settings.tokens)
    unseen = windows(_mixed(texts[1]), folders[0], length, settings.heldout_tokens)
    shapes = source.geometry, target.geometry
    k = settings.k_of(source.layers)
    if not settings.sweep:
        width = feature_width(settings.support, k, *shapes)
        _require_observations(calibration.tokens, width)
    folder = work_dir or out_dir.with_name(f"{out_dir.name}.work")
    work = Work(folder, _key(settings, source, target, calibration, unseen), console)
    free = int(_USABLE * (memory_bytes or available_memory_bytes(device)))
    sizes = [_model_bytes(one, settings.dtype) for one in folders]
    if work.plan is None:
        plan, sequential = _plan(settings, source, target, free, sizes, sequential)
        work.begin(json.dumps({"plan": plan.model_dump(), "sequential": sequential}))
    else:
        recorded = json.loads(work.plan)
        plan, sequential = FitPlan.model_validate(recorded["plan"]), bool(recorded["sequential"])
    console.print(f"fitting a mapper: {plan.describe()}")
    size = batch_tokens(*shapes)
    ropes = Rope(source.rope, device), Rope(target.rope, device)
    models = ModelPair(folders, ropes, settings.dtype, device)
    spools = (folder / "calibration", folder / "heldout") if sequential else (None, None)
    feed = Feed(calibration, size, models, spools[0], attention_power=settings.attention_power)
    heldout = Feed(unseen, size, models, spools[1])
    if sequential:
        disk = sum(one.spool_bytes(source.geometry, settings.dtype) for one in (feed, heldout))
        console.print(f"one model after the other: {disk / 1e9:.2f} GB of disk in {folder}")
    return FitInputs(
        settings=settings,
        source=source,
        target=target,
        feed=feed,
        heldout=heldout,
        models=models,
        plan=plan,
        work=work,
        device=device,
        both_fit=not sequential or sum(sizes) < free,
    )


def _plan(
    settings: FitSettings,
    source: ModelFingerprint,
    target: ModelFingerprint,
    free: int,
    model_bytes: list[int],
    sequential: bool | None,
) -> tuple[FitPlan, bool]:
    """The plan, and whether one model is loaded after the other."""

    def plan(room: int) -> FitPlan:
        return plan_fit(
            source.geometry,
            target.geometry,
            settings.support,
            source.layers if settings.sweep else settings.k_of(source.layers),
            room,
            weighted=settings.attention_weights,
            sweep=settings.sweep,
            greedy=settings.selection == "greedy",
        )

    if sequential is None and not settings.sweep:
        try:
            return plan(free - sum(model_bytes)), False
        except MapperError:
            return plan(free - max(model_bytes)), True
    # A sweep judges while it holds the moments, so both models are in memory anyhow.
    both = settings.sweep or not sequential
    return plan(free - (sum if both else max)(model_bytes)), bool(sequential)


def _key(
    settings: FitSettings,
    source: ModelFingerprint,
    target: ModelFingerprint,
    calibration: TokenSequences,
    heldout: TokenSequences,
) -> str:
    """Names all that decides what a fit accumulates; unequal for any other fit."""
    named = asdict(settings) | {
        "ridge": settings.ridge.model_dump(),
        "dtype": str(settings.dtype),
        "source": source.model_dump(),
        "target": target.model_dump(),
        "data": [calibration.sha256, heldout.sha256],
    }
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _model_bytes(folder: Path, dtype: torch.dtype) -> int:
    return checkpoint_bytes(folder) * dtype.itemsize // 2


def _mixed(texts: Iterable[str]) -> list[str]:
    """The texts in a fixed random order, so that a bound on tokens takes some of every kind."""
    mixed = list(texts)
    Random(0).shuffle(mixed)
    return mixed


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
            f"more text (at least {COMFORTABLE_RATIO * width} tokens), a smaller k or "
            f"support head_local"
        )
    if observations < COMFORTABLE_RATIO * width:
        warnings.warn(
            f"only {observations / width:.1f} calibration tokens per feature; below "
            f"{COMFORTABLE_RATIO} a mapper follows its calibration text too closely",
            stacklevel=4,
        )
