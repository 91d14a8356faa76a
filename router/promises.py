"""Promises about cost and quality: the fraction to escalate so that they hold.

Cost: conformal risk control (arXiv 2208.02814) on a cost that never falls as more is escalated.
Quality: exact binomial tests in a fixed sequence (arXiv 2407.18370, 2110.01052), the thresholds
from one half of the answers and the tests on the other, so that both are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import ConfigError
from router.calibration import max_rank
from router.samples import Sample
from router.threshold import Threshold

_STEP = 0.05


@dataclass(frozen=True)
class Prices:
    """What an answer costs, in any one unit. The large model's token costs more than the small's.

    A handed-over answer is taken to be as long as the small model's would have been; no answer is
    longer than `longest_tokens`. The large model writes the `hold_back_tokens` again. An escalation
    before so many tokens is priced as one there, so that escalating earlier never costs less.
    """

    small_token: float
    large_token: float
    handoff: float
    longest_tokens: int
    hold_back_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.small_token <= self.large_token or self.handoff < 0:
            raise ConfigError("prices: a large token costs at least as much as a small one, >= 0")

    @property
    def bound(self) -> float:
        """No answer costs more."""
        return self._escalated(self.longest_tokens, 0)

    def of(self, sample: Sample, threshold: Threshold) -> float:
        """Cost of one answer under a threshold."""
        token = sample.handover_token(threshold)
        if token is None:
            return sample.tokens * self.small_token
        return self._escalated(sample.tokens, token)

    def _escalated(self, tokens: int, at_token: int) -> float:
        held = min(self.hold_back_tokens, tokens)
        small = max(at_token, held)
        return small * self.small_token + self.handoff + (tokens - small + held) * self.large_token


def fraction_for_cost(samples: Sequence[Sample], prices: Prices, max_cost: float) -> float:
    """The largest fraction whose expected cost per answer is at most `max_cost`.

    Raises ConfigError when the samples are too few or not whole answers, or nothing is that cheap.
    """
    if any(not one.exact for one in samples):
        raise ConfigError("a cost needs the small model's whole answers: log with `policy: small`")
    longest = max(one.tokens for one in samples)
    if longest > prices.longest_tokens:
        raise ConfigError(f"an answer has {longest} tokens: raise the longest answer")
    size = len(samples)
    scored = sorted((one for one in samples if one.score is not None), key=lambda one: one.order)

    def risk(rank: int) -> float:
        score, tie = scored[rank - 1].order
        threshold = Threshold(score, tie)
        return (math.fsum(prices.of(one, threshold) for one in samples) + prices.bound) / (size + 1)

    low, high = 0, len(scored)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if risk(middle) <= max_cost else (low, middle - 1)
    if low == 0:
        small = math.fsum(one.tokens for one in samples) * prices.small_token
        least = (small + prices.bound) / (size + 1)
        raise ConfigError(
            f"a cost of {max_cost:g} cannot be promised: with {size} answers even the small model "
            f"alone is only known to cost at most {least:.4g}; allow more, or log more answers"
        )
    return _fraction(low, size)


def fraction_for_failures(
    samples: Sequence[Sample], max_failure_rate: float, confidence: float
) -> float:
    """The smallest fraction for which, with `confidence`, at most `max_failure_rate` of the answers
    that the small model keeps fail.

    Raises ConfigError when answers are not judged, too few, or too often wrong.
    """
    from scipy.special import bdtr

    judged = [one for one in samples if one.failed is not None]
    chosen, tested = judged[::2], judged[1::2]
    needed = kept_needed(max_failure_rate, confidence)
    if len(tested) < needed:
        raise ConfigError(
            f"{len(judged)} judged answers cannot show a failure rate of {max_failure_rate:g} with "
            f"confidence {confidence:g}: it takes at least {2 * needed}, and more where some fail "
            "(`failed` in the log's lines says which did)"
        )
    if any(not one.exact for one in judged):
        raise ConfigError("a failure rate needs the small model's whole answers: `policy: small`")
    scored = sorted((one for one in chosen if one.score is not None), key=lambda one: one.order)
    passed: Sample | None = None
    seen = ""
    for step in range(round(1 / _STEP) - 1, 0, -1):
        rank = max_rank(step * _STEP, len(chosen))
        if not 1 <= rank <= len(scored):
            continue
        threshold = Threshold(*scored[rank - 1].order)
        kept = [
            one for one in tested if one.score is None or not threshold.doubts(one.score, one.tie)
        ]
        if len(kept) < needed:
            continue
        failures = sum(bool(one.failed) for one in kept)
        if bdtr(failures, len(kept), max_failure_rate) > 1.0 - confidence:
            seen = f"; of {len(kept)} kept answers {failures} failed"
            break
        passed = scored[rank - 1]
    if passed is None:
        raise ConfigError(
            f"no threshold keeps failures below {max_failure_rate:g} with confidence "
            f"{confidence:g}{seen}: allow more, or judge more answers"
        )
    order = sorted(one.order for one in samples if one.score is not None)
    return _fraction(order.index(passed.order) + 1, len(samples))


def kept_needed(max_failure_rate: float, confidence: float) -> int:
    """Answers that show the rate when none of them failed: the least that can."""
    return math.ceil(math.log(1.0 - confidence) / math.log(1.0 - max_failure_rate) - 1e-9)


def _fraction(rank: int, size: int) -> float:
    """A fraction that `Calibration.rank` turns into this rank again."""
    return (rank + 0.5) / (size + 1)
