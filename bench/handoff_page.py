"""Handoffs over links as a table and a page, made from rows. It computes no times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.handoff_plan import TOLERANCE, Rates, Row, Term
from bench.handoff_runs import PLACES, Run
from bench.links import link_name, rate_order
from bench.markdown import markdown_table
from cluster.demo_findings import duration

if TYPE_CHECKING:
    from rich.table import Table

PLACE_NAMES = {
    "source": "the source's node",
    "target": "the target's node",
    "own": "a node of its own",
}
_WARM = ["mapper on", "link", "tokens", "measured", "planner", "off", "re-prefill", "faster"]
_COLD = ["mapper on", "tokens", "first", "warm", "with handshakes"]
_AGAIN = ["tokens", "measured", "planner", "off"]
_INTRO = """\
# Handoffs over links of several rates

From the router's decision to the large model's first token, network included. Four Ray nodes (the
router's, one for each model, the mapper's) are network namespaces of one machine behind links that
`tc tbf` limits in each direction; UCX may use TCP only. The mapper runs on the source's node, on
the target's, or on its own. Made by one command:

```sh
python bench/handoff.py
```

![time to the first large token by link rate](handoff.png)

{about}
"""

_HOW = """\
## How it was measured

* Medians of warm runs; in brackets the least and the most. Every request has a session of its
  own, and the large model finds nothing in its prefix cache: each escalation has its own salt. The
  small model has read the conversation before, so its reading is in no number.
* Each round visits every place. The first handoff after the mapper has moved, at once and without a
  limit, is in the table of cold handoffs only. A mapper shakes hands with the engines when it
  starts; where the first handoff came sooner, NIXL's handshakes are in its time.
* Reading again moves no cache and is measured at the end of each round, without a limit. Handoffs
  are asked for with `recompute: false`: by itself the router would take the quicker way.
* All nodes share {cores} cores. A link's own work (TCP, copies) is done by the same cores that map
  and read, so fast links are as slow as this machine makes them.
* The planner is `cluster/plan.py` and `cluster/plan_pair.py` with this run's own rates: {rates}.
  It overlaps map and transfer layer by layer. A mapper at the source is its `sender`, one at the
  target its `receiver`; for a node of its own the two formulas are joined, as both transfers
  cross a link then.
* Where it is off by more than {tolerance:.0%}, its terms are replaced by measured ones in turn
  (fixed costs, transfers, map; what is left is waiting), and the largest change names the cause.
"""


def about_text(rates: Rates, gbps: bool = True) -> str:
    """The planner's rates in words."""
    text = (
        f"map {rates.map_tokens_per_s:,.0f} tokens/s and prefill "
        f"{rates.prefill_tokens_per_s:,.0f} tokens/s at {rates.at_tokens:,} tokens, "
        f"{rates.overhead_ms:.0f} ms besides (ticket, queue and admission of the shortest handoffs)"
    )
    return f"{text}, {rates.unlimited_gbps:.1f} Gb/s without a limit" if gbps else text


def reason(row: Row, rates: Rates) -> str:
    """Why the planner is off, in words; the row has someone to blame."""
    assert row.blame is not None
    stages = row.stages_ms
    change = f"{row.terms_ms[row.blame]:+,.0f} ms"
    texts: dict[Term, str] = {
        "fixed": "ticket, queue and admission take longer here than for the shortest handoffs",
        "moving": "reading took {read:,.0f} ms and writing {write:,.0f} ms: TCP does not fill the "
        "link, and within a node bytes are copied, too, which the planner takes for free",
        "mapping": "the map took {map:,.0f} ms beside the transfers, which use the same cores",
        "overlap": "a handoff moves chunks where the planner overlaps layers: the first one's "
        "reading and the last one's writing are waited for",
        "prefill": "time grows faster with length than FLOP do: "
        f"{1e3 * row.prompt_tokens / row.measured_ms:,.0f} tokens/s here",
    }
    if row.blame == "overlap" and row.measured_ms < row.predicted_ms:
        return f"{change}: the stages overlap better than the planner assumes"
    return f"{change}: {texts[row.blame].format(**stages)}"


def rich_table(rows: Sequence[Row]) -> Table:
    """Everything, for the terminal."""
    from rich import box
    from rich.table import Table

    title = "Time to the first large token, warm, medians"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("mapper on", "link"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "measured", "planner", "off", "re-prefill", "faster"):
        table.add_column(name, justify="right", no_wrap=True)
    short = {name: place for place, name in PLACE_NAMES.items()}
    for cells in _cells(rows):
        median_time = cells[3].partition(" (")[0]
        table.add_row(short[cells[0]], *cells[1:3], median_time, *cells[4:])
    return table


def page(
    rows: Sequence[Row],
    runs: Sequence[Run],
    rates: Rates,
    machine: Mapping[str, Any],
    seconds: Mapping[str, float],
    loads: Sequence[float],
) -> str:
    """HANDOFF.md."""
    load = " to ".join(f"{one:.1f}" for one in (min(loads), max(loads)))
    about = (
        f"{machine['cpu']}, {machine['cores']} cores, load average {load} while it ran "
        f"(its own work included); {seconds['all'] / 60:.0f} minutes in all."
    )
    wrong = [run for run in runs if not run.good]
    parts = [
        _INTRO.format(about=about),
        "## Warm\n",
        markdown_table(_WARM, _cells(rows), left={0}) + "\n",
        "## Cold: the first handoff of a mapper\n",
        markdown_table(_COLD, _cold(rows, runs), left={0}) + "\n",
        "## Reading again\n",
        markdown_table(_AGAIN, _again(rows), left={0}) + "\n",
        f"## Where the planner is off by more than {TOLERANCE:.0%}\n",
        _off(rows, rates),
    ]
    if wrong:
        reasons = sorted({run.reason or "unknown" for run in wrong})
        parts.append(
            f"{len(wrong)} of {len(runs)} requests did not go the way that they should have "
            f"({', '.join(reasons)}) and are in no table.\n"
        )
    parts.append(_HOW.format(cores=machine["cores"], rates=about_text(rates), tolerance=TOLERANCE))
    return "\n".join(parts)


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    again = {row.tokens: row for row in rows if row.place is None}
    ordered = sorted(
        (row for row in rows if row.place is not None),
        key=lambda row: (
            list(PLACES).index(row.place or ""),
            rate_order(row.rate_gbps),
            row.tokens,
        ),
    )
    found = []
    for row in ordered:
        cold = again.get(row.tokens)
        found.append(
            [
                PLACE_NAMES[row.place or ""],
                link_name(row.rate_gbps),
                f"{row.prompt_tokens:,}",
                _spread(row),
                duration(row.predicted_ms),
                f"{row.off:+.0%}",
                "-" if cold is None else duration(cold.measured_ms),
                "-" if cold is None else f"{cold.measured_ms / row.measured_ms:.1f}",
            ]
        )
    return found


def _cold(rows: Sequence[Row], runs: Sequence[Run]) -> list[list[str]]:
    found = []
    for place in PLACES:
        first = [run for run in runs if run.place == place and run.first and run.good]
        if not first:
            continue
        tokens = first[0].tokens
        warm = [row for row in rows if row.place == place and row.tokens == tokens]
        best = max(warm, key=lambda row: rate_order(row.rate_gbps), default=None)
        near = (
            "-" if best is None else f"{duration(best.measured_ms)} ({link_name(best.rate_gbps)})"
        )
        shaken = sum(run.temperature == "cold" for run in first)
        took = duration(median(run.handoff_ms for run in first))
        found.append([PLACE_NAMES[place], f"{tokens:,}", took, near, f"{shaken} of {len(first)}"])
    return found


def _again(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [f"{row.prompt_tokens:,}", _spread(row), duration(row.predicted_ms), f"{row.off:+.0%}"]
        for row in rows
        if row.place is None
    ]


def _off(rows: Sequence[Row], rates: Rates) -> str:
    lines = []
    for row in rows:
        if row.blame is None:
            continue
        if row.place is None:
            what = f"re-prefill of {row.prompt_tokens:,} tokens"
        else:
            where = f"{link_name(row.rate_gbps)}, {PLACE_NAMES[row.place]}"
            what = f"{row.prompt_tokens:,} tokens, {where}"
        lines.append(f"* {what}: {row.off:+.0%}. {reason(row, rates)}.")
    return "\n".join(lines or ["Nowhere."]) + "\n"


def _spread(row: Row) -> str:
    return f"{duration(row.measured_ms)} ({duration(row.least_ms)} to {duration(row.most_ms)})"
