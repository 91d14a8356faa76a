"""The policy that judges the prompt: what surprises the small model it may not understand.

Its scalar is the mean log-probability (nats) of the prompt's last tokens as the small model saw
them while it read. It is the only policy that knows before the first token and needs no answer; it
costs the small engine its prefix cache (`Policy.reads_prompt`).
"""

from __future__ import annotations

import math

from router.policy import Decision
from router.ports import FinishReason, TokenStep
from router.threshold import ScoredPolicy, Threshold, decide


def prompt_score(logprobs: tuple[float, ...], window_tokens: int) -> float | None:
    """Mean of the last `window_tokens` of them; None when there are none or one is not finite.

    A shorter prompt is judged whole.
    """
    last = logprobs[-window_tokens:]
    if not last or not all(map(math.isfinite, last)):
        return None
    return math.fsum(last) / len(last)


class PromptPolicy(ScoredPolicy):
    """Escalates before the small model's first token; afterwards the answer stays there."""

    reads_prompt = True

    def __init__(self, window_tokens: int, threshold: Threshold) -> None:
        super().__init__("prompt", threshold)
        self._window_tokens = window_tokens

    def on_prompt(self, logprobs: tuple[float, ...]) -> Decision:
        """`escalate` when the mean is below the threshold."""
        self._score = prompt_score(logprobs, self._window_tokens)
        if self._score is not None and self._doubts(self._score):
            return decide("escalate", "surprising_prompt", self._score, self._threshold)
        return self._settled()

    def on_token(self, step: TokenStep) -> Decision:
        """`stay`: it was settled before."""
        return self._settled()

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """`stay`: it was settled before."""
        return self._settled()

    def _settled(self) -> Decision:
        return self._stay("no_evidence" if self._score is None else "confident")
