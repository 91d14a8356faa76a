"""Work that has to end even when the request that started it is gone.

A cancelled request still owes its engines an abort and its handoff a release. It knows nothing of
either: it keeps the tasks alive and reports what they raise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Background:
    """Tasks that outlive their caller. One object per process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work`; what it raises is logged, for nobody may be waiting any more."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` to its end even when the caller is cancelled meanwhile."""
        await asyncio.shield(self.spawn(work))

    async def drain(self) -> None:
        """Wait until nothing runs any more."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work failed", exc_info=error)
