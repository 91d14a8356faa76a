"""How mappers scale as tables and a page, made from rows. It computes no rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.load_model import HEAD_DIM, KV_BYTES_PER_TOKEN, KV_HEADS, LAYERS
from bench.markdown import markdown_table
from bench.scaling_runs import RAMP_S, Matrix
from bench.scaling_table import TARGET, Change, Row

if TYPE_CHECKING:
    from rich.table import Table

_INTRO = """\
# Throughput of handoffs by number of mappers

Six Ray nodes are network namespaces of one machine: the router's, one for each model, and three for
mappers, each of these behind a link of its own that `tc tbf` limits in each direction; nothing else
is limited. UCX may use TCP only. Made by one command:

```sh
{command}
```

![throughput by mappers, and mappers over time](scaling.png)

{about}
"""

_PAIR = """\
The *tiny* pair is one random model twice with the identity as mapper, made so that transport is
what a handoff takes: {layers} layers with {heads} KV heads of {dim} elements, {kib} KiB of KV per
token, and next to nothing to compute. A handoff of {tokens:,} tokens moves {mb:.0f} MB in and as
many out. The small model has read the conversations before; {in_flight} for each mapper are in
flight all the time.
"""

_QUICKSTART = """\
A trained mapper, and models that have to compute: the cores, and not the links, are the limit here.
More mappers cannot help, as they bring no cores of their own.
"""

_HOW = """\
## How it was measured

* Each window is {window:.0f} s of full load, after {ramp:.0f} s that do not count. Bytes are the
  link counters of the large model's node, Ethernet headers included; handoffs are answers in the
  window. Linear growth is judged by bytes, which do not depend on where in a handoff a window ends.
* {rounds} rounds, the second with the numbers of mappers in reverse order: means, and in brackets
  the least and the most.
* While mappers come and go, links have the highest of these rates. By hand `num_replicas` is
  changed; by itself `mapper.scaling` follows the backlog, from one conversation in flight to twelve
  and back.
* {cores} cores do all of it: both engines, the mappers, TCP on every hop, router and clients. Where
  they have no time left, more links carry no more. "Own cores" are those that the cluster's
  processes used, "others'" what other work on the machine took meanwhile.
"""


def rich_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    from rich import box
    from rich.table import Table

    table = Table(title="Throughput of handoffs", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _HEAD:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def page(
    rows: Sequence[Row],
    changes: Sequence[Change],
    matrix: Matrix,
    machine: Mapping[str, Any],
    loads: Sequence[float],
    seconds: float,
    command: str,
) -> str:
    """SCALING.md."""
    load = " to ".join(f"{one:.1f}" for one in (min(loads), max(loads)))
    about = (
        f"{machine['cpu']}, {machine['cores']} cores, load average {load} while it ran (its own "
        f"work included); {seconds / 60:.0f} minutes in all."
    )
    pair = _PAIR.format(
        layers=LAYERS,
        heads=KV_HEADS,
        dim=HEAD_DIM,
        kib=KV_BYTES_PER_TOKEN // 1024,
        tokens=matrix.tokens,
        mb=matrix.tokens * KV_BYTES_PER_TOKEN / 1e6,
        in_flight=matrix.in_flight_per_mapper,
    )
    parts = [_INTRO.format(command=command, about=about), pair]
    for rate_gbps in sorted({row.rate_gbps for row in rows if row.pair == "tiny"}):
        here = [row for row in rows if (row.pair, row.rate_gbps) == ("tiny", rate_gbps)]
        parts += [
            f"## Links of {rate_gbps:g} Gb/s\n",
            markdown_table(_HEAD, map(_cells, here)) + "\n",
        ]
        parts.append(verdict(here) + "\n")
    quickstart = [row for row in rows if row.pair == "quickstart"]
    if quickstart:
        parts += [
            "## The quickstart pair\n",
            _QUICKSTART,
            markdown_table(_HEAD, map(_cells, quickstart)) + "\n",
        ]
    if changes:
        parts += ["## One, three, one, under load\n", *map(_told, changes)]
    how = _HOW.format(
        window=matrix.window_s,
        ramp=RAMP_S,
        rounds=matrix.rounds,
        cores=machine["cores"],
    )
    return "\n".join([*parts, how])


def verdict(rows: Sequence[Row]) -> str:
    """Whether the most mappers do what they should, for rows of one pair and rate."""
    most = max(rows, key=lambda row: row.mappers)
    if most.linearity is None or most.mappers == 1:
        return "There is nothing to compare."
    reached = "reached" if most.linearity >= TARGET else "missed"
    why = (
        ""
        if most.linearity >= TARGET
        else f" The cluster used {most.own_cores:.2f} cores and other work {most.other_cores:.2f}: "
        "the cores are the limit, not the links."
    )
    wrong = [reason for row in rows for reason in row.reasons]
    if wrong:
        why += f" {len(wrong)} requests were not mapped: {'; '.join(sorted(set(wrong)))}."
    return (
        f"{most.mappers} mappers do {most.linearity:.2f} of {most.mappers} times one "
        f"(target {TARGET}: {reached}).{why}"
    )


_HEAD = (
    "mappers",
    "handoffs/s",
    "KV to the large model, Gb/s",
    "of linear",
    "mappers' links",
    "handoff, ms",
    "own cores",
    "others'",
)


def _cells(row: Row) -> list[str]:
    low, high = row.range_per_s
    least, most = row.range_gbps
    return [
        str(row.mappers),
        f"{row.handoffs_per_s:.2f} ({low:.2f} to {high:.2f})",
        f"{row.delivered_gbps:.2f} ({least:.2f} to {most:.2f})",
        "-" if row.linearity is None else f"{row.linearity:.2f}",
        f"{row.link_use:.0%}",
        f"{row.handoff_ms:,.0f}",
        f"{row.own_cores:.2f}",
        f"{row.other_cores:.2f}",
    ]


def _told(change: Change) -> str:
    arrows = " → ".join(str(number) for number in change.replicas)
    engines = "the engines' processes stayed" if change.engines_stayed else "an engine was replaced"
    reasons = f" ({'; '.join(change.reasons)})" if change.reasons else ""
    return (
        f"* {change.name}: {arrows} mappers in {change.seconds:.0f} s, {change.requests} requests, "
        f"{change.failed} failed, {change.read_again} read again{reasons}; {engines}.\n"
    )
