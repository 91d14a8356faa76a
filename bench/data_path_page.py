"""What `data_path.py` measured, as a table, a page and a timeline. It measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.links import link_name
from bench.markdown import markdown_table

if TYPE_CHECKING:
    from rich.table import Table

STAGES = ("read", "map", "write")
_COLOURS = {"read": "#1f6fb2", "map": "#e08214", "write": "#2e8b57"}


@dataclass(frozen=True)
class Shape:
    """The KV cache of a model."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """K and V of one token in bf16."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2


@dataclass(frozen=True)
class Trial:
    """One handoff alone; `total_s` from the order to the last WRITE."""

    rate_gbps: float | None
    tokens: int
    moved_bytes: int
    """Over each of the mapper's link's directions."""
    total_s: float
    stages_s: dict[str, float]
    chunks: int
    cpu_s: dict[str, float]
    steps: list[dict[str, Any]]

    @classmethod
    def of(
        cls,
        shape: Shape,
        rate_gbps: float | None,
        tokens: int,
        report: Mapping[str, Any],
        cpu_s: Mapping[str, float],
    ) -> Trial:
        """From a mapper's report."""
        assert report["bytes_read"] == report["bytes_written"] == tokens * shape.token_bytes
        return cls(
            rate_gbps=rate_gbps,
            tokens=tokens,
            moved_bytes=report["bytes_read"],
            total_s=report["convert_s"],
            stages_s={stage: report[f"{stage}_s"] for stage in STAGES},
            chunks=report["chunks"],
            cpu_s=dict(cpu_s),
            steps=list(report["steps"]),
        )

    @property
    def gbps(self) -> float:
        """Over the busiest link, from beginning to end."""
        return self.moved_bytes * 8 / self.total_s / 1e9

    @property
    def to_longest(self) -> float:
        """The whole against its longest stage."""
        return self.total_s / max(self.stages_s.values())


@dataclass(frozen=True)
class Together:
    """Equal handoffs that began together, and a short one that began beside long ones."""

    rate_gbps: float | None
    tokens: int
    totals_s: list[float]
    moved_bytes: int
    short_tokens: int
    short_s: float

    @classmethod
    def of(
        cls,
        rate_gbps: float | None,
        tokens: int,
        reports: Sequence[Mapping[str, Any]],
        short_tokens: int,
        short: Mapping[str, Any],
    ) -> Together:
        """From a mapper's reports."""
        return cls(
            rate_gbps=rate_gbps,
            tokens=tokens,
            totals_s=[report["convert_s"] for report in reports],
            moved_bytes=sum(report["bytes_read"] for report in reports),
            short_tokens=short_tokens,
            short_s=short["convert_s"],
        )

    @property
    def gbps(self) -> float:
        """Over the busiest link, until the last one ended."""
        return self.moved_bytes * 8 / max(self.totals_s) / 1e9

    @property
    def unfairness(self) -> float:
        """The slowest against the quickest of equals."""
        return max(self.totals_s) / min(self.totals_s)


_INTRO = """\
# The data path alone

A source's memory, a mapper and a target's memory in network namespaces behind links that `tc tbf`
limits in each direction, UCX over TCP. The mapper is the real `Converter` with the identity map, on
a node of its own; there are no engines, so moving KV is all that happens. {token_kb:.0f} kB per
token ({layers} layers, {heads} KV heads, head_dim {dim}, bf16, blocks side by side). Made by one
command:

```sh
python bench/data_path.py
```

## One handoff

{table}

*of the link* is what the busiest link carried from the order to the last WRITE, without the headers
of TCP, IP and Ethernet, against the link's rate with them: a plain socket reaches 0.95. *to the
longest stage* is the whole time against that of its longest stage; the difference is the first
chunk on its way to the map and the last one's WRITE. Medians of {rounds} runs, least and most in
brackets.

![timeline of one handoff](data_path.png)

## Several at once

{together}

*of the link* is until the last one ended. *slowest : quickest* of equal handoffs that began
together says how fairly they share.

## Machine

{machine}. All programs share its cores: rates that they do not reach are this machine's.
"""


def page(
    shape: Shape, trials: Sequence[Trial], at_once: Sequence[Together], about: Mapping[str, Any]
) -> str:
    """DATA_PATH.md."""
    return _INTRO.format(
        token_kb=shape.token_bytes / 1e3,
        layers=shape.layers,
        heads=shape.kv_heads,
        dim=shape.head_dim,
        table=_table(*_single(trials)),
        rounds=len(at_once) // len({one.rate_gbps for one in at_once}),
        together=_table(*_several(trials, at_once)),
        machine=(
            f"{about['cores']} cores, {about['cpu']}; load average "
            f"{about['load_average_1min']:.1f} before and {about['load_after']:.1f} after; "
            f"{about['seconds']:.0f} s"
        ),
    )


def rich_table(trials: Sequence[Trial]) -> Table:
    """The first table for a terminal."""
    from rich.table import Table

    heads, rows = _single(trials)
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    return table


def timeline(trial: Trial, path: Path) -> None:
    """When each chunk was in which stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), dpi=150, layout="constrained")
    panel = figure.subplots()
    for row, stage in enumerate(STAGES):
        for step in trial.steps:
            if step["stage"] == stage:
                panel.barh(
                    row,
                    step["end_s"] - step["begin_s"],
                    left=step["begin_s"],
                    color=_COLOURS[stage],
                    # The map's steps may be thinner than a white edge.
                    edgecolor=_COLOURS[stage] if stage == "map" else "white",
                    linewidth=0.6,
                )
    panel.set_yticks(range(len(STAGES)), STAGES)
    panel.invert_yaxis()
    panel.set_xlabel("seconds from the order")
    megabytes = trial.moved_bytes / 1e6
    panel.set_title(
        f"{trial.tokens:,} tokens ({megabytes:.0f} MB in, {megabytes:.0f} MB out) over "
        f"{link_name(trial.rate_gbps)}: {trial.total_s:.2f} s",
        fontsize=10,
    )
    figure.savefig(path)


def _single(trials: Sequence[Trial]) -> tuple[list[str], list[list[str]]]:
    heads = [
        *("link", "tokens", "chunks", "whole, ms", "read / map / write, ms"),
        *("of the link", "to the longest stage", "CPU ms: source / mapper / target"),
    ]
    rows = []
    for rate, tokens in dict.fromkeys((one.rate_gbps, one.tokens) for one in trials):
        here = [one for one in trials if (one.rate_gbps, one.tokens) == (rate, tokens)]
        totals = sorted(1e3 * one.total_s for one in here)
        share = "" if rate is None else f" = {median(one.gbps for one in here) / rate:.2f}"
        rows.append(
            [
                link_name(rate),
                f"{tokens:,}",
                f"{median(one.chunks for one in here):.0f}",
                f"{median(totals):.0f} ({totals[0]:.0f}-{totals[-1]:.0f})",
                " / ".join(f"{1e3 * median(o.stages_s[s] for o in here):.0f}" for s in STAGES),
                f"{median(one.gbps for one in here):.2f} Gb/s{share}",
                f"{median(one.to_longest for one in here):.2f}",
                " / ".join(
                    f"{1e3 * median(one.cpu_s[node] for one in here):.0f}"
                    for node in ("source", "mapper", "target")
                ),
            ]
        )
    return heads, rows


def _several(
    trials: Sequence[Trial], at_once: Sequence[Together]
) -> tuple[list[str], list[list[str]]]:
    first = at_once[0]
    heads = [
        "link",
        f"{len(first.totals_s)} of {first.tokens:,} tokens, s",
        "of the link",
        "slowest : quickest",
        f"{first.short_tokens:,} tokens beside {len(first.totals_s) - 1} long ones : alone, ms",
    ]
    rows = []
    for rate in dict.fromkeys(one.rate_gbps for one in at_once):
        here = [one for one in at_once if one.rate_gbps == rate]
        alone = [
            one.total_s
            for one in trials
            if (one.rate_gbps, one.tokens) == (rate, first.short_tokens)
        ]
        gbps = median(one.gbps for one in here)
        rows.append(
            [
                link_name(rate),
                f"{median(max(one.totals_s) for one in here):.2f}",
                f"{gbps:.2f} Gb/s" + ("" if rate is None else f" = {gbps / rate:.2f}"),
                f"{median(one.unfairness for one in here):.2f}",
                f"{1e3 * median(one.short_s for one in here):.0f} : "
                + (f"{1e3 * median(alone):.0f}" if alone else "not measured"),
            ]
        )
    return heads, rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(heads, rows, left=range(len(heads)))
