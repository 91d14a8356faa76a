"""Throughput of handoffs with one, two and three mappers, and while their number changes.

`python bench/scaling.py` makes six Ray nodes out of network namespaces, deploys a pair whose
handoffs are nearly all transport, and asks for as many handoffs as mappers behind limited links can
do; then it goes from one mapper to three and back under load, by hand and by their own signal. It
writes bench/SCALING.md and bench/scaling.png. Needs root, `ip` and `tc`, and the quickstart pair
(`kvcascade models`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.links import Again, require_namespaces
from bench.load import Outcome
from bench.load_model import make_tiny_model
from bench.scaling_page import page, rich_table
from bench.scaling_plot import plot
from bench.scaling_runs import Episode, Matrix, Measured, Window, measure
from bench.scaling_table import change_of, rows_of
from cluster.demo_findings import machine
from cluster.fitting import prepare_quickstart

_BENCH = Path(__file__).resolve().parent
_DEFAULT = Matrix()


def main(
    rate: Annotated[
        list[float], typer.Option(help="Gb/s of each mapper's link; repeatable.")
    ] = list(_DEFAULT.rates_gbps),  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Of everything.", min=1)] = _DEFAULT.rounds,
    window_s: Annotated[float, typer.Option(help="Seconds of load.")] = _DEFAULT.window_s,
    tokens: Annotated[int, typer.Option(help="Length of conversations.")] = _DEFAULT.tokens,
    in_flight: Annotated[
        int, typer.Option(help="Handoffs in flight for each mapper.")
    ] = _DEFAULT.in_flight_per_mapper,
    quickstart: Annotated[bool, typer.Option(help="The quickstart pair, too.")] = True,
    episodes: Annotated[bool, typer.Option(help="Change the number of mappers, too.")] = True,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of SCALING.md and scaling.png.")] = _BENCH,
    again: Again = None,
) -> None:
    """Measure how handoffs grow with mappers."""
    console = Console(highlight=False)
    if again is not None:
        content = json.loads(again.read_text())
        matrix, found = Matrix(**content["matrix"]), read(content)
        about = content["machine"]
    else:
        require_namespaces()
        matrix = Matrix(sorted(rate), rounds, window_s, tokens, in_flight, quickstart, episodes)
        prepare_quickstart(console)
        about = machine()
        with (
            tempfile.TemporaryDirectory() as folder,
            console.status("making the tiny pair") as status,
        ):
            model, found = make_tiny_model(Path(folder)), Measured()
            try:
                measure(matrix, model, found, status.update)
            finally:
                if json_path is not None:
                    content = content_of(matrix, found, about)
                    json_path.write_text(json.dumps(content, indent=1) + "\n")
    rows = rows_of(found.windows, about["cores"])
    changes = [change_of(episode) for episode in found.episodes]
    console.print(rich_table(rows))
    for change in changes:
        console.print(change)
    loads, command = found.load_averages, command_of(matrix)
    text = page(rows, changes, matrix, about, loads, found.seconds, command)
    (out / "SCALING.md").write_text(text)
    plot(rows, found.episodes, out / "scaling.png")
    console.print(f"Page and picture are in {out}.")


def command_of(matrix: Matrix) -> str:
    """What measures this."""
    words = ["python bench/scaling.py"]
    if list(matrix.rates_gbps) != list(_DEFAULT.rates_gbps):
        words += [f"--rate {rate:g}" for rate in matrix.rates_gbps]
    for name in ("rounds", "window_s", "tokens", "in_flight_per_mapper"):
        if getattr(matrix, name) != getattr(_DEFAULT, name):
            option = name.removesuffix("_per_mapper").replace("_", "-")
            words.append(f"--{option} {getattr(matrix, name):g}")
    for name in ("quickstart", "episodes"):
        if not getattr(matrix, name):
            words.append(f"--no-{name}")
    return " ".join(words)


def content_of(matrix: Matrix, found: Measured, about: dict[str, Any]) -> dict[str, Any]:
    """Of the `--json` file."""
    return {"machine": about, "matrix": asdict(matrix), **asdict(found)}


def read(content: dict[str, Any]) -> Measured:
    """What `content_of` made."""
    episodes = [
        Episode(
            name=one["name"],
            outcomes=[Outcome.from_json(outcome) for outcome in one["outcomes"]],
            events=[(at_s, what) for at_s, what in one["events"]],
        )
        for one in content["episodes"]
    ]
    windows = [Window(**one) for one in content["windows"]]
    return Measured(windows, episodes, content["load_averages"], content["seconds"])


if __name__ == "__main__":
    typer.run(main)
