"""What the routing bench computes from answers: curves, areas, ranks and tables.

Pure functions of numbers. A `Point` is (part of the answers that the large model took part in,
mean quality). Scores are those of the router: a low one is doubt. It knows no prompts, no files
and no endpoint. After RouteLLM (arXiv 2406.18665: PGR, APGR, CPT) and arXiv 2404.10136 (AUC-DF).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[float, float]


@dataclass(frozen=True)
class Ends:
    """Mean quality of always-small and always-large."""

    small: float
    large: float

    def pgr(self, quality: float) -> float | None:
        """Performance gap recovered: 0 at always-small, 1 at always-large; None without a gap."""
        gap = self.large - self.small
        return None if gap == 0 else (quality - self.small) / gap

    def diagonal(self, fraction: float) -> float:
        """Expected quality when chance sends `fraction` of the requests to the large model."""
        return self.small + fraction * (self.large - self.small)

    def curve(self, points: Sequence[Point]) -> list[Point]:
        """`points` in order, between always-small at 0 and always-large at 1."""
        inner = [point for point in points if 0.0 < point[0] < 1.0]
        return [(0.0, self.small), *sorted(inner), (1.0, self.large)]


def f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Likeness of two texts, 0 to 1: harmonic mean of precision and recall of words, as bags."""
    if not answer or not reference:
        return float(list(answer) == list(reference))
    shared = sum((Counter(answer) & Counter(reference)).values())
    return 2.0 * shared / (len(answer) + len(reference))


def area(points: Sequence[Point]) -> float:
    """Trapezoids under the points, which must rise in their first coordinate."""
    return math.fsum(
        (x1 - x0) * (y0 + y1) / 2.0 for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False)
    )


def apgr(points: Sequence[Point], ends: Ends) -> float | None:
    """Mean PGR over all fractions from 0 to 1; chance has 0.5."""
    if ends.small == ends.large:
        return None
    return (area(ends.curve(points)) - ends.small) / (ends.large - ends.small)


def deferral_area(points: Sequence[Point], ends: Ends) -> float:
    """AUC-DF minus that of the random line, in units of quality."""
    return area(ends.curve(points)) - (ends.small + ends.large) / 2.0


def cpt(points: Sequence[Point], ends: Ends, percent: float) -> float | None:
    """Least fraction whose PGR reaches `percent`, on the monotone envelope; None: not reached.

    The end at 1 does not count: always-large is no routing.
    """
    wanted = percent / 100.0
    before: Point = (0.0, 0.0)
    for fraction, quality in ends.curve(points)[1:-1]:
        gained = ends.pgr(quality)
        if gained is None:
            return None
        if gained >= wanted:
            share = (wanted - before[1]) / (gained - before[1])
            return before[0] + share * (fraction - before[0])
        # A later, lower point does not undo what a smaller fraction reached.
        before = (fraction, max(gained, before[1]))
    return None


def oracle(
    small: Sequence[float], large: Sequence[float], fractions: Sequence[float]
) -> list[Point]:
    """The best choice of whole answers at each fraction: the largest gains go first."""
    gains = sorted((b - a for a, b in zip(small, large, strict=True)), reverse=True)
    total, count = math.fsum(small), len(small)
    # Partial sums at whole numbers of answers; between them the line.
    sums = [total + math.fsum(gains[:taken]) for taken in range(count + 1)]
    return [
        (one, float(np.interp(one * count, range(count + 1), sums)) / count) for one in fractions
    ]


def auroc(scores: Sequence[float], failed: Sequence[bool]) -> float | None:
    """Chance that a failed answer has the lower score, ties half; None when all or none failed."""
    from scipy.stats import rankdata

    bad = sum(failed)
    good = len(failed) - bad
    if not bad or not good:
        return None
    ranks = rankdata(scores)
    bad_ranks = math.fsum(rank for rank, is_bad in zip(ranks, failed, strict=True) if is_bad)
    return 1.0 - (bad_ranks - bad * (bad + 1) / 2.0) / (bad * good)


def failure_rates(
    scores: Sequence[float], failed: Sequence[bool], at: Sequence[float]
) -> list[float]:
    """Probability of failing at the scores `at`, by isotonic regression (it falls with the score).

    Between fitted scores it is interpolated, beyond them constant.
    """
    from scipy.optimize import isotonic_regression

    levels = sorted(set(scores))
    where = {level: number for number, level in enumerate(levels)}
    counts, sums = np.zeros(len(levels)), np.zeros(len(levels))
    for score, is_bad in zip(scores, failed, strict=True):
        counts[where[score]] += 1
        sums[where[score]] += is_bad
    fitted = isotonic_regression(sums / counts, weights=counts, increasing=False).x
    return [float(rate) for rate in np.interp(at, levels, fitted)]


def ece(predicted: Sequence[float], failed: Sequence[bool], bins: int = 10) -> float:
    """Expected calibration error over equally wide bins of the predicted rate."""
    sums: dict[int, list[float]] = {}
    for rate, is_bad in zip(predicted, failed, strict=True):
        cell = sums.setdefault(min(int(rate * bins), bins - 1), [0.0, 0.0])
        cell[0] += rate
        cell[1] += is_bad
    return math.fsum(abs(rate - bad) for rate, bad in sums.values()) / len(failed)


def quadrants(small: Sequence[bool], large: Sequence[bool]) -> dict[str, int]:
    """RESCUE: only the large model is right; LOSS: only the small one; SAFE: both; HARD: none."""
    names = {(False, True): "RESCUE", (True, False): "LOSS", (True, True): "SAFE"}
    found = Counter(names.get(pair, "HARD") for pair in zip(small, large, strict=True))
    return {name: found[name] for name in ("RESCUE", "LOSS", "SAFE", "HARD")}


def share_interval(
    rank: int, size: int, answers: int, confidence: float = 0.9
) -> tuple[float, float]:
    """Interval of the share of `answers` new ones that fall below the `rank`-th of `size` scores.

    The long-run fraction is Beta(rank, size + 1 - rank); `answers` draws from it add their own
    chance (beta-binomial).
    """
    from scipy.stats import betabinom

    tail = (1.0 - confidence) / 2.0
    law = betabinom(answers, rank, size + 1 - rank)
    return float(law.ppf(tail)) / answers, float(law.ppf(1.0 - tail)) / answers
