"""Prometheus text as numbers: sums, rates and quantiles of what an endpoint exports.

The rules are Prometheus's own (`rate`, `histogram_quantile`), for a window of few scrapes. It
knows no HTTP and none of the names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Labels = Mapping[str, str]
Buckets = dict[float, float]
"""Upper bound of a bucket: how many were not above it."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """Every series at one moment; `at_s` is monotonic."""

    at_s: float
    series: Mapping[str, tuple[tuple[Labels, float], ...]]

    @classmethod
    def parse(cls, text: str, *, at_s: float) -> Scrape:
        """Read Prometheus's text format; raises ValueError when it is none."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(at_s=at_s, series={name: tuple(values) for name, values in found.items()})

    def values(self, name: str, **labels: str) -> list[float]:
        """The values of the series with these labels, whatever others they have."""
        return [value for _, value in self._matching(name, labels)]

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None when there is none."""
        values = self.values(name, **labels)
        return sum(values) if values else None

    def label_values(self, name: str, label: str) -> list[str]:
        """What a label of a metric has been, in alphabetical order."""
        return sorted({labels[label] for labels, _ in self._matching(name, {}) if label in labels})

    def buckets(self, name: str, **labels: str) -> Buckets:
        """The cumulative buckets of a histogram, summed over its series."""
        found: Buckets = {}
        for own, value in self._matching(f"{name}_bucket", labels):
            bound = float(own["le"])
            found[bound] = found.get(bound, 0.0) + value
        return found

    def _matching(self, name: str, labels: Labels) -> Iterable[tuple[Labels, float]]:
        for own, value in self.series.get(name, ()):
            if all(own.get(key) == wanted for key, wanted in labels.items()):
                yield own, value


def quantile(buckets: Buckets, q: float) -> float | None:
    """`histogram_quantile`: linear within a bucket; None without observations.

    In the last, open bucket it is that bucket's lower bound, as in Prometheus.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank = q * buckets[bounds[-1]]
    below_bound = below = 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            if math.isinf(bound):
                return below_bound
            share = (rank - below) / (buckets[bound] - below)
            return below_bound + (bound - below_bound) * share
        below_bound, below = bound, buckets[bound]
    return below_bound


class Window:
    """The scrapes of the last seconds, oldest first."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._scrapes: deque[Scrape] = deque()

    def add(self, scrape: Scrape) -> None:
        """Add the newest and forget what is older than the window."""
        self._scrapes.append(scrape)
        while scrape.at_s - self._scrapes[0].at_s > self._length_s:
            self._scrapes.popleft()

    @property
    def latest(self) -> Scrape:
        """The newest; there is one after the first `add`."""
        return self._scrapes[-1]

    def rate(self, name: str, **labels: str) -> float | None:
        """Increase of a counter per second; None before the second scrape.

        A counter that fell has restarted at zero.
        """
        first, last = self._scrapes[0], self.latest
        if last.at_s <= first.at_s:
            return None
        now, before = last.total(name, **labels) or 0.0, first.total(name, **labels) or 0.0
        return (now - before if now >= before else now) / (last.at_s - first.at_s)

    def buckets(self, name: str, **labels: str) -> Buckets:
        """What a histogram observed within the window; everything when that is nothing."""
        now = self.latest.buckets(name, **labels)
        before = self._scrapes[0].buckets(name, **labels)
        within = {bound: count - before.get(bound, 0.0) for bound, count in now.items()}
        fell = any(count < 0 for count in within.values())
        return now if fell or not any(within.values()) else within
