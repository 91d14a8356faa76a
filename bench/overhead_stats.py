"""What the overhead bench makes of raw times. It knows no HTTP, no Ray and no model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it: when events with tokens came, and its end, in seconds."""

    arrivals_s: Sequence[float]
    total_s: float

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Times between arrivals; events that came in one piece have none between them."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return [after - before for before, after in pairs]


@dataclass(frozen=True)
class Latency:
    """Milliseconds over all requests of one endpoint; gaps over all arrivals."""

    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    total_p50_ms: float
    total_p99_ms: float


@dataclass(frozen=True)
class Load:
    """Many streams at once: tokens/s of each round, and CPU time per token of each process."""

    tokens_per_s: list[float]
    cpu_ms_per_token: dict[str, float]
    ttft_p50_ms: float
    total_p50_ms: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of them lie, between neighbours by straight line."""
    assert values and 0 <= percent <= 100
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latency(answers: Sequence[Answer]) -> Latency:
    """p50 and p99 in milliseconds."""
    gaps = [gap for answer in answers for gap in answer.gaps_s]

    def ms(values: Sequence[float], percent: float) -> float:
        return 1e3 * percentile(values, percent)

    ttft, total = [one.ttft_s for one in answers], [one.total_s for one in answers]
    return Latency(
        requests=len(answers),
        ttft_p50_ms=ms(ttft, 50),
        ttft_p99_ms=ms(ttft, 99),
        gap_p50_ms=ms(gaps, 50),
        gap_p99_ms=ms(gaps, 99),
        total_p50_ms=ms(total, 50),
        total_p99_ms=ms(total, 99),
    )


def added_ms(base_s: Sequence[float], other_s: Sequence[float]) -> float:
    """Median of `other` minus `base` over pairs that were measured next to each other, in ms."""
    pairs = zip(base_s, other_s, strict=True)
    return 1e3 * statistics.median(other - base for base, other in pairs)


def share(base: Sequence[float], other: Sequence[float]) -> float:
    """Median of `other` / `base` over rounds that were measured next to each other."""
    return statistics.median(b / a for a, b in zip(base, other, strict=True))
