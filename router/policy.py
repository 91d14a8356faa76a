"""Who answers: a decision on the request, on each of the small model's tokens, and at its end.

A policy object serves one answer and is thrown away. It sees numbers only: not text, engines or
KV, and it cannot make anything happen; `router/splice.py` acts on its decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.config import RoutingConfig
from router.api import CascadeOptions
from router.ports import FinishReason, TokenStep
from router.signals import SlidingMean, margin

Role = Literal["small", "large"]
"""The two places a model can have in the cascade."""


@dataclass(frozen=True)
class Decision:
    """What to do and why.

    `stay` leaves the answer to the small model, `escalate` hands a started answer over, `large`
    sends the request to the large model at once. `score` and `threshold` are in the policy's own
    unit (`margin`: nats) and unknown where no number decided.
    """

    action: Literal["stay", "escalate", "large"]
    reason: str
    score: float | None = None
    threshold: float | None = None
    calibration_id: str | None = None


class Policy(Protocol):
    """Decides for one answer."""

    @property
    def may_escalate(self) -> bool:
        """Whether the large model may take over; false promises that it never will."""

    @property
    def small_tokens(self) -> int | None:
        """Tokens after which the small model is to stop; 0: it only reads the prompt."""

    def on_request(self) -> Decision:
        """Before anything is computed: `stay` or `large`."""

    def on_token(self, step: TokenStep) -> Decision:
        """After each token of the small model: `stay` or `escalate`."""

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """The small model ended by itself or at its limit: `stay`, or `escalate` to go on."""


class FixedPolicy:
    """One model answers everything, for a stated reason."""

    may_escalate = False
    small_tokens = None

    def __init__(self, role: Role, reason: str) -> None:
        self._decision = Decision("large" if role == "large" else "stay", reason)

    def on_request(self) -> Decision:
        """The fixed choice."""
        return self._decision

    def on_token(self, step: TokenStep) -> Decision:
        """The fixed choice."""
        return self._decision

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """The fixed choice."""
        return self._decision


class ScheduledPolicy:
    """Hands over after a number of tokens that the request states; doubt plays no part."""

    may_escalate = True

    def __init__(self, after_tokens: int) -> None:
        self.small_tokens = after_tokens

    def on_request(self) -> Decision:
        """Always starts with the small model."""
        return Decision("stay", "scheduled")

    def on_token(self, step: TokenStep) -> Decision:
        """`stay`: the small model's own limit ends its part."""
        return Decision("stay", "scheduled")

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """`escalate` at the limit; an answer that ended before it is complete."""
        if finish_reason == "stop" and self.small_tokens > 0:
            return Decision("stay", "ended_early")
        return Decision("escalate", "scheduled")


class MarginPolicy:
    """Escalates when the mean margin over a sliding window falls below a threshold.

    The score that is reported, and that a threshold has to be calibrated on, is the lowest window
    mean of the answer so far. Tokens without log-probabilities are no evidence: they neither
    escalate nor reassure.
    """

    may_escalate = True
    small_tokens = None

    def __init__(self, routing: RoutingConfig) -> None:
        self._threshold = routing.margin_threshold
        self._last_token = routing.max_escalation_tokens
        self._window = SlidingMean(routing.margin_window_tokens)
        self._seen = 0
        self._lowest: float | None = None

    def on_request(self) -> Decision:
        """Always starts with the small model."""
        return self._stay("watching")

    def on_token(self, step: TokenStep) -> Decision:
        """`escalate` on the first window below the threshold, within the allowed tokens."""
        self._seen += 1
        if self._seen > self._last_token:
            return self._stay("past_limit")
        value = margin(step)
        if value is None:
            return self._stay("no_evidence")
        self._window.push(value)
        mean = self._window.value
        if mean is None:
            return self._stay("watching")
        self._lowest = mean if self._lowest is None else min(self._lowest, mean)
        if mean < self._threshold:
            return Decision("escalate", "low_margin", mean, self._threshold)
        return self._stay("watching")

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """`stay`: confident when a whole window was seen, else without evidence."""
        return self._stay("confident" if self._lowest is not None else "no_evidence")

    def _stay(self, reason: str) -> Decision:
        return Decision("stay", reason, self._lowest, self._threshold)


def make_policy(routing: RoutingConfig, options: CascadeOptions) -> Policy:
    """A fresh policy for one answer; the request's own options win over the configuration."""
    if options.escalate_after_tokens is not None:
        return ScheduledPolicy(options.escalate_after_tokens)
    if options.force is not None:
        return FixedPolicy(options.force, "forced")
    if routing.policy == "margin":
        return MarginPolicy(routing)
    return FixedPolicy(routing.policy, "policy")
