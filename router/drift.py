"""A threshold that follows the traffic, so that the escalated fraction stays what was asked for.

After each answer it moves by step * (f - escalated), with escalated 0 or 1: up, towards more
escalations, when there were too few. If all scores lie in [low, high], then over T answers in any
order, however the traffic changes,

    |escalated fraction - f| <= (high - low + step) / (step * T)

(adaptive conformal inference, arXiv 2106.00170): the threshold never leaves [low - step,
high + step], and each move is an error made visible. That says nothing of which answers are
escalated, and a step that is too large makes them arbitrary. One object per router; every replica
follows its own traffic.
"""

from __future__ import annotations

import logging

from router.policy import Decision, Policy, PolicyWrapper
from router.ports import FinishReason, TokenStep
from router.threshold import Threshold

logger = logging.getLogger(__name__)

BATCH_ANSWERS = 50
"""The threshold's moves are logged once for so many answers."""

SUFFIX = "+drift"
"""Marks a calibration id whose threshold has moved."""


class Drift:
    """The running threshold: begins at a calibrated one, for `target_fraction` of the answers.

    `low` and `high` are the calibration's lowest and highest score (nats), `step` is in nats.
    """

    def __init__(
        self, start: Threshold, *, target_fraction: float, low: float, high: float, step: float
    ) -> None:
        assert step > 0.0 and low <= start.value <= high
        self._start = start
        self._value = start.value
        self._target = target_fraction
        self._step = step
        self._low, self._high = low - step, high + step
        self._answers = 0
        self._escalated = 0
        self._logged = start.value

    @property
    def threshold(self) -> Threshold:
        """Where it is now. Once it has moved, equal scores are no longer split."""
        if self._answers == 0 and self._value == self._start.value:
            return self._start
        return Threshold(self._value, 0.0, f"{self._start.calibration_id}{SUFFIX}")

    def observe(self, escalated: bool) -> None:
        """One more answer was judged by this threshold."""
        moved = self._value + self._step * (self._target - escalated)
        self._value = min(max(moved, self._low), self._high)
        self._answers += 1
        self._escalated += escalated
        if self._answers % BATCH_ANSWERS == 0:
            logger.info(
                "drift: threshold %.4f, was %.4f before %d answers; escalated %.3f of %d in all, "
                "target %.3f",
                self._value,
                self._logged,
                BATCH_ANSWERS,
                self._escalated / self._answers,
                self._answers,
                self._target,
            )
            self._logged = self._value


class DriftPolicy(PolicyWrapper):
    """Tells a Drift what `inner`, which uses its threshold, decided on one answer.

    What counts is what the score asked for. A wrapper may refuse it, and an answer that `inner`
    never got to judge does not count.
    """

    def __init__(self, inner: Policy, drift: Drift) -> None:
        super().__init__(inner)
        self._drift = drift
        self._told = False

    def on_prompt(self, logprobs: tuple[float, ...]) -> Decision:
        """As `inner`."""
        return self._seen(super().on_prompt(logprobs))

    def on_token(self, step: TokenStep) -> Decision:
        """As `inner`."""
        return self._seen(super().on_token(step))

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """As `inner`."""
        decision = self._seen(super().on_complete(finish_reason))
        self._tell(False)
        return decision

    def _seen(self, decision: Decision) -> Decision:
        if decision.action != "stay":
            self._tell(True)
        return decision

    def _tell(self, escalated: bool) -> None:
        if not self._told:
            self._told = True
            self._drift.observe(escalated)
