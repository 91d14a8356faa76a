"""Handoffs over links as a picture, beside the planner. It computes no times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.handoff_page import PLACE_NAMES
from bench.handoff_plan import Row
from bench.handoff_runs import PLACES, Run
from bench.links import link_name, rate_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = ("mapped", "planner", "re-prefill")
_COLOURS = ("#2e8b57", "#1f6fb2", "#b2182b", "#7b3294")


def plot(rows: Sequence[Row], cold: Sequence[Run], path: Path) -> None:
    """A panel per place: measured and planned by link rate, one colour per length."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    places = [place for place in PLACES if any(row.place == place for row in rows)]
    figure = Figure(figsize=(1.4 + 4.4 * len(places), 5.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(places), sharey=True, squeeze=False)[0]
    for panel, place in zip(panels, places, strict=True):
        _draw(panel, place, rows, [run for run in cold if run.place == place])
    panels[0].set_ylabel("decision to first large token (s)")
    by_label = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    labels = sorted(by_label, key=_legend_order)
    # Columns are filled evenly: without these the last length's would be cut.
    blank = [""] * (-len(labels) % len(_KINDS))
    figure.legend(
        [
            *(by_label[label] for label in labels),
            *(Line2D([], [], linestyle="none") for _ in blank),
        ],
        [*labels, *blank],
        loc="outside lower center",
        ncols=len([*labels, *blank]) // len(_KINDS),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path)


def _draw(panel: Axes, place: str, rows: Sequence[Row], cold: Sequence[Run]) -> None:
    from matplotlib.ticker import FuncFormatter

    here = [row for row in rows if row.place == place]
    rates = sorted({row.rate_gbps for row in here}, key=rate_order)
    for colour, tokens in zip(_COLOURS, sorted({row.tokens for row in here}), strict=False):
        by_rate = {row.rate_gbps: row for row in here if row.tokens == tokens}
        line = [by_rate[rate] for rate in rates if rate in by_rate]
        at = [number for number, rate in enumerate(rates) if rate in by_rate]
        middle = [row.measured_ms / 1e3 for row in line]
        spread = [
            [(row.measured_ms - row.least_ms) / 1e3 for row in line],
            [(row.most_ms - row.measured_ms) / 1e3 for row in line],
        ]
        name = f"{line[0].prompt_tokens:,} tokens"
        panel.errorbar(
            at,
            middle,
            yerr=spread,
            color=colour,
            marker="o",
            capsize=3,
            label=f"{name}, mapped",
        )
        panel.plot(
            at,
            [row.predicted_ms / 1e3 for row in line],
            color=colour,
            linestyle="--",
            marker="x",
            linewidth=1.2,
            label=f"{name}, planner",
        )
        again = next((row for row in rows if row.place is None and row.tokens == tokens), None)
        if again is not None:
            panel.axhline(
                again.measured_ms / 1e3, color=colour, linestyle=":", label=f"{name}, re-prefill"
            )
    if cold:
        times = [run.handoff_ms / 1e3 for run in cold]
        # First handoffs are made without a limit.
        right = len(rates) - 1 if None in rates else len(rates) - 0.5
        label = f"{min(run.tokens for run in cold):,} tokens, first"
        panel.plot([right] * len(times), times, "*", color="black", label=label)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(FuncFormatter(_two_and_five))
    panel.set_xticks(range(len(rates)), [link_name(rate) for rate in rates])
    panel.set_title(f"mapper on {PLACE_NAMES[place]}", fontsize=10)
    panel.grid(True, which="both", axis="y", color="0.92", linewidth=0.7)


def _two_and_five(value: float, _: int | None) -> str:
    """Labels between powers of ten."""
    shown = f"{value:g}"
    return shown if shown.strip("0.") in ("2", "5") else ""


def _legend_order(label: str) -> tuple[bool, int, str]:
    """A column for each length, and the cold ones last."""
    tokens, _, kind = label.partition(" tokens, ")
    return kind not in _KINDS, int(tokens.replace(",", "")), kind
