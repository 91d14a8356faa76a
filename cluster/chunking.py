"""Into which chunks a handoff is cut, from what the stages were measured to take.

Large chunks cost little in between, small ones let the next stage begin and the last one end
early. So a few sizes are compared and the quickest is taken. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Paced = Literal["read", "map", "write"]
"""The stages that take time per token."""

PACED: tuple[Paced, ...] = ("read", "map", "write")

_KEPT = 0.9
_OVERHEAD_S = 0.002
"""What a chunk costs a stage at least, whatever its size."""


class Cost:
    """Seconds of a stage for a chunk: so much for any, so much per token.

    Both by a line of least squares through the mean chunks of the latest handoffs, within what is
    possible, or with `rate_only` the second alone: transfers under way together slow each other
    down, and what looks like a cost of each chunk is their neighbours'.
    """

    def __init__(self, *, rate_only: bool) -> None:
        self._rate_only = rate_only
        self._count = self._tokens = self._seconds = self._tokens2 = self._both = 0.0

    def saw(self, chunks: int, total_tokens: int, total_s: float) -> None:
        """The stage had so many chunks of a handoff, and was busy for `total_s`."""
        tokens, seconds = total_tokens / chunks, total_s / chunks
        self._count = _KEPT * self._count + 1
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._tokens2 = _KEPT * self._tokens2 + tokens**2
        self._both = _KEPT * self._both + tokens * seconds

    @property
    def token_s(self) -> float | None:
        """Seconds per token, all in; None when nothing was seen."""
        return self._seconds / self._tokens if self._tokens else None

    @property
    def terms(self) -> tuple[float, float] | None:
        """(seconds per chunk, seconds per token); None when nothing was seen."""
        if not self._count:
            return None
        mean_tokens, mean_s = self._tokens / self._count, self._seconds / self._count
        spread = self._tokens2 / self._count - mean_tokens**2
        overhead_s = _OVERHEAD_S
        # Sizes that hardly differ say nothing of what a chunk costs by itself.
        if not self._rate_only and spread > (0.1 * mean_tokens) ** 2:
            slope = (self._both / self._count - mean_tokens * mean_s) / spread
            overhead_s = mean_s - slope * mean_tokens
        overhead_s = min(max(overhead_s, _OVERHEAD_S), mean_s)
        return overhead_s, (mean_s - overhead_s) / mean_tokens


Costs = Mapping[Paced, Cost]


def new_costs() -> dict[Paced, Cost]:
    """Nothing seen of any stage."""
    return {stage: Cost(rate_only=stage != "map") for stage in PACED}


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Chunks are multiples of `grid_tokens` and at most `most_tokens`, two of which fit into each
    of a handoff's buffers."""

    grid_tokens: int
    most_tokens: int

    def chunk_tokens(self, tokens: int, costs: Costs) -> int:
        """The size with which `tokens` are through soonest; the largest while costs are unknown."""
        if any(costs[stage].terms is None for stage in PACED):
            return self.most_tokens
        sizes = [self.most_tokens]
        while sizes[-1] > self.grid_tokens:
            half = sizes[-1] // 2 // self.grid_tokens * self.grid_tokens
            sizes.append(max(half, self.grid_tokens))
        # Of equals the larger: fewer messages for everybody.
        return min(sizes, key=lambda size: (makespan_s(tokens, size, costs), -size))

    def buffers(self, size_tokens: int) -> int:
        """Chunks of a size that one stage can hold."""
        return 2 * self.most_tokens // size_tokens


def makespan_s(tokens: int, size_tokens: int, costs: Costs) -> float:
    """From the first READ to the end of the last WRITE, each stage with one chunk at a time.

    The first chunk passes all stages, then the slowest one has the rest before it. With two
    buffers between stages that is exact for whole chunks.
    """
    first = min(size_tokens, tokens)
    more = -(-tokens // size_tokens) - 1
    terms = [cost.terms for cost in costs.values()]
    through_s = sum(chunk_s + token_s * first for chunk_s, token_s in filter(None, terms))
    rest_s = max(
        more * chunk_s + token_s * (tokens - first) for chunk_s, token_s in filter(None, terms)
    )
    return through_s + rest_s
