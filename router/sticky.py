"""Keeping a conversation with the model that has read it, unless a change is worth its cost.

With c nats per 1,000 tokens and s, l the prompt tokens that the small and the large model have not
read, another policy's threshold is moved by c * (s - l) / 1000: up when the small model would have
to read more than the large one, down the other way round, and not at all in a first turn. A move
as large as the threshold itself, after an answer that the large model ended, keeps the large model
without asking the small one. It knows no engines; who has read what it is told.
"""

from __future__ import annotations

from dataclasses import replace

from router.policy import Decision, Policy, PolicyWrapper, RequestView


class StickyPolicy(PolicyWrapper):
    """Moves the threshold of `inner` by the cost of changing models; wraps a budget too.

    `cost` is in nats per 1,000 tokens. An answer that stays with the large model is no escalation
    and spends no budget. Part of the answers is then escalated for another reason than doubt: a
    calibrated fraction no longer holds.
    """

    def __init__(self, inner: Policy, cost: float) -> None:
        super().__init__(inner)
        self._cost = cost

    def on_request(self, view: RequestView) -> Decision:
        """`large` for reason `sticky`, or the inner decision at the moved threshold."""
        more_tokens = view.unread_tokens["small"] - view.unread_tokens["large"]
        shift = self._cost * more_tokens / 1000.0
        decision = super().on_request(replace(view, threshold_shift=view.threshold_shift + shift))
        if decision.action != "stay" or view.last_model != "large" or decision.threshold is None:
            return decision
        if shift > 0.0 and abs(decision.threshold - shift) <= shift:
            return replace(decision, action="large", reason="sticky")
        return decision
