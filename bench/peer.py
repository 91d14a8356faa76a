"""This project's handoff beside Ray Serve LLM's prefill/decode application, over the same links.

`python bench/peer.py` makes four Ray nodes out of network namespaces and deploys one system after
the other on them: the identity handoff (same model at both ends), the quickstart's mapped one, and
Ray's application with vLLM's NixlConnector. It measures each transfer and the time to the target's
first token by link rate and length, and writes bench/PEER.md. Needs root, `ip` and `tc`, and the
quickstart pair (`kvcascade models`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.links import UNLIMITED, rates_of, require_namespaces
from bench.peer_page import page, rich_table, rows_of
from bench.peer_runs import MODEL, SYSTEMS, Matrix, Measured, Run, measure
from cluster.demo_findings import machine
from cluster.fitting import prepare_quickstart
from cluster.sources import kv_bytes_per_token

_BENCH = Path(__file__).resolve().parent


def main(
    rate: Annotated[
        list[str], typer.Option(help="Gb/s of every link, or `unlimited`; repeatable.")
    ] = ["0.5", "1", UNLIMITED],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="Prompt lengths; repeatable.", min=128)] = [  # noqa: B006
        560,
        2_060,
        6_060,
    ],
    system: Annotated[
        list[str], typer.Option(help="Which, in the order of their turns; repeatable.")
    ] = [one.key for one in SYSTEMS],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="Runs of everything.", min=1)] = 3,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every run to this file.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of PEER.md.")] = _BENCH,
    again: Annotated[
        list[Path],
        typer.Option(
            "--from", help="Measure nothing: make the page of such files; later ones count."
        ),
    ] = [],  # noqa: B006
) -> None:
    """Measure handoffs beside Ray's prefill/decode application."""
    console = Console(highlight=False)
    systems = {one.key: one for one in SYSTEMS}
    if unknown := set(system) - set(systems):
        raise typer.BadParameter(f"{sorted(unknown)}: systems are {', '.join(systems)}")
    if again:
        about, found = {}, Measured()
        for path in again:
            content = json.loads(path.read_text())
            about = content["machine"]
            runs = [Run(**one) for one in content["runs"]]
            # A system of a later file takes the place of an earlier one's.
            newer = {run.system for run in runs}
            found.runs = [run for run in found.runs if run.system not in newer] + runs
            found.seconds |= content["seconds"]
            found.load_averages |= content["load_averages"]
    else:
        require_namespaces()
        rates_gbps = rates_of(rate)
        prepare_quickstart(console)
        about = machine()
        chosen = [systems[key] for key in system]

        def save(so_far: Measured) -> None:
            if json_path is not None:
                content = {"machine": about, **asdict(so_far)}
                json_path.write_text(json.dumps(content, indent=1) + "\n")

        found = measure(Matrix(chosen, rates_gbps, sorted(tokens), rounds), console, save)
    rows = rows_of(found.runs)
    console.print(rich_table(rows))
    console.print(f"seconds: {found.seconds}; load averages: {found.load_averages}")
    kv_bytes = kv_bytes_per_token(MODEL, "bfloat16")
    text = page(rows, found.runs, about, found.seconds, found.load_averages, kv_bytes)
    (out / "PEER.md").write_text(text)
    console.print(f"The page is {out / 'PEER.md'}.")


if __name__ == "__main__":
    typer.run(main)
