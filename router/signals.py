"""What the small model's own log-probabilities say about its doubt.

Missing evidence stays missing: nothing here turns an absent log-probability into certainty. It
does not know thresholds or decisions.
"""

from __future__ import annotations

import math
from collections import deque

from router.ports import TokenStep


def margin(step: TokenStep) -> float | None:
    """Top-1 minus top-2 log-probability in nats, or None when either is missing or not finite.

    It is read from the two most likely tokens, not from the sampled one, so a request's
    temperature does not move it.
    """
    by_rank = {rank: logprob for _, logprob, rank in step.logprobs}
    if 1 not in by_rank or 2 not in by_rank:
        return None
    value = by_rank[1] - by_rank[2]
    return value if math.isfinite(value) else None


class SlidingMean:
    """Mean of the last `window` values; unknown until so many arrived."""

    def __init__(self, window: int) -> None:
        assert window > 0
        self._values: deque[float] = deque(maxlen=window)

    def push(self, value: float) -> None:
        """Add one value; the oldest leaves."""
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """The mean, or None while fewer than `window` values arrived."""
        if len(self._values) < (self._values.maxlen or 0):
            return None
        return math.fsum(self._values) / len(self._values)
