"""Time to the large model's first token over real links, beside re-prefill and the planner.

`python bench/handoff.py` makes four Ray nodes out of network namespaces, deploys the quickstart
cascade on them, and hands conversations of several lengths over by links of several rates, with
the mapper on the source's node, the target's and its own. It writes bench/HANDOFF.md and
bench/handoff.png. Needs root, `ip` and `tc`, and the quickstart pair (`kvcascade models`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.handoff_page import about_text, page, rich_table
from bench.handoff_plan import Planner
from bench.handoff_plot import plot
from bench.handoff_runs import PLACES, Matrix, Measured, Run, measure
from bench.links import UNLIMITED, Again, rates_of, require_namespaces
from cluster.demo_findings import machine
from cluster.fitting import prepare_quickstart
from cluster.sources import quickstart_mapper_folder

_BENCH = Path(__file__).resolve().parent


def main(
    rate: Annotated[
        list[str], typer.Option(help="Gb/s of every link, or `unlimited`; repeatable.")
    ] = ["0.1", "1", "5", UNLIMITED],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="Prompt lengths; repeatable.", min=128)] = [  # noqa: B006
        560,
        2_060,
        6_060,
    ],
    place: Annotated[list[str], typer.Option(help="The mapper's places; repeatable.")] = [*PLACES],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Runs of everything.", min=1)] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every run and all rows to this file.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of HANDOFF.md and handoff.png.")] = _BENCH,
    again: Again = None,
) -> None:
    """Measure handoffs by link rate, length and place of the mapper."""
    console = Console(highlight=False)
    if unknown := set(place) - set(PLACES):
        raise typer.BadParameter(f"{sorted(unknown)}: places are {', '.join(PLACES)}")
    if again is not None:
        content = json.loads(again.read_text())
        runs = [Run(**one) for one in content["runs"]]
        found = Measured(runs, content["seconds"], content["load_averages"])
        about = content["machine"]
    else:
        require_namespaces()
        rates_gbps = rates_of(rate)
        prepare_quickstart(console)
        about = machine()
        found = measure(Matrix(rates_gbps, sorted(tokens), place, rounds), console)
        if json_path is not None:
            # Before anything is made of it: it took minutes.
            write_json(json_path, about, found)
    _report(console, about, found, json_path, out)


def _report(
    console: Console, about: dict[str, Any], found: Measured, json_path: Path | None, out: Path
) -> None:
    from cluster.catalog import architecture

    manifest = json.loads((Path(quickstart_mapper_folder()) / "manifest.json").read_text())
    models = architecture("small"), architecture("large")
    planner = Planner(*models, manifest["k"], found.runs)
    rows = planner.rows()
    console.print(rich_table(rows))
    console.print(f"The planner was told: {about_text(planner.rates)}.")
    console.print(f"seconds: {found.seconds}; load averages: {found.load_averages}")
    text = page(
        rows,
        found.runs,
        planner.rates,
        about,
        found.seconds,
        found.load_averages,
    )
    (out / "HANDOFF.md").write_text(text)
    plot(rows, [run for run in found.runs if run.first and run.good], out / "handoff.png")
    console.print(f"Page and picture are in {out}.")
    if json_path is not None:
        write_json(
            json_path,
            about,
            found,
            rates=asdict(planner.rates),
            rows=[{**asdict(row), "off": row.off, "blame": row.blame} for row in rows],
        )


def write_json(path: Path, about: dict[str, Any], found: Measured, **more: Any) -> None:
    """Everything that was measured, and what was made of it."""
    content = {"machine": about, **asdict(found), **more}
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
