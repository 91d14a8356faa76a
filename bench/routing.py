"""Quality against the part of the answers that escalate, on the quickstart pair.

`python bench/routing.py` serves the cascade twice, first to calibrate, then to route; asks it some
thousand questions; and writes bench/ROUTING.md and bench/routing.png. Answers are kept in a
folder, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.prompts import CALIBRATION_PROMPTS, Prompt, split
from bench.routing_collect import MAX_TOKENS, Ask, Cache, Endpoint, collect
from bench.routing_costs import prices_of
from bench.routing_page import page, plot
from bench.routing_report import LARGE, SMALL, Study, cascade_run
from bench.routing_serve import calibrate, calibrated, served, variant, watching
from cluster.cli import QUICKSTART_CONFIG
from cluster.config import load_serve_config
from cluster.errors import ConfigError
from cluster.quickstart.pair import default_home
from cluster.sources import quickstart_mapper_folder
from router.calibration import Calibration, read_calibration

TARGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
HELD_OUT = 600
CONCURRENCY = 8
_FILE_TARGET = 0.3
_BENCH = Path(__file__).resolve().parent


class Phase(StrEnum):
    """Parts of the bench, in order."""

    collect = "collect"
    run = "run"
    report = "report"


def baseline_asks(
    calibration: Sequence[Prompt], held_out: Sequence[Prompt], cascade: str, small: str, large: str
) -> list[Ask]:
    """What is asked of an endpoint that scores and never escalates (`routing_serve.watching`).

    Calibration prompts go to the routed model, whose answers are the calibration's log; the
    others to both models by their own names.
    """
    asks = [
        Ask(key=one.key, run=SMALL, text=one.text, model=cascade, margins=True)
        for one in calibration
    ]
    for one in held_out:
        asks.append(Ask(key=one.key, run=SMALL, text=one.text, model=small, margins=True))
        asks.append(Ask(key=one.key, run=LARGE, text=one.text, model=large))
    return asks


def routed_asks(held_out: Sequence[Prompt], model: str, calibration_id: str) -> list[Ask]:
    """Every held-out prompt at every target."""
    return [_routed(one, model, calibration_id, target) for one in held_out for target in TARGETS]


def repeated_asks(
    held_out: Sequence[Prompt], model: str, calibration_id: str, cache: Cache
) -> list[Ask]:
    """Those of `routed_asks` that a handoff answered, to be answered by reading again.

    For all others reading again is what happened already, or nothing was escalated.
    """
    asks = []
    for target in TARGETS:
        for one in held_out:
            answer = cache.get(one.key, cascade_run(target, "mapped", calibration_id))
            handoff = None if answer is None else answer.cascade.handoff
            if handoff is not None and handoff.path == "mapped":
                asks.append(_routed(one, model, calibration_id, target, recompute=True))
    return asks


def _routed(
    prompt: Prompt, model: str, calibration_id: str, target: float, *, recompute: bool = False
) -> Ask:
    run = cascade_run(target, "recompute" if recompute else "mapped", calibration_id)
    return Ask(
        key=prompt.key,
        run=run,
        text=prompt.text,
        model=model,
        # A session of its own, so that no request finds what an earlier one left.
        cascade={
            "target_fraction": target,
            "recompute": recompute,
            "session_id": f"{prompt.key} {run}".replace(" ", "-"),
        },
    )


def ask_all(url: str, asks: Sequence[Ask], cache: Cache, concurrency: int, title: str) -> None:
    """Ask with a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=len(asks))

        async def run() -> None:
            async with Endpoint(url) as client:
                await collect(
                    client,
                    asks,
                    cache,
                    concurrency=concurrency,
                    advance=lambda: progress.advance(task),
                )

        asyncio.run(run())


@contextlib.contextmanager
def endpoint(
    url: str | None, routing: dict[str, Any], folder: Path, name: str, port: int
) -> Iterator[str]:
    """The running endpoint at `url`, or a cascade of our own with this `routing`."""
    document, _ = load_serve_config(QUICKSTART_CONFIG)
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(variant(document, routing, port), sort_keys=False))
    if url is not None:
        yield url
        return
    with (
        Console(stderr=True).status(f"serving {config}; this takes about a minute") as status,
        served(config) as ours,
    ):
        status.stop()
        yield ours


def main(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of answers, configs and the calibration. Unset: in the cache."),
    ] = None,
    phase: Annotated[
        list[Phase] | None, typer.Option(help="Only these parts. Unset: all in order.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Endpoint that runs already, with OUT/<phase>.yaml. Unset: serve it here."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="A trial with so many prompts of each part; writes nothing to bench/."),
    ] = None,
    held_out_prompts: Annotated[
        int, typer.Option("--held-out", help="Prompts to measure on.", min=10)
    ] = HELD_OUT,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.", min=1)] = CONCURRENCY,
    port: Annotated[int, typer.Option(help="Port of the cascade that is served here.")] = 8000,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
) -> None:
    """Measure what routing gains, or go on with a measurement that was interrupted."""
    phases = set(phase or Phase)
    out = out or default_home() / "routing-bench"
    folder = out if limit is None else out / f"trial-{limit}"
    folder.mkdir(parents=True, exist_ok=True)
    calibration_prompts, held_out = split(CALIBRATION_PROMPTS)
    calibration_prompts = calibration_prompts[:limit]
    held_out = held_out[: held_out_prompts if limit is None else limit]
    cache = Cache(folder / "answers.jsonl")
    file, log_file = folder / "calibration.json", folder / "decisions.jsonl"
    _, config = load_serve_config(QUICKSTART_CONFIG)
    cascade, small, large = config.cascade_name, config.small.name, config.large.name

    if Phase.collect in phases:
        asks = baseline_asks(calibration_prompts, held_out, cascade, small, large)
        if cache.lacks(asks):
            with endpoint(url, watching(log_file), folder, "collect", port) as there:
                ask_all(there, asks, cache, concurrency, "both models alone")
        if not file.is_file():
            calibrate(log_file, _FILE_TARGET, file)
    made = read_calibration(file)
    if made.size < len(calibration_prompts):
        raise ConfigError(f"{file} is of {made.size} answers; remove it and {log_file}, and again")
    if Phase.run in phases:
        routed = routed_asks(held_out, cascade, made.calibration_id)

        def again() -> list[Ask]:
            return repeated_asks(held_out, cascade, made.calibration_id, cache)

        if cache.lacks(routed) or cache.lacks(again()):
            with endpoint(url, calibrated(file), folder, "run", port) as there:
                ask_all(there, routed, cache, concurrency, "routed")
                ask_all(there, again(), cache, concurrency, "reading again")
    if Phase.report in phases:
        _report(held_out, calibration_prompts, cache, made, folder if limit else _BENCH, json_path)


def _report(
    held_out: Sequence[Prompt],
    calibration_prompts: Sequence[Prompt],
    cache: Cache,
    made: Calibration,
    into: Path,
    json_path: Path | None,
) -> None:
    _, config = load_serve_config(QUICKSTART_CONFIG)
    prices = prices_of(config.small.source, config.large.source, quickstart_mapper_folder())
    names = {SMALL: config.small.name, LARGE: config.large.name}
    study = Study(held_out, calibration_prompts, cache, made, TARGETS, names, prices)
    report = study.report() | {"flop_per_token": asdict(prices)}
    text = page(report, MAX_TOKENS)
    (into / "ROUTING.md").write_text(text)
    plot(report, into / "routing.png")
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    typer.echo(text)
    typer.echo(f"written: {into / 'ROUTING.md'} and {into / 'routing.png'}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
