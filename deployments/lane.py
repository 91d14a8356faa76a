"""Whose turn it is where the handoffs of a replica share something: a thread, a link.

It knows no handoffs, only how much each had until now.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Lane:
    """At most `places` at a time; of those that wait, the one that had least so far comes next.

    Taking turns would be unfair, for a short handoff has smaller chunks than a long one. So equals
    share evenly, and a short one is not held up by long ones (least attained service first).
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, had: int) -> AsyncIterator[None]:
        """Wait for a place and keep it until the block ends; `had` is of any unit."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (had, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._next()
                raise
        try:
            yield
        finally:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
