"""A limit on escalations per sliding time window, over all requests of one router.

It counts what a policy asked for. Requests that name a model themselves, and escalations that no
policy decided (a full context, a broken engine), neither spend nor need a budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from router.policy import Decision, Policy, PolicyWrapper, RequestView
from router.ports import FinishReason, TokenStep

FIRST_ESTIMATE_TOKENS = 256
"""What an escalation is taken to cost before the first one is over."""

_MEMORY = 0.9


@dataclass
class Charge:
    """One escalation in a budget's window; `tokens` is an estimate until it is settled."""

    at_s: float
    tokens: float


class Budget:
    """At most `escalations`, and at most `large_tokens` tokens that they let the large model write,
    in any `window_s` seconds of `clock`; None is no limit. One object per router.

    What an escalation costs in tokens is known at its end. Until then it counts as a running mean
    of those that ended, so escalations under way may together exceed the limit by what they exceed
    that mean. A single one is always allowed.
    """

    def __init__(
        self,
        escalations: int | None,
        window_s: float,
        clock: Callable[[], float],
        large_tokens: int | None = None,
    ) -> None:
        self._escalations = escalations
        self._large_tokens = large_tokens
        self._window_s = window_s
        self._clock = clock
        self._charges: deque[Charge] = deque()
        self._estimate: float | None = None

    def take(self) -> Charge | None:
        """Spend one escalation; None, and nothing spent, when it does not fit."""
        now_s = self._clock()
        while self._charges and self._charges[0].at_s <= now_s - self._window_s:
            self._charges.popleft()
        if self._escalations is not None and len(self._charges) >= self._escalations:
            return None
        estimate = FIRST_ESTIMATE_TOKENS if self._estimate is None else self._estimate
        if self._large_tokens is not None and self._charges:
            spent = sum(charge.tokens for charge in self._charges)
            if spent + estimate > self._large_tokens:
                return None
        charge = Charge(now_s, estimate)
        self._charges.append(charge)
        return charge

    def settle(self, charge: Charge, large_tokens: int) -> None:
        """The escalation is over and cost so many tokens."""
        charge.tokens = large_tokens
        before = large_tokens if self._estimate is None else self._estimate
        self._estimate = _MEMORY * before + (1.0 - _MEMORY) * large_tokens


class BudgetPolicy(PolicyWrapper):
    """Lets `inner` escalate while the budget lasts; else the small model goes on.

    One answer spends once, when it first asks: an escalation that has to wait for a place to cut
    keeps what it took, and one that never finds such a place has spent it all the same.
    """

    def __init__(self, inner: Policy, budget: Budget) -> None:
        super().__init__(inner)
        # A refused `large` leaves a request to the small model, however long its prompt.
        self.may_escalate = True
        self._budget = budget
        self._charge: Charge | None = None

    def on_request(self, view: RequestView) -> Decision:
        """The inner decision, or `stay` for lack of budget."""
        return self._pay(super().on_request(view))

    def on_prompt(self, logprobs: tuple[float, ...]) -> Decision:
        """The inner decision, or `stay` for lack of budget."""
        return self._pay(super().on_prompt(logprobs))

    def on_token(self, step: TokenStep) -> Decision:
        """The inner decision, or `stay` for lack of budget."""
        return self._pay(super().on_token(step))

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """The inner decision, or `stay` for lack of budget."""
        return self._pay(super().on_complete(finish_reason))

    def on_end(self, large_tokens: int) -> None:
        """What was spent becomes what it cost."""
        if self._charge is not None:
            self._budget.settle(self._charge, large_tokens)
        super().on_end(large_tokens)

    def _pay(self, decision: Decision) -> Decision:
        if decision.action == "stay":
            return decision
        if self._charge is None:
            self._charge = self._budget.take()
        if self._charge is None:
            return replace(decision, action="stay", reason="budget")
        return decision
