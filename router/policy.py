"""Who answers: a decision on the request, on each of the small model's tokens, and at its end.

A policy object serves one answer and is thrown away. It sees numbers only: not text, engines or
KV, and it cannot make anything happen; `router/splice.py` acts on its decisions. Here are the
interface and the two policies without a score; `router/policies.py` chooses one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from router.ports import FinishReason, TokenStep

Role = Literal["small", "large"]
"""The two places a model can have in the cascade."""


@dataclass(frozen=True, kw_only=True)
class RequestView:
    """What is known of a request before anything is computed.

    Equal prompts have equal hashes. `last_model` wrote the end of the last answer of this
    conversation, None for a first one. `unread_tokens` are the prompt's tokens of which each model
    has no KV. `threshold_shift` is by how much a wrapper moves the threshold (in its unit).
    """

    request_hash: str
    prompt_tokens: int
    last_model: Role | None = None
    unread_tokens: Mapping[Role, int]
    threshold_shift: float = 0.0


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

    @property
    def reads_prompt(self) -> bool:
        """Whether `on_prompt` wants the prompt's log-probabilities. They cost the small engine its
        prefix cache for this request: vLLM computes the whole prompt again."""

    def on_request(self, view: RequestView) -> Decision:
        """Before anything is computed: `stay` or `large`."""

    def on_prompt(self, logprobs: tuple[float, ...]) -> Decision:
        """After the small model read the prompt and before its first token: `stay` or `escalate`.

        `logprobs` (nats) are those of the prompt's tokens from the second on, as that model saw
        them. Called only where `reads_prompt` says so.
        """

    def on_token(self, step: TokenStep) -> Decision:
        """After each token of the small model: `stay` or `escalate`."""

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """The small model ended by itself or at its limit: `stay`, or `escalate` to go on."""

    def on_end(self, large_tokens: int) -> None:
        """The answer is over, and the large model wrote so many of its tokens."""


class TokenPolicy:
    """What policies share that neither look at the prompt's log-probabilities nor keep accounts."""

    reads_prompt: bool = False

    def on_prompt(self, logprobs: tuple[float, ...]) -> Decision:
        """`stay`: it was not asked for."""
        return Decision("stay", "no_evidence")

    def on_end(self, large_tokens: int) -> None:
        """It does not matter."""


class PolicyWrapper:
    """Decides as `inner` does; what changes other policies begins here and overrides a part."""

    def __init__(self, inner: Policy) -> None:
        self.name: str = inner.name
        self.at_end: bool = inner.at_end
        self.reads_prompt: bool = inner.reads_prompt
        self.may_escalate: bool = inner.may_escalate
        self.small_tokens: int | None = inner.small_tokens
        self._inner = inner

    def on_request(self, view: RequestView) -> Decision:
        """As `inner`."""
        return self._inner.on_request(view)

    def on_prompt(self, logprobs: tuple[float, ...]) -> Decision:
        """As `inner`."""
        return self._inner.on_prompt(logprobs)

    def on_token(self, step: TokenStep) -> Decision:
        """As `inner`."""
        return self._inner.on_token(step)

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """As `inner`."""
        return self._inner.on_complete(finish_reason)

    def on_end(self, large_tokens: int) -> None:
        """As `inner`."""
        self._inner.on_end(large_tokens)


class FixedPolicy(TokenPolicy):
    """One model answers everything, for a stated reason."""

    name = "fixed"
    at_end = False
    may_escalate = False
    small_tokens = None

    def __init__(self, role: Role, reason: str) -> None:
        self._decision = Decision("large" if role == "large" else "stay", reason)

    def on_request(self, view: RequestView) -> Decision:
        """The fixed choice."""
        return self._decision

    def on_token(self, step: TokenStep) -> Decision:
        """The fixed choice."""
        return self._decision

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """The fixed choice."""
        return self._decision


class ScheduledPolicy(TokenPolicy):
    """Hands over after a number of tokens that the request states; doubt plays no part."""

    name = "scheduled"
    at_end = False
    may_escalate = True

    def __init__(self, after_tokens: int) -> None:
        self.small_tokens = after_tokens

    def on_request(self, view: RequestView) -> Decision:
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
