"""Throughput by mappers, and mappers over time, as a picture. It computes no rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.scaling_runs import Episode
from bench.scaling_table import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#1f6fb2", "#b2182b", "#2e8b57")
_BIN_S = 5.0


def plot(rows: Sequence[Row], episodes: Sequence[Episode], path: Path) -> None:
    """A panel for the throughput and one for each episode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 + 5.0 * len(episodes), 4.4), dpi=140, layout="constrained")
    panels = figure.subplots(1, 1 + len(episodes), squeeze=False)[0]
    _throughput(panels[0], [row for row in rows if row.pair == "tiny"])
    for panel, episode in zip(panels[1:], episodes, strict=True):
        _episode(panel, episode)
    figure.savefig(path)


def _throughput(panel: Axes, rows: Sequence[Row]) -> None:
    for colour, rate_gbps in zip(_COLOURS, sorted({row.rate_gbps for row in rows}), strict=False):
        here = [row for row in rows if row.rate_gbps == rate_gbps]
        mappers = [row.mappers for row in here]
        middle = [row.delivered_gbps for row in here]
        spread = [
            [row.delivered_gbps - row.range_gbps[0] for row in here],
            [row.range_gbps[1] - row.delivered_gbps for row in here],
        ]
        name = f"links of {rate_gbps:g} Gb/s"
        panel.errorbar(mappers, middle, spread, color=colour, marker="o", capsize=3, label=name)
        panel.plot(mappers, [number * middle[0] for number in mappers], ":", color=colour)
    panel.set_xticks(sorted({row.mappers for row in rows}))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("mappers")
    panel.set_ylabel("KV to the large model (Gb/s)")
    panel.set_title("full load; dotted: linear from one", fontsize=10)
    panel.legend(fontsize=8, frameon=False)


def _episode(panel: Axes, episode: Episode) -> None:
    records = [record for outcome in episode.outcomes for record in outcome.records]
    begun = min(record.started_s for record in records)
    last = max(record.ended_s for record in records)
    bins = int((last - begun) / _BIN_S) + 1
    counts = [0] * bins
    for record in records:
        counts[int((record.ended_s - begun) / _BIN_S)] += 1
    middles = [(number + 0.5) * _BIN_S for number in range(bins)]
    at = [sample.at_s - begun for sample in episode.samples]
    running = [sample.replicas.get("RUNNING", 0) for sample in episode.samples]
    panel.step(at, running, where="post", color="black", label="mappers")
    rates = [count / _BIN_S for count in counts]
    panel.plot(middles, rates, color=_COLOURS[0], marker=".", label="handoffs/s")
    waiting = [sample.handoffs for sample in episode.samples]
    panel.plot(at, waiting, color="0.6", linewidth=0.9, label="handoffs at mappers")
    top = max([*running, *rates, *waiting])
    for moment, what in episode.events:
        panel.axvline(moment - begun, color="0.85", linewidth=0.8, zorder=0)
        panel.text(moment - begun, top * 1.38, what, fontsize=7, rotation=90, va="top", ha="right")
    panel.set_ylim(0, top * 1.4)
    panel.set_xlabel("seconds")
    panel.set_title(f"one, three, one: {episode.name}", fontsize=10)
    panel.legend(fontsize=8, frameon=False, loc="upper right")
