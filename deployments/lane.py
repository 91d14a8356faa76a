"""One thread for the map, shared fairly by the handoffs of a replica. It knows no handoffs."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """Does one piece of work at a time; of those that wait, the one whose owner had least so far.

    Taking turns would be unfair, for a short handoff has smaller chunks than a long one. Equals
    share evenly, and a short one is not held up by long ones (least attained service first).
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="map")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._busy = False

    async def run(self, had: int, work: Callable[[], T]) -> T:
        """The result of `work()`, whose owner was given `had` (of any unit) until now."""
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (had, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._next()
                raise
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._busy = False

    def close(self) -> None:
        """Wait for the work under way."""
        self._thread.shutdown()
