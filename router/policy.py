"""Who answers: a decision on the request, on each of the small model's tokens, and at its end.

A policy object serves one answer and is thrown away. It sees numbers only: not text, engines or
KV, and it cannot make anything happen; `router/splice.py` acts on its decisions. Here are the
interface and the two policies without a score; `router/policies.py` chooses one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from router.ports import FinishReason, TokenStep

Role = Literal["small", "large"]
"""The two places a model can have in the cascade."""


@dataclass(frozen=True)
class Decision:
    """What to do and why.

    `stay` leaves the answer to the small model, `escalate` hands a started answer over, `large`
    sends the request to the large model at once. `score` and `threshold` are in the policy's own
    unit (margins: nats) and unknown where no number decided. `calibration_id` names the file that
    the threshold came from.
    """

    action: Literal["stay", "escalate", "large"]
    reason: str
    score: float | None = None
    threshold: float | None = None
    calibration_id: str | None = None


class Policy(Protocol):
    """Decides for one answer."""

    @property
    def name(self) -> str:
        """The policy in the decision log."""

    @property
    def at_end(self) -> bool:
        """Whether `on_complete` may hand over an answer that the small model ended by itself."""

    @property
    def may_escalate(self) -> bool:
        """Whether the large model may take over; false promises that it never will."""

    @property
    def small_tokens(self) -> int | None:
        """Tokens after which the small model is to stop; 0: it only reads the prompt."""

    def on_request(self, request_hash: str) -> Decision:
        """Before anything is computed: `stay` or `large`. Equal prompts have equal hashes."""

    def on_token(self, step: TokenStep) -> Decision:
        """After each token of the small model: `stay` or `escalate`."""

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """The small model ended by itself or at its limit: `stay`, or `escalate` to go on."""


class FixedPolicy:
    """One model answers everything, for a stated reason."""

    name = "fixed"
    at_end = False
    may_escalate = False
    small_tokens = None

    def __init__(self, role: Role, reason: str) -> None:
        self._decision = Decision("large" if role == "large" else "stay", reason)

    def on_request(self, request_hash: str) -> Decision:
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

    name = "scheduled"
    at_end = False
    may_escalate = True

    def __init__(self, after_tokens: int) -> None:
        self.small_tokens = after_tokens

    def on_request(self, request_hash: str) -> Decision:
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
