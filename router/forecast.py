"""How long a handoff and a cold read will take, from what both took lately.

Each path is a line, seconds = a + b * tokens, through its own measurements. It knows no engines,
and nothing of what a token costs beyond that line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Literal

Path = Literal["mapped", "recompute"]

KEPT = 64
"""Measurements of each path; older ones are forgotten at once."""

LEAST = 3
"""Measurements before a path is predicted."""

SPREAD = 1.25
"""How many times the shortest the longest of them has to be, so that a slope can be told."""

REACH = 2.0
"""A line says nothing of more tokens than so many times the most that were measured: reading costs
more per token the longer it gets, and what was short says little of it."""

FORGET = 0.95
"""Weight of a measurement relative to the next newer one of its path."""

EXPLORE_EVERY = 32
"""Every so many decisions the path that was not chosen may be taken, to measure it."""

STALE_S = 300.0
"""Only if its newest measurement is older than this."""

EXPLORE_AT_MOST = 2.0
"""And only if it is not expected to take longer than so many times the other one."""

_REWEIGHTINGS = 4
_HUBER = 1.345


class Line:
    """Robust line through the newest measurements of one path, with a >= 0 and b >= 0.

    Weighted least squares; newer points weigh more, and points far off the line (a stall, a
    garbage collection) less (Huber's weights, scale from the median absolute residual).
    """

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._line: tuple[float, float] | None = None
        self._fitted = True

    def observe(self, tokens: int, seconds: float) -> None:
        """Add one measurement of at least one token."""
        assert tokens > 0 and seconds >= 0.0
        self._points.append((tokens, seconds))
        self._fitted = False

    def at(self, tokens: int) -> float | None:
        """Seconds for `tokens`; None while the measurements are too few, too much alike, or all of
        far fewer tokens."""
        if not self._fitted:
            self._line = self._fit()
            self._fitted = True
        if self._line is None or tokens > REACH * max(one for one, _ in self._points):
            return None
        fixed_s, token_s = self._line
        return fixed_s + token_s * tokens

    def _fit(self) -> tuple[float, float] | None:
        lengths = [tokens for tokens, _ in self._points]
        if len(lengths) < LEAST or max(lengths) < SPREAD * min(lengths):
            return None
        recent = [FORGET**age for age in range(len(lengths) - 1, -1, -1)]
        line = _least_squares(self._points, recent)
        for _ in range(_REWEIGHTINGS):
            residuals = [abs(seconds - line[0] - line[1] * n) for n, seconds in self._points]
            limit = _HUBER * 1.4826 * median(residuals)
            if limit == 0.0:
                break  # half of the points lie on the line already
            kept = [min(1.0, limit / one) if one > 0.0 else 1.0 for one in residuals]
            weights = [a * b for a, b in zip(recent, kept, strict=True)]
            line = _least_squares(self._points, weights)
        return line


def _least_squares(points: deque[tuple[int, float]], weights: list[float]) -> tuple[float, float]:
    """(a, b), both at least 0, that minimise the weighted squares of seconds - a - b * tokens."""
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    joint = sum(w * (n - mean_n) * (s - mean_s) for w, (n, s) in zip(weights, points, strict=True))
    slope = joint / spread
    if slope <= 0.0:
        return mean_s, 0.0
    if (fixed := mean_s - slope * mean_n) >= 0.0:
        return fixed, slope
    through_zero = sum(w * n * s for w, (n, s) in zip(weights, points, strict=True))
    return 0.0, through_zero / sum(w * n * n for w, (n, _) in zip(weights, points, strict=True))


class Forecast:
    """Predicts both ways of one model to get a conversation. One object per target and router.

    Feed it the times from the decision to the first token; leave out those that a first handshake
    with a peer made longer. Deterministic for one order of calls and one `clock` (monotonic, s).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[Path, Line] = {"mapped": Line(), "recompute": Line()}
        self._newest_s: dict[Path, float] = {}
        self._decisions = 0

    def observe_mapped(self, tokens: int, seconds: float) -> None:
        """A handoff that brought `tokens` as mapped KV took `seconds`."""
        self._observe("mapped", tokens, seconds)

    def observe_recompute(self, tokens: int, seconds: float) -> None:
        """Reading `tokens` took `seconds`."""
        self._observe("recompute", tokens, seconds)

    def mapped_s(self, tokens: int) -> float | None:
        """Expected seconds until the first token with `tokens` mapped; None when not known."""
        return self._lines["mapped"].at(tokens)

    def recompute_s(self, tokens: int) -> float | None:
        """Expected seconds until the first token after reading `tokens`; None when not known."""
        return self._lines["recompute"].at(tokens)

    def cheaper(self, missing_tokens: int, covered_tokens: int) -> Path | None:
        """The path to take for `missing_tokens`, of which a handoff would map `covered_tokens`.

        None while a path is unknown. On a tie it is `recompute`, whose answer is exact. Every
        EXPLORE_EVERY-th decision takes the other path when that was not measured for STALE_S and
        is not expected to take more than EXPLORE_AT_MOST times as long.
        """
        self._decisions += 1
        mapped_s, recompute_s = self.mapped_s(covered_tokens), self.recompute_s(missing_tokens)
        if mapped_s is None or recompute_s is None:
            return None
        choice: Path = "mapped" if mapped_s < recompute_s else "recompute"
        other: Path = "recompute" if choice == "mapped" else "mapped"
        bearable = max(mapped_s, recompute_s) <= EXPLORE_AT_MOST * min(mapped_s, recompute_s)
        if bearable and self._decisions % EXPLORE_EVERY == 0 and self._stale(other):
            return other
        return choice

    def _observe(self, path: Path, tokens: int, seconds: float) -> None:
        if tokens > 0:
            self._lines[path].observe(tokens, seconds)
            self._newest_s[path] = self._clock()

    def _stale(self, path: Path) -> bool:
        newest_s = self._newest_s.get(path)
        return newest_s is None or self._clock() - newest_s > STALE_S
