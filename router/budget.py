"""A limit on escalations per sliding time window, over all requests of one router.

It counts what a policy asked for. Requests that name a model themselves, and escalations that no
policy decided (a full context, a broken engine), neither spend nor need a budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from router.policy import Decision, Policy
from router.ports import FinishReason, TokenStep


class Budget:
    """At most `escalations` in any `window_s` seconds of `clock`. One object per router."""

    def __init__(self, escalations: int, window_s: float, clock: Callable[[], float]) -> None:
        self._escalations = escalations
        self._window_s = window_s
        self._clock = clock
        self._spent_s: deque[float] = deque()

    def take(self) -> bool:
        """Spend one escalation; false, and nothing spent, when none is left."""
        now_s = self._clock()
        while self._spent_s and self._spent_s[0] <= now_s - self._window_s:
            self._spent_s.popleft()
        if len(self._spent_s) >= self._escalations:
            return False
        self._spent_s.append(now_s)
        return True


class BudgetPolicy:
    """Lets `inner` escalate while the budget lasts; else the small model goes on.

    One answer spends once, when it first asks: an escalation that has to wait for a place to cut
    keeps what it took, and one that never finds such a place has spent it all the same.
    """

    def __init__(self, inner: Policy, budget: Budget) -> None:
        self.name: str = inner.name
        self.at_end: bool = inner.at_end
        # A refused `large` leaves a request to the small model, however long its prompt.
        self.may_escalate = True
        self.small_tokens: int | None = inner.small_tokens
        self._inner = inner
        self._budget = budget
        self._granted = False

    def on_request(self, request_hash: str) -> Decision:
        """The inner decision, or `stay` for lack of budget."""
        return self._pay(self._inner.on_request(request_hash))

    def on_token(self, step: TokenStep) -> Decision:
        """The inner decision, or `stay` for lack of budget."""
        return self._pay(self._inner.on_token(step))

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """The inner decision, or `stay` for lack of budget."""
        return self._pay(self._inner.on_complete(finish_reason))

    def _pay(self, decision: Decision) -> Decision:
        if decision.action == "stay":
            return decision
        if not self._granted:
            self._granted = self._budget.take()
        return decision if self._granted else replace(decision, action="stay", reason="budget")
