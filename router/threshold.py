"""Policies that compare a score with a threshold: while the small model writes, or at its end.

Tokens without log-probabilities are no evidence: they neither escalate nor reassure. It does not
know where a threshold came from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from router.chance import uniform
from router.policy import Decision, RequestView, TokenPolicy
from router.ports import FinishReason, TokenStep
from router.scores import ScoreSpec
from router.signals import margin


@dataclass(frozen=True)
class Threshold:
    """Where doubt begins (nats).

    Of the answers whose score equals `value` exactly, the fraction `tie_fraction` is doubtful,
    drawn by request hash; so a threshold can split scores that many answers share.
    """

    value: float
    tie_fraction: float = 0.0
    calibration_id: str | None = None

    def moved(self, by: float) -> Threshold:
        """The threshold that much higher; of equal scores all or none are then doubtful."""
        return self if by == 0.0 else replace(self, value=self.value + by, tie_fraction=0.0)

    def doubts(self, score: float, tie: float) -> bool:
        """Whether an answer with this score and tie draw (in [0, 1)) has to be escalated."""
        return score < self.value or (score == self.value and tie < self.tie_fraction)


def decide(
    action: Literal["stay", "escalate"], reason: str, score: float | None, threshold: Threshold
) -> Decision:
    """A decision that a score and a threshold made."""
    return Decision(action, reason, score, threshold.value, threshold.calibration_id)


class ScoredPolicy(TokenPolicy):
    """What policies share that compare one score of an answer with a threshold."""

    at_end = False
    may_escalate = True
    small_tokens = None

    def __init__(self, name: str, threshold: Threshold) -> None:
        self.name = name
        self._threshold = threshold
        self._tie = 0.0
        self._score: float | None = None

    def on_request(self, view: RequestView) -> Decision:
        """Always starts with the small model."""
        self._tie = uniform(view.request_hash, "tie")
        self._threshold = self._threshold.moved(view.threshold_shift)
        return self._stay("watching")

    def _doubts(self, score: float) -> bool:
        return self._threshold.doubts(score, self._tie)

    def _stay(self, reason: str) -> Decision:
        return decide("stay", reason, self._score, self._threshold)


class ScorePolicy(ScoredPolicy):
    """Escalates in mid-answer, as soon as the score falls below the threshold.

    A finished answer reports its score: the lowest value of the statistic (`ScoreSpec`).
    """

    def __init__(self, spec: ScoreSpec, threshold: Threshold) -> None:
        assert spec.falls and spec.last_token is not None
        super().__init__(spec.name, threshold)
        self._last_token = spec.last_token
        self._statistic = spec.start()
        self._seen = 0

    def on_token(self, step: TokenStep) -> Decision:
        """`escalate` while the statistic is below the threshold, within the allowed tokens."""
        self._seen += 1
        if self._seen > self._last_token:
            return self._stay("past_limit")
        found = margin(step)
        if found is None:
            return self._stay("no_evidence")
        self._statistic.push(found)
        value = self._statistic.value
        if value is None:
            return self._stay("watching")
        self._score = value if self._score is None else min(self._score, value)
        if self._doubts(value):
            return decide("escalate", "low_margin", value, self._threshold)
        return decide("stay", "watching", value, self._threshold)

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """`stay`: confident when there is a score, its lowest value, else without evidence."""
        return self._stay("confident" if self._score is not None else "no_evidence")


class DeferralPolicy(ScoredPolicy):
    """Judges the small model's whole answer when it has ended.

    What was sent by then stays. Only tokens that are still held back can be dropped, and the large
    model goes on from there: a hold-back longer than the answer lets it answer from the beginning,
    a shorter one lets it rewrite the end alone.
    """

    at_end = True

    def __init__(self, spec: ScoreSpec, threshold: Threshold) -> None:
        assert not spec.falls
        super().__init__(spec.name, threshold)
        self._statistic = spec.start()

    def on_token(self, step: TokenStep) -> Decision:
        """`stay`: it waits for the end."""
        found = margin(step)
        if found is None:
            return self._stay("no_evidence")
        self._statistic.push(found)
        self._score = self._statistic.value
        return self._stay("watching")

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """`escalate` when the mean margin of the answer is below the threshold."""
        if self._score is None:
            return self._stay("no_evidence")
        if self._doubts(self._score):
            return decide("escalate", "low_margin", self._score, self._threshold)
        return self._stay("confident")
