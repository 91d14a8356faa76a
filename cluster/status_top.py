"""The live view: rates and times of handoffs from the endpoint's Prometheus text.

Ray renews what it exports about every ten seconds, so rates and times are those of a window of
half a minute. It asks nobody: scrapes are brought to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cluster.status_metrics import Buckets, Scrape, Window, quantile
from cluster.status_view import size, totals

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WINDOW_S = 30.0
HANDOFF_SECONDS = "ray_kvcascade_handoff_seconds"
HANDOFFS = "ray_kvcascade_handoff_total"
HANDOFF_BYTES = "ray_kvcascade_handoff_bytes_total"
IN_FLIGHT = "ray_kvcascade_requests_in_flight"
TTFT_SECONDS = "ray_vllm_time_to_first_token_seconds"
"""vLLM's own, by engine; there when the engine shares a node with the router that answers."""

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 60


class Top:
    """What `kvcascade top` shows, scrape after scrape."""

    def __init__(self) -> None:
        self._window = Window(WINDOW_S)
        self._rates: deque[float] = deque(maxlen=_HISTORY)

    def add(self, scrape: Scrape) -> None:
        """Take the newest numbers."""
        self._window.add(scrape)
        rate = self._window.rate(HANDOFFS)
        if rate is not None:
            self._rates.append(rate)

    def frame(self, stats: Mapping[str, Any] | None) -> RenderableType:
        """The table of this moment, with the totals of `/v1/cascade/stats` below."""
        from rich.console import Group

        table = self._table()
        return table if stats is None else Group(table, totals(stats))

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        window, latest = self._window, self._window.latest
        table = Table(box=box.SIMPLE)
        table.add_column("")
        for name in ("now", "p50", "p95", "total"):
            table.add_column(name, justify="right")
        in_flight = latest.total(IN_FLIGHT)
        table.add_row("requests in flight", "-" if in_flight is None else f"{in_flight:.0f}")
        for outcome in latest.label_values(HANDOFFS, "outcome"):
            times = window.buckets(HANDOFF_SECONDS, stage="total", path=outcome)
            table.add_row(
                f"handoffs, {outcome}",
                _per_second(window.rate(HANDOFFS, outcome=outcome)),
                *_quantiles(times),
                f"{latest.total(HANDOFFS, outcome=outcome):.0f}",
            )
        for direction in latest.label_values(HANDOFF_BYTES, "direction"):
            rate = window.rate(HANDOFF_BYTES, direction=direction)
            total = latest.total(HANDOFF_BYTES, direction=direction) or 0.0
            now = "-" if rate is None else f"{size(rate)}/s"
            table.add_row(f"bytes {direction}", now, "", "", size(total))
        for model in latest.label_values(f"{TTFT_SECONDS}_count", "model_name"):
            times = window.buckets(TTFT_SECONDS, model_name=model)
            table.add_row(f"first token of {model}", "", *_quantiles(times))
        if len(self._rates) > 1:
            table.caption = f"handoffs per second {sparkline(list(self._rates))}"
        return table


def sparkline(values: list[float]) -> str:
    """One character per value, scaled to the largest; zeros are lowest."""
    top = max(values) or 1.0
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] for value in values)


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2f}/s"


def _quantiles(times: Buckets) -> list[str]:
    found = [quantile(times, q) for q in (0.5, 0.95)]
    return ["-" if value is None else f"{value * 1000:.0f} ms" for value in found]
