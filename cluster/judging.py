"""Judging a named pair of models in depth: finds folders and text, calls mappers, writes reports.

Verdicts go into the mappers' manifests, where serving reads them; the report goes into a folder of
its own. Holds no mathematics, and prints nothing but progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import MapperError
from cluster.fitting import hide_loading_bars, named_folder, quickstart_texts, read_texts
from cluster.sources import resolve_mapper

if TYPE_CHECKING:
    from rich.console import Console

    from mappers.capture import TokenSequences
    from mappers.fingerprint import ModelFingerprint
    from mappers.judging.report import DirectionReport, PairReport
    from mappers.mapper import Mapper

REPORT_FILE = "report.json"
PAGE_FILE = "report.html"

_PREFIX_TOKENS = 1_024
_SMALL_PREFIX_TOKENS = 256
# Below this hidden size a model makes little of a prefix of _PREFIX_TOKENS.
_SMALL_HIDDEN = 1_024
_WINDOWS = 16
_CONVERSATIONS = 8
_QUESTIONS = 24
_CONTINUATIONS = 6

Bar = Callable[[str, int], Callable[[int], None]]
"""Begins a progress bar of a name and a total; gives what advances it."""


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    folder: Path
    fingerprint: ModelFingerprint
    model: Any


@dataclass(frozen=True, slots=True)
class _Way:
    """One ordered pair and the mapper between them."""

    source: _Side
    target: _Side
    folder: Path | str
    mapper: Mapper


def validate_pair(
    source: str,
    target: str,
    mapper: str,
    *,
    reverse: str | None = None,
    tokens: int | None = None,
    prefix_tokens: int | None = None,
    native_suffix_tokens: int = 1,
    text: Path | None = None,
    out: Path | None = None,
    device: str = "cpu",
    console: Console,
) -> tuple[PairReport, Path]:
    """Judge `mapper`, and `reverse` for the way back, and write report.json and report.html.

    Gives the report and its folder: `out`, or `<mapper>-report` in the working directory. Every
    mapper folder's manifest gets its new score and verdict; nothing else in it is touched. Unset,
    `prefix_tokens` is 1,024, or less for small models, and `tokens` 16 windows of twice that.
    Raises MapperError or ModelError with what to change.
    """
    import torch
    from rich.progress import Progress

    from mappers.capture import TokenSequences, load_model, windows
    from mappers.fingerprint import fingerprint
    from mappers.judging.drift import drift
    from mappers.judging.report import PairReport
    from mappers.manifest import created_by

    hide_loading_bars()
    folder = resolve_mapper(mapper)
    back = None if reverse is None else resolve_mapper(reverse)
    out = out or Path(f"{Path(folder).name}-report")
    _require_report_folder(out)
    near, far = (
        _Side(name, at, fingerprint(at), load_model(at, torch.bfloat16, device))
        for name, at in ((source, named_folder(source)), (target, named_folder(target)))
    )
    ways = [_way(near, far, folder, device)]
    if back is not None:
        ways.append(_way(far, near, back, device))
    prefix = prefix_tokens or _prefix_tokens(near.fingerprint, far.fingerprint)
    unseen = windows(
        quickstart_texts()[1] if text is None else read_texts(text),
        near.folder,
        2 * prefix,
        tokens or _WINDOWS * 2 * prefix,
    )
    drifted = None
    with Progress(console=console, transient=True) as progress:

        def bar(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total)
            return lambda done: progress.advance(task, done)

        directions = [_direction(way, unseen, prefix, native_suffix_tokens, bar) for way in ways]
        if len(ways) == 2:
            some = TokenSequences(unseen.ids_ST[:_CONVERSATIONS], unseen.texts)
            drifted = drift(
                near.model,
                far.model,
                ways[0].mapper,
                ways[1].mapper,
                some,
                advance=bar("alternating handoffs", len(some.ids_ST)),
            )
    report = PairReport(
        forward=directions[0],
        reverse=directions[1] if len(directions) == 2 else None,
        drift=drifted,
        notes=() if drifted else (_NO_REVERSE,),
        created_by=created_by(),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    for way, direction in zip(ways, directions, strict=True):
        _record(way.folder, direction)
    _write(out, report)
    return report, out


_NO_REVERSE = (
    "Alternating handoffs were not run: they need a mapper for the way back too. Make one with "
    "`kvcascade fit`, source and target exchanged, and give it as --reverse."
)


def _direction(
    way: _Way, unseen: TokenSequences, prefix: int, native_suffix_tokens: int, bar: Bar
) -> DirectionReport:
    """Score, generation task and verdict of one ordered pair."""
    from transformers import AutoTokenizer

    from mappers.judging.generation import generation_task
    from mappers.judging.report import DirectionReport
    from mappers.judging.score import score_mapper
    from mappers.judging.verdict import cautions
    from mappers.store import mapper_id

    name = f"{way.source.name} to {way.target.name}"
    score = score_mapper(
        way.source.model,
        way.target.model,
        way.mapper,
        unseen,
        prefix_tokens=prefix,
        native_suffix_tokens=native_suffix_tokens,
        advance=bar(f"{name}: held-out windows", len(unseen.ids_ST)),
    )
    continued = min(_CONTINUATIONS, len(unseen.ids_ST))
    generation = generation_task(
        way.source.model,
        way.target.model,
        way.mapper,
        AutoTokenizer.from_pretrained(way.source.folder),
        unseen,
        items=_QUESTIONS,
        continuations=continued,
        prefix_tokens=prefix,
        advance=bar(f"{name}: questions", _QUESTIONS + continued),
    )
    return DirectionReport(
        source=way.source.name,
        target=way.target.name,
        mapper=Path(way.folder).name,
        mapper_id=mapper_id(way.folder),
        score=score,
        generation=generation,
        cautions=cautions(generation, score.thresholds),
    )


def _way(source: _Side, target: _Side, folder: Path | str, device: str) -> _Way:
    from mappers.store import load_mapper

    prints = source.fingerprint, target.fingerprint
    return _Way(source, target, folder, load_mapper(folder, *prints, device, allow_refused=True))


def _prefix_tokens(source: ModelFingerprint, target: ModelFingerprint) -> int:
    usual = _PREFIX_TOKENS if target.hidden_size >= _SMALL_HIDDEN else _SMALL_PREFIX_TOKENS
    return min(usual, source.max_position // 2, target.max_position // 2)


def _record(folder: Path | str, direction: DirectionReport) -> None:
    """Put a verdict where serving reads it. The identity has no folder."""
    from mappers.manifest import read_manifest
    from mappers.store import IDENTITY, write_manifest

    if str(folder) == IDENTITY:
        return
    manifest = read_manifest(Path(folder))
    write_manifest(Path(folder), manifest.model_copy(update={"score": direction.score}))


def _require_report_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise MapperError(f"{out} is a file; give a folder for the report")
    if (out / "manifest.json").exists():
        raise MapperError(f"{out} is a mapper's folder, which holds nothing else; give another")


def _write(out: Path, report: PairReport) -> None:
    from mappers.judging.page import page

    out.mkdir(parents=True, exist_ok=True)
    (out / REPORT_FILE).write_text(report.model_dump_json(indent=2) + "\n")
    (out / PAGE_FILE).write_text(page(report))
