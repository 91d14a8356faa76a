"""Chance that a retry cannot change: numbers drawn from the request itself.

The same prompt always draws the same number, on every replica and after every restart. It knows
no thresholds.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Literal

from router.policy import Decision, RequestView, TokenPolicy
from router.ports import FinishReason, TokenStep

Purpose = Literal["route", "tie", "shadow"]
"""What a number is drawn for; draws for different purposes are independent."""


def request_hash(prompt_token_ids: tuple[int, ...]) -> str:
    """16 hex digits that stand for a prompt in logs and draws."""
    return hashlib.sha256(array("q", prompt_token_ids).tobytes()).hexdigest()[:16]


def text_hash(text: str) -> str:
    """The same for a prompt whose tokens are not known; never equal to its `request_hash`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def uniform(request_hash: str, purpose: Purpose) -> float:
    """A number in [0, 1), uniform over requests and fixed for each."""
    digest = hashlib.sha256(f"{purpose}:{request_hash}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


class RandomPolicy(TokenPolicy):
    """Sends a fixed fraction of requests to the large model, whatever they ask.

    The scalar it acts on is `uniform(request_hash, "route")`, which needs no calibration.
    """

    name = "random"
    at_end = False
    may_escalate = True
    small_tokens = None

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._drawn: float | None = None

    def on_request(self, view: RequestView) -> Decision:
        """`large` for the chosen fraction."""
        self._drawn = uniform(view.request_hash, "route")
        if self._drawn < self._fraction:
            return Decision("large", "random", self._drawn, self._fraction)
        return self._stay()

    def on_token(self, step: TokenStep) -> Decision:
        """`stay`: it was settled before."""
        return self._stay()

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """`stay`: it was settled before."""
        return self._stay()

    def _stay(self) -> Decision:
        return Decision("stay", "random", self._drawn, self._fraction)
