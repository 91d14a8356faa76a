"""What this router did lately, as numbers: the window behind `GET /v1/cascade/stats`.

Fed by whoever listens to answers and handoffs (`router/stats.py`). It knows no HTTP and no
metrics.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal, TypedDict, get_args

from router.stats import HandoffRecord

WINDOW_ANSWERS = 1_000

ASKED_FOR = frozenset({"named", "forced", "scheduled"})
"""Reasons of answers whose model the request chose: they are not part of a fraction."""

Outcome = Literal["mapped", "recompute", "cancelled"]


class Snapshot(TypedDict):
    """The published numbers.

    `requests` and `escalated` count the answers in the window that a policy decided,
    `realised_fraction` is their ratio, None before the first. `saved_prefill_s` sums, over mapped
    handoffs, the predicted seconds of reading again minus the seconds that they took; handoffs
    before the first prediction add nothing. `refused_routing` says why the last change of routing
    is not followed, None when it is.
    """

    requests: int
    escalated: int
    realised_fraction: float | None
    target_fraction: float | None
    policy: str
    window: int
    handoffs: dict[Outcome, int]
    saved_prefill_s: float
    refused_routing: str | None


class Running:
    """The last answers of one router, and the last handoffs. `large` is its model's name."""

    def __init__(
        self,
        *,
        large: str,
        policy: str,
        target_fraction: float | None,
        window: int = WINDOW_ANSWERS,
    ) -> None:
        self.target_fraction = target_fraction
        self.refused_routing: str | None = None
        self._large = large
        self._policy = policy
        self._answers: deque[bool] = deque(maxlen=window)
        self._handoffs: deque[tuple[Outcome, float]] = deque(maxlen=window)
        self._window = window

    def follow(self, *, policy: str, target_fraction: float | None) -> None:
        """Another routing decides from here on; what the one before did is no part of it."""
        self.target_fraction = target_fraction
        self._policy = policy
        self._answers.clear()

    def route(self, *, model: str, reason: str) -> None:
        """One answer was settled on `model`."""
        if reason not in ASKED_FOR:
            self._answers.append(model == self._large)

    def handoff(self, record: HandoffRecord) -> None:
        """One handoff is over."""
        saved_s = 0.0
        if record.outcome == "mapped" and record.predicted_recompute_s is not None:
            saved_s = record.predicted_recompute_s - record.stages_s["total"]
        self._handoffs.append((record.outcome, saved_s))

    @property
    def realised_fraction(self) -> float | None:
        """Part of the answers in the window that the large model ended; None before the first."""
        return sum(self._answers) / len(self._answers) if self._answers else None

    @property
    def saved_prefill_s(self) -> float:
        """Seconds that the mapped handoffs in the window saved over reading again."""
        return round(sum(saved_s for _, saved_s in self._handoffs), 6)

    def snapshot(self) -> Snapshot:
        """The numbers of this moment."""
        outcomes = Counter(outcome for outcome, _ in self._handoffs)
        return Snapshot(
            requests=len(self._answers),
            escalated=sum(self._answers),
            realised_fraction=self.realised_fraction,
            target_fraction=self.target_fraction,
            policy=self._policy,
            window=self._window,
            handoffs={name: outcomes[name] for name in get_args(Outcome)},
            saved_prefill_s=self.saved_prefill_s,
            refused_routing=self.refused_routing,
        )
