"""Into which chunks a handoff is cut, from what the stages were measured to take.

Large chunks cost little in between, small ones let the next stage begin and the last one end
early. So a few ways of cutting are compared and the quickest is taken. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Paced = Literal["read", "map", "write"]
"""The stages that take time per token."""

PACED: tuple[Paced, ...] = ("read", "map", "write")

_KEPT = 0.9
LEAST_CHUNK_S = 0.002
"""What a chunk costs a stage at least, whatever its size."""


class Cost:
    """Seconds of a stage: `chunk_s` for any chunk, and so much per token, by the latest handoffs.

    What a chunk costs by itself is not learnt from them: their chunks hardly differ in size, and
    transfers share their links with others.
    """

    def __init__(self, chunk_s: float = LEAST_CHUNK_S) -> None:
        self._chunk_s = chunk_s
        self._chunks = self._tokens = self._seconds = 0.0

    def saw(self, chunks: int, total_tokens: int, total_s: float) -> None:
        """The stage had so many chunks of a handoff, and was busy for `total_s`."""
        self._chunks = _KEPT * self._chunks + chunks
        self._tokens = _KEPT * self._tokens + total_tokens
        self._seconds = _KEPT * self._seconds + total_s

    @property
    def token_s(self) -> float | None:
        """Seconds per token, all in; None when nothing was seen."""
        return self._seconds / self._tokens if self._tokens else None

    @property
    def terms(self) -> tuple[float, float] | None:
        """(seconds per chunk, seconds per token); None when nothing was seen."""
        if not self._tokens:
            return None
        chunk_s = min(self._chunk_s, self._seconds / self._chunks)
        return chunk_s, (self._seconds - chunk_s * self._chunks) / self._tokens


def chunk_s_of(small: tuple[int, float], large: tuple[int, float]) -> float:
    """What a chunk costs by itself, from two sizes in tokens and their seconds."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return max(LEAST_CHUNK_S, small[1] - max(0.0, slope) * small[0])


Costs = Mapping[Paced, Cost]


def new_costs() -> dict[Paced, Cost]:
    """Nothing seen of any stage."""
    return {stage: Cost() for stage in PACED}


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """Chunks begin on multiples of `grid_tokens` and have at most `most_tokens`, two of which fit
    into each of a handoff's buffers."""

    grid_tokens: int
    most_tokens: int

    def cut(self, tokens: int, costs: Costs) -> list[int]:
        """Chunks of in all `tokens`, in order, so that they are through soonest.

        While costs are unknown they are the largest. Else they may grow at the beginning, so that
        the later stages begin early, and shrink towards the end, so that little is left to do when
        the earlier ones are through.
        """
        if any(costs[stage].terms is None for stage in PACED):
            return self._chunks(tokens, self.most_tokens, (), ())
        sizes = [self.grid_tokens]
        while sizes[-1] < self.most_tokens:
            sizes.append(min(2 * sizes[-1], self.most_tokens))
        best: list[int] = []
        best_s = math.inf
        for at, size in reversed([*enumerate(sizes)]):
            small, least_here_s = sizes[:at], least_s(tokens, size, costs)
            for head, tail in product({(), tuple(small)}, {(), tuple(reversed(small))}):
                if sum(head) + sum(tail) > tokens or least_here_s >= best_s:
                    continue
                chunks = self._chunks(tokens, size, head, tail)
                needed_s = makespan_s(chunks, costs)
                if needed_s < best_s:
                    best, best_s = chunks, needed_s
        return best

    def _chunks(
        self, tokens: int, size: int, head: Sequence[int], tail: Sequence[int]
    ) -> list[int]:
        """`head`, chunks of `size` and what is left of them, `tail`; only the last of all may end
        beside the grid."""
        whole = -(-tokens // self.grid_tokens) * self.grid_tokens
        full, rest = divmod(whole - sum(head) - sum(tail), size)
        chunks = [*head, *[size] * full, *[rest] * bool(rest), *tail]
        chunks[-1] -= whole - tokens
        return chunks

    def largest(self, chunks: Sequence[int]) -> int:
        """Tokens for which the largest of these chunks needs blocks."""
        return -(-max(chunks) // self.grid_tokens) * self.grid_tokens

    def buffers(self, chunks: Sequence[int]) -> int:
        """How many of these chunks one stage can hold, whichever."""
        return 2 * self.most_tokens // self.largest(chunks)


def makespan_s(chunks: Sequence[int], costs: Costs) -> float:
    """From the first READ to the end of the last WRITE: each stage has one chunk at a time.

    Buffers between stages are taken to suffice, as two do for chunks of one size.
    """
    terms = [cost.terms or (0.0, 0.0) for cost in costs.values()]
    ends_s = [0.0] * len(terms)
    for tokens in chunks:
        end_s = 0.0
        for at, (chunk_s, token_s) in enumerate(terms):
            end_s = max(end_s, ends_s[at]) + chunk_s + token_s * tokens
            ends_s[at] = end_s
    return ends_s[-1]


def least_s(tokens: int, size_tokens: int, costs: Costs) -> float:
    """What the slowest stage alone takes at least for chunks of at most a size."""
    chunks = -(-tokens // size_tokens)
    terms = [cost.terms or (0.0, 0.0) for cost in costs.values()]
    return max(chunks * chunk_s + token_s * tokens for chunk_s, token_s in terms)
