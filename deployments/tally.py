"""What one handoff costs in a mapper, noted while it runs, by that process's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.ports import HandoffStep, Stage


@dataclass(kw_only=True)
class Tally:
    """Bytes, tokens and the stages' steps. Stages overlap; steps of one stage do not."""

    cold: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    chunks: int = 0
    mapped_tokens: int = 0
    steps: list[HandoffStep] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)
    _ended_s: dict[Stage, float] = field(default_factory=dict)

    @contextmanager
    def step(self, stage: Stage, first_token: int, last_token: int) -> Iterator[None]:
        """Note how long the block takes; nothing of a block that raises."""
        began = time.perf_counter()
        yield
        self.note(stage, first_token, last_token, began, time.perf_counter())

    def note(
        self, stage: Stage, first_token: int, last_token: int, began: float, ended: float
    ) -> None:
        """A step that ran between two times of `time.perf_counter`.

        It begins where the stage's last step ended if that was later: what is under way together
        is counted once.
        """
        step = HandoffStep(
            stage=stage,
            first_token=first_token,
            last_token=last_token,
            begin_s=max(began - self._started, self._ended_s.get(stage, 0.0)),
            end_s=ended - self._started,
        )
        self._ended_s[stage] = step.end_s
        self.steps.append(step)

    def spent_s(self, stage: Stage) -> float:
        """Seconds in one stage, over all chunks."""
        return sum(step.seconds for step in self.steps if step.stage == stage)
