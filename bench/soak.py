"""Hundreds of handoffs over limited links: nothing fails, memory stays flat, pools end up empty.

`python bench/soak.py` makes four Ray nodes out of network namespaces behind links of 1 Gb/s,
deploys the quickstart cascade, keeps four handoffs of mixed lengths in flight, and writes
bench/SOAK.md and bench/soak.png. It ends with code 1 when something did not hold. Needs root, `ip`
and `tc`, and the quickstart pair (`kvcascade models`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.links import Again, require_namespaces
from bench.soak_memory import growths
from bench.soak_page import heads, page, plot, problems
from bench.soak_runs import Soak, content_of, measure, read
from cluster.demo_findings import machine
from cluster.fitting import prepare_quickstart

_BENCH = Path(__file__).resolve().parent
_DEFAULT = Soak()


def main(
    handoffs: Annotated[int, typer.Option(help="How many.", min=100)] = _DEFAULT.handoffs,
    tokens: Annotated[list[int], typer.Option(help="Lengths; repeatable.", min=128)] = [  # noqa: B006
        *_DEFAULT.tokens
    ],
    in_flight: Annotated[int, typer.Option(help="At once.", min=1)] = _DEFAULT.in_flight,
    rate_gbps: Annotated[float, typer.Option(help="Of every link.")] = _DEFAULT.rate_gbps,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of SOAK.md and soak.png.")] = _BENCH,
    again: Again = None,
) -> None:
    """Hand over until something gives."""
    console = Console(highlight=False)
    if again is not None:
        content = json.loads(again.read_text())
        soak, found, about = Soak(**content["soak"]), read(content), content["machine"]
    else:
        require_namespaces()
        soak = Soak(handoffs, tokens, in_flight=in_flight, rate_gbps=rate_gbps)
        prepare_quickstart(console)
        about = machine()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("", total=handoffs)
            found = measure(
                soak, lambda text, n: progress.update(task, description=text, completed=n)
            )
        if json_path is not None:
            json_path.write_text(json.dumps(content_of(soak, found, about), indent=1) + "\n")
    for line in heads(growths(found.memory)):
        console.print(line)
    command = "python bench/soak.py" + (
        f" --handoffs {soak.handoffs}" if soak.handoffs != 500 else ""
    )
    (out / "SOAK.md").write_text(page(soak, found, about, command))
    plot(found, out / "soak.png")
    wrong = problems(soak, found)
    console.print("\n".join(wrong) or "It held.")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
