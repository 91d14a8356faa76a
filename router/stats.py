"""How the splice tells the outside what happened, without knowing who listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class HandoffRecord:
    """One escalation, finished.

    `reason` says why a handoff was not used, and is None for a mapped one. `started_unix_s` is
    the wall clock at the decision, for spans only; every duration comes from a monotonic clock.
    `stages_s["total"]` is the time from the decision to the large model's first token; it is
    missing when that token never came. `predicted_recompute_s` is what reading everything again was
    expected to take up to that token, None when too little was known. `traceparent` is what
    `Recorder.open_handoff` gave.
    """

    outcome: Literal["mapped", "recompute", "cancelled"]
    reason: str | None
    started_unix_s: float
    stages_s: Mapping[str, float] = field(default_factory=dict)
    temperature: Literal["cold", "warm"] | None = None
    bytes_read: int = 0
    bytes_written: int = 0
    predicted_recompute_s: float | None = None
    traceparent: str | None = None


class Recorder(Protocol):
    """Counts and times. Called from the event loop: must not block or raise.

    `traceparent` is the W3C trace context for what is done for this answer, None when it is in no
    trace. It is passed on unread.
    """

    @property
    def traceparent(self) -> str | None: ...

    def open_handoff(self, started_unix_s: float) -> str | None:
        """An escalation began then; the `traceparent` for what belongs to it."""

    def route(self, *, model: str, reason: str) -> None:
        """One answer was settled on `model`."""

    def handoff(self, record: HandoffRecord) -> None:
        """One escalation is over."""


class NullRecorder:
    """Listens to nothing."""

    traceparent: str | None = None

    def open_handoff(self, started_unix_s: float) -> str | None:
        """There is no trace."""
        return None

    def route(self, *, model: str, reason: str) -> None:
        """Ignore it."""

    def handoff(self, record: HandoffRecord) -> None:
        """Ignore it."""
