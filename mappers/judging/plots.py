"""Plots of a pair's report, as SVG to be put into a page.

Knows the report's numbers; draws on matplotlib's Figure, never on a display.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from mappers.judging.records import LocalAttention, Thresholds
from mappers.judging.report import DriftReport, DriftTurn

_MAPPED, _OTHER, _BOUND, _SECOND = "#1f6fb2", "#9aa3ab", "#c0392b", "#d98a1f"


def layer_plot(local: LocalAttention, thresholds: Thresholds) -> str:
    """Cosine and share by target layer, with the worst KV head of each."""
    figure = _figure(8.4, 4.6)
    layers = range(len(local.mapped_LH))
    cosine, share = figure.subplots(2, 1, sharex=True)
    cosine.plot(layers, [_mean(row) for row in local.mapped_LH], color=_MAPPED, label="mapped")
    cosine.plot(
        layers, [_mean(row) for row in local.other_text_LH], color=_OTHER, label="another text"
    )
    cosine.set_ylabel("cosine to native")
    share.plot(layers, local.layer_share_L, color=_MAPPED, marker="o", ms=3, label="all heads")
    worst = [min(row) for row in local.head_share_LH]
    share.plot(layers, worst, color=_SECOND, lw=0.9, marker="v", ms=3, label="worst KV head")
    share.axhline(thresholds.min_layer_share, color=_BOUND, lw=0.9, ls="--", label="layer bound")
    share.set_ylim(_floor(local.head_share_LH), 1.05)
    share.set_ylabel("share kept")
    share.set_xlabel("target layer")
    for axes in (cosine, share):
        _legend(axes)
    return _svg(figure)


def bucket_plot(local: LocalAttention, thresholds: Thresholds) -> str:
    """Share by position in the prefix: all layers thin, their mean thick."""
    figure = _figure(8.4, 2.9)
    axes = figure.subplots()
    at = range(len(local.bucket_starts_B))
    for row in local.bucket_share_LB:
        axes.plot(at, row, color=_OTHER, lw=0.6, alpha=0.6)
    axes.plot(at, local.bucket_share_B, color=_MAPPED, lw=2, marker="o", label="all layers")
    axes.axhline(thresholds.min_bucket_share, color=_BOUND, lw=0.9, ls="--", label="bound")
    axes.set_xticks(list(at), [f"from {start}" for start in local.bucket_starts_B])
    axes.set_ylim(_floor(local.bucket_share_LB), 1.05)
    axes.set_ylabel("share kept")
    axes.set_xlabel("position in the prefix")
    _legend(axes)
    return _svg(figure)


def drift_plot(drift: DriftReport) -> str:
    """KL to native of every turn; one marker for each model."""
    figure = _figure(8.4, 3.1)
    axes = figure.subplots()
    for turns, colour, name in (
        (drift.kept, _MAPPED, "own part kept"),
        (drift.remapped, _SECOND, "everything mapped anew"),
    ):
        axes.plot([one.turn for one in turns], _kl(turns), color=colour, lw=1, label=name)
        for owner, marker in (("target", "o"), ("source", "s")):
            own = [one for one in turns if one.owner == owner]
            axes.plot([one.turn for one in own], _kl(own), marker, color=colour, ms=5)
    # Empty lines, for the legend to explain the markers.
    for owner, marker in (("target", "o"), ("source", "s")):
        axes.plot([], [], marker, color="#555", ms=5, label=f"read by the {owner}")
    axes.set_ylim(bottom=0)
    axes.set_xticks([one.turn for one in drift.kept])
    axes.set_xlabel("turn, each after one more handoff")
    axes.set_ylabel("KL to native, nats per token")
    _legend(axes)
    return _svg(figure)


def _floor(shares: Sequence[Sequence[float]]) -> float:
    """Lower end of an axis of shares: 0, or what they need down to -1."""
    return max(min(0.0, *map(min, shares)) - 0.05, -1.05)


def _kl(turns: Sequence[DriftTurn]) -> list[float]:
    return [one.kl_to_native for one in turns]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _legend(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _svg(figure: Any) -> str:
    """The figure as an SVG element that stands on its own, text as paths, the same every time."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "kvcascade"}):
        figure.savefig(
            text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None}
        )
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
