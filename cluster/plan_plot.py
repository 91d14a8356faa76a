"""Time by prompt length of a plan, drawn to a file: re-prefill against handoffs.

One panel per link. Needs matplotlib, which is loaded when a plot is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import plan
from cluster.errors import ConfigError
from cluster.plan_pair import handoff_s
from cluster.plan_report import HandoffPlan, PlanReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIRST_TOKENS = 64
_COLOURS = {"full": "#f4a64c", "head_local": "#2166ac"}
# The wider one lies beneath, so that both show where the link decides and they coincide.
_WIDTHS = {"full": 4.0, "head_local": 1.4}
_DASH_POINTS = (8.0, 3.5)
_NAMES = {"full": "full", "head_local": "head-local"}


def check_plot_path(path: Path) -> None:
    """Raises ConfigError for an ending other than .png or .svg or a folder that does not exist."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"{path}: a plot is a .png or .svg file; end its name in one of these")
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder; make it, or give another --plot")


def save_plot(report: PlanReport, path: Path) -> None:
    """Draw the plan's handoffs to `path`; see `check_plot_path` for what it may be."""
    check_plot_path(path)
    from matplotlib.figure import Figure

    links = report.scenario.links_gbps
    figure = Figure(figsize=(1.6 + 4.9 * len(links), 5.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for panel, gbps in zip(panels, links, strict=True):
        _draw(panel, report, gbps)
    panels[0].set_ylabel("time until the target holds the KV cache (s)")
    source, target = report.source.architecture.name, report.target.architecture.name
    figure.suptitle(
        f"{source} to {target}, k = {report.mappers[0].k}: {_hardware(report)}", fontsize=11
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=3,
        fontsize=9,
        frameon=False,
        handlelength=3.5,
    )
    figure.savefig(path)


def _draw(panel: Axes, report: PlanReport, gbps: float) -> None:
    from matplotlib.ticker import FuncFormatter

    scenario = report.scenario
    source, target = report.source.architecture, report.target.architecture
    limit_tokens = max(scenario.tokens, min(source.max_position_tokens, target.max_position_tokens))
    lengths = plan.length_grid(min(_FIRST_TOKENS, limit_tokens), limit_tokens)
    panel.plot(
        lengths,
        [plan.prefill_s(target, tokens, scenario.hardware) for tokens in lengths],
        color="black",
        linewidth=2.2,
        label="re-prefill by the target",
    )
    mappers = {one.support: one for one in report.mappers}
    rows = [one for one in report.handoffs if one.link_gbps == gbps]
    for row in rows:
        made = source, target, mappers[row.support], row.mapped_at, gbps, scenario
        panel.plot(
            lengths,
            [handoff_s(*made, tokens) for tokens in lengths],
            color=_COLOURS[row.support],
            linestyle=_line_style(row),
            linewidth=_WIDTHS[row.support],
            label=f"{_NAMES[row.support]}, mapped at {row.mapped_at}",
        )
    panel.axhline(
        scenario.overhead_ms / 1e3,
        color="0.5",
        linestyle=":",
        linewidth=1.2,
        label=f"fixed overhead of a handoff ({scenario.overhead_ms:g} ms)",
    )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    _mark_break_even(panel, report, rows)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.tick_params(axis="x", rotation=40)
    panel.set_xlabel("prompt length (tokens)")
    panel.set_title(f"{gbps:g} Gbit/s link", fontsize=10)
    panel.grid(True, which="major", color="0.9", linewidth=0.8)


def _line_style(row: HandoffPlan) -> Any:
    """Dashes of one length whatever the width, which matplotlib would scale them by."""
    if row.mapped_at == "receiver":
        return "solid"
    return 0, tuple(points / _WIDTHS[row.support] for points in _DASH_POINTS)


def _mark_break_even(panel: Axes, report: PlanReport, rows: list[HandoffPlan]) -> None:
    """A ring where each handoff starts to win, and the lengths in a corner."""
    lines = ["break-even"]
    label: str | None = "break-even: longer prompts are better handed over"
    for row in rows:
        tokens = row.break_even_tokens
        words = "none" if tokens is None else f"{tokens:,} tokens"
        lines.append(f"{_NAMES[row.support]} at {row.mapped_at}: {words}")
        if tokens is not None and tokens >= panel.get_xlim()[0]:
            time_s = plan.prefill_s(report.target.architecture, tokens, report.scenario.hardware)
            panel.plot(
                [tokens],
                [time_s],
                marker="o",
                markersize=7,
                markerfacecolor="white",
                markeredgecolor="black",
                linestyle="none",
                zorder=5,
                label=label,
            )
            label = None
    panel.text(
        0.03,
        0.97,
        "\n".join(lines),
        transform=panel.transAxes,
        va="top",
        fontsize=8,
        color="0.25",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2},
    )


def _hardware(report: PlanReport) -> str:
    scenario = report.scenario
    return f"{scenario.gpus} x {scenario.gpu_name or 'GPU'} of {scenario.gpu_tflops:,.0f} TFLOP/s"
