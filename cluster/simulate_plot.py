"""Draws a simulation to a file: waiting by load, and what each variant needs.

Needs matplotlib, which is loaded when a plot is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.plan_tables import short
from cluster.simulate_report import Percentiles, Point, SimulationReport
from cluster.simulate_spec import POOLS, Variant
from cluster.simulate_tables import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: dict[Variant, str] = {
    "handoff": "#2166ac",
    "reprefill": "#f4a64c",
    "all_large": "#4d4d4d",
}
_POOL_COLOURS = {"small": "#92c5de", "large": "#4d4d4d", "mapper": "#d6604d"}


def save_simulation_plot(report: SimulationReport, path: Path) -> None:
    """Draw the report to `path`, .png or .svg."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), dpi=130, layout="constrained")
    first, large, gpus = figure.subplots(1, 3)
    _draw_times(first, report, "first_token", "first token of the answer")
    _draw_times(large, report, "large_first_token", "large model's first token after escalation")
    _draw_gpus(gpus, report)
    figure.suptitle(
        f"{short(report.source)} to {short(report.target)}, {report.scenario.gpu_name or 'GPUs'}, "
        f"{report.link_gbps:g} Gbit/s, {report.load.escalation:.0%} escalated",
        fontsize=11,
    )
    figure.savefig(path)


def _draw_times(panel: Axes, report: SimulationReport, field: str, title: str) -> None:
    for one in report.variants:
        points = sorted(one.points, key=lambda point: point.rate)
        timed = [(point, _percentiles(point, field)) for point in points]
        known = [(point, value) for point, value in timed if value is not None]
        if not known:
            continue
        rates = [point.rate for point, _ in known]
        colour, name = _COLOURS[one.variant], NAMES[one.variant]
        p99_s = [value.p99_s for _, value in known]
        p50_s = [value.p50_s for _, value in known]
        # The small pools of both cascades see the same, so one line lies on the other.
        wide = 3.2 if one.variant == "handoff" else 1.6
        panel.plot(
            rates,
            p99_s,
            color=colour,
            marker="o",
            markersize=4,
            linewidth=wide,
            label=f"{name}, p99",
        )
        panel.plot(rates, p50_s, color=colour, linestyle="--", linewidth=wide, label=f"{name}, p50")
        full = [(point.rate, value.p99_s) for point, value in known if point.saturated is not None]
        panel.plot(
            [rate for rate, _ in full],
            [time_s for _, time_s in full],
            color=colour,
            marker="x",
            markersize=10,
            markeredgewidth=2,
            linestyle="none",
        )
    panel.axhline(
        report.targets.first_token_s, color="0.5", linestyle=":", label="target of the p99"
    )
    panel.set_yscale("log")
    panel.set_xlabel("requests/s (a cross: falls behind)")
    panel.set_ylabel("s")
    panel.set_title(title, fontsize=10)
    panel.grid(True, color="0.9", linewidth=0.8)
    panel.legend(fontsize=8, frameon=False)


def _draw_gpus(panel: Axes, report: SimulationReport) -> None:
    names = [NAMES[one.variant] for one in report.variants]
    below = [0.0] * len(names)
    for pool in POOLS:
        counts = [
            float(one.at_design.pools[pool].gpus) if pool in one.at_design.pools else 0.0
            for one in report.variants
        ]
        panel.bar(names, counts, bottom=below, color=_POOL_COLOURS[pool], label=pool, width=0.6)
        below = [low + count for low, count in zip(below, counts, strict=True)]
    for at, total in enumerate(below):
        panel.text(at, total, f"{total:,.0f}", ha="center", va="bottom", fontsize=9)
    panel.set_ylim(0, max(below) * 1.12)
    panel.set_ylabel("GPUs")
    panel.set_title(f"GPUs at {report.variants[0].at_design.rate:g} requests/s", fontsize=10)
    panel.legend(fontsize=8, frameon=False)


def _percentiles(point: Point, field: str) -> Percentiles | None:
    value: Percentiles | None = getattr(point, field)
    return value
