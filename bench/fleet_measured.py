"""Puts measurements beside the simulation and writes a section of bench/FLEET.md about it.

`python bench/fleet_measured.py handoff.json scaling.json` takes what `bench/handoff.py --json` and
`bench/scaling.py --json` wrote, or any file that `kvcascade plan --measured` takes. It measures
nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.load_model import KV_BYTES_PER_TOKEN
from bench.markdown import markdown_table
from cluster.catalog import architecture
from cluster.plan_report import Scenario
from cluster.plan_tables import seconds
from cluster.simulate import Setup
from cluster.simulate_measured import AGREEMENT, Case, Compared, Measured, MeasuredLoop, compare
from cluster.simulate_runs import TCP_SHARE, read_cases
from cluster.simulate_spec import Load, Rules
from cluster.simulate_tables import agreement, compared_cells, print_compared

HEADING = "## How far the simulation is from measurements"
PLACES = {
    "source": "mapper at the source",
    "target": "at the target",
    "own": "on a node of its own",
}
CHUNK_TOKENS = 256
"""Of `bench/load_model.py`'s mappers."""

_IDENTITY_TOKENS_PER_S = 1e6
_GPUS_GB = 80.0
_PAGE = Path(__file__).resolve().parent / "FLEET.md"
_ABOUT = """\
The quickstart pair over links of network namespaces on one machine of few cores, one request at a
time: medians of the warm runs of `python bench/handoff.py --json handoff.json`. Simulated by the
same code as the fleet above. This section is made by

    python bench/fleet_measured.py handoff.json

and the table alone by `kvcascade plan --simulate --measured handoff.json`.
"""
_HOW = """\
The simulation is told what that run reached: the map's tokens per second at the middle length over
the widest link, what a handoff costs besides (ticket, queue, admission of the shortest ones) less
the target's step to its first token, which it simulates, and the rate of copies that nothing
limits. Copies within a node go at that rate; of a limited link's bytes 1,448 in 1,514 are payload,
the rest is frames' headers. Time to read a prompt has a part that grows with its length and one
that grows with its square (attention is slower per FLOP than the planner has it), found from what
was read again. A length's own time is not among what its prediction is made from, but the handoffs
at the middle length over the widest link gave the map's rate, the shortest ones what is besides.
"""


def main(
    files: Annotated[list[Path], typer.Argument(help="JSON files of measurements.")],
    page: Annotated[Path, typer.Option(help="Page that has the section.")] = _PAGE,
) -> None:
    """Compare, print, and write the section anew."""
    setup, cases = quickstart(), []
    for file in files:
        loops = scaling_loops(file)
        found = [Case(one, setup) for one in loops] if loops else read_cases([file], setup)
        cases.extend(found)
    rows = compare(cases)
    print_compared(rows)
    page.write_text(with_section(page.read_text(), section(rows)))
    typer.echo(f"section in {page}", err=True)


def quickstart() -> Setup:
    """The quickstart pair; what it runs on comes from the measurements."""
    scenario = Scenario(
        tokens=2_060,
        gpus=1,
        gpu_name=None,
        gpu_tflops=1.0,
        gpu_memory_gb_s=None,
        efficiency=1.0,
        links_gbps=(1.0,),
        overhead_ms=0.0,
        escalation=1.0,
        models=2,
        average_pair_gb=None,
    )
    rules = Rules(gpu_memory_gb=_GPUS_GB, small_gpus=1, large_gpus=1, mapper_gpus=1)
    return Setup(architecture("small"), architecture("large"), scenario, 1.0, Load(), rules)


def scaling_loops(path: Path) -> list[MeasuredLoop]:
    """What `bench/scaling.py` measured of the pair that is nearly all transport; [] for others.

    The quickstart pair's windows are left out: its maps share two cores, which are not simulated.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or "windows" not in content:
        return []
    windows: dict[tuple[float, int, int], list[dict[str, Any]]] = {}
    for one in content["windows"]:
        if one["pair"] == "tiny":
            key = one["rate_gbps"], one["mappers"], one["in_flight"]
            windows.setdefault(key, []).append(one)
    # Frames have headers; the identity is no work.
    token_bytes = KV_BYTES_PER_TOKEN / TCP_SHARE
    tokens = content["matrix"]["tokens"]
    return [
        MeasuredLoop(
            mappers=mappers,
            link_gbps=rate_gbps,
            in_flight=in_flight,
            tokens=tokens,
            # By bytes: of answers there are few in a window, and where it ends counts.
            handoffs_per_s=mean(w["delivered_gbps"] for w in some) / 8e-9 / (tokens * token_bytes),
            map_tokens_per_s=_IDENTITY_TOKENS_PER_S,
            read_bytes_per_token=token_bytes,
            write_bytes_per_token=token_bytes,
            chunk_tokens=CHUNK_TOKENS,
        )
        for (rate_gbps, mappers, in_flight), some in sorted(windows.items())
    ]


def section(rows: Sequence[Compared]) -> str:
    """The section's text."""
    takeovers = [row for row in rows if isinstance(row.measured, Measured)]
    loops = [row for row in rows if isinstance(row.measured, MeasuredLoop)]
    parts = [HEADING, "", _ABOUT, f"**{agreement(rows)}** {_worst(rows)}", ""]
    if takeovers:
        parts += [*_takeovers(takeovers), "", _HOW]
    if loops:
        parts += [*_loops(loops), ""]
    return "\n".join(parts)


def with_section(text: str, section: str) -> str:
    """The page with this section in the place of its former one, or at its end."""
    before, heading, rest = text.partition(HEADING)
    _, following, after = rest.partition("\n## ")
    if not heading:
        before = text.rstrip("\n") + "\n\n"
    return before + section.rstrip("\n") + "\n" + (following + after if following else "")


def _worst(rows: Sequence[Compared]) -> str:
    worst = max(rows, key=lambda row: abs(row.error))
    errors = sorted(abs(row.error) for row in rows)
    text = f"The error is {errors[len(errors) // 2]:.0%} in the median and at most "
    text += f"{abs(worst.error):.0%}."
    far = [row for row in rows if not row.agrees]
    if far:
        text += f" Beyond {AGREEMENT:.0%}: " + "; ".join(", ".join(_named(row)) for row in far)
        text += "."
    return text


def _named(row: Compared) -> list[str]:
    return [cell for cell in compared_cells(row) if cell]


def _takeovers(rows: Sequence[Compared]) -> list[str]:
    """A line for each length and link, a column for each place of the mapper."""
    cells: dict[tuple[int, str], dict[str, str]] = {}
    again = []
    for row in rows:
        one = row.measured
        assert isinstance(one, Measured)
        tokens, link, *_ = compared_cells(row)
        both = f"{seconds(one.seconds)}, {seconds(row.simulated)} ({row.error:+.0%})"
        if one.path == "recompute":
            again.append(f"{tokens} tokens {both}")
        else:
            cells.setdefault((one.prompt_tokens, link), {})[one.at or "own"] = both
    places = [place for place in PLACES if any(place in found for found in cells.values())]
    head = ["tokens", "link", *(PLACES[place] for place in places)]
    table = [
        [f"{tokens_:,}", link, *(found.get(place, "-") for place in places)]
        for (tokens_, link), found in cells.items()
    ]
    lines = [
        markdown_table(head, table, left=range(1, len(head))),
        "",
        "Measured, simulated (error), from the decision to the large model's first token.",
    ]
    if again:
        lines.append(f"Read again instead: {'; '.join(again)}.")
    return lines


def _loops(rows: Sequence[Compared]) -> list[str]:
    """Throughput under a constant number of handoffs in flight."""
    head = ["tokens", "link of a mapper", "mappers", "in flight", "measured", "simulated", "error"]
    return [
        "Handoffs per second with a constant number in flight (`bench/scaling.py`), of a",
        "pair that is nearly all transport, by the bytes that reached the large model's node. Only",
        "the mappers' links limit the simulation, not the two cores that did the work; how much of",
        "them was in use is in [SCALING.md](SCALING.md):",
        "",
        markdown_table(head, map(compared_cells, rows), left={1}),
    ]


if __name__ == "__main__":
    typer.run(main)
