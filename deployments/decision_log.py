"""Writes the decision log: a thread of its own, so that no answer waits for a disk.

Several routers may append to one file: each line is one write. It knows nothing of decisions.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from router.calibration import Dependencies
from router.record import AnswerRecord

log = logging.getLogger("kvcascade.decision_log")

QUEUE_LINES = 1_024
"""Records that may wait for the disk; more are dropped and counted."""


class DecisionLog:
    """A `router.record.AnswerLog` into a JSONL file, which is made when it is not there.

    Without `margins`, which stand for a prompt's log-probabilities too, a line stays near a
    kilobyte. `on_drop` is called for each record that is not written. OSError when the file cannot
    be opened.
    """

    def __init__(
        self,
        path: Path,
        depends: Dependencies,
        *,
        margins: bool,
        queue_lines: int = QUEUE_LINES,
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.dropped = 0
        self._on_drop = on_drop
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._updates: dict[str, object] = {"depends": depends}
        if not margins:
            self._updates |= {"margins": None, "prompt_logprobs": None}
        self._queue: queue.Queue[AnswerRecord | None] = queue.Queue(queue_lines)
        self._thread = threading.Thread(target=self._write, name="decision-log", daemon=True)
        self._thread.start()

    def __call__(self, record: AnswerRecord) -> None:
        """Queue one record; drop it when the disk is too slow."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            if self._on_drop is not None:
                self._on_drop()
            if self.dropped & (self.dropped - 1) == 0:  # at 1, 2, 4, ...
                log.warning("the disk is slow: %d decisions are not in the log", self.dropped)

    def close(self) -> None:
        """Write what waits and close the file."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _write(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                line = record.model_copy(update=self._updates).model_dump_json(exclude_none=False)
                try:
                    os.write(self._file, f"{line}\n".encode())
                except OSError as error:
                    log.error("a decision is not in the log: %s", error)
        finally:
            os.close(self._file)
