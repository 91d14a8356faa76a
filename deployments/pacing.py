"""How often an engine replica sends: with many streams at once, tokens leave several at a time.

Each chunk costs a message through Ray, the router and the HTTP proxy, whatever it holds. It knows
neither vLLM nor Ray: whoever waits here finds all tokens that were made meanwhile in one chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager


class Pace:
    """At most `max_chunks_per_s` over all streams of one replica, shared evenly.

    No first chunk waits, and none does while fewer tokens are made than may be sent.
    """

    def __init__(self, max_chunks_per_s: float) -> None:
        assert max_chunks_per_s > 0
        self._max_chunks_per_s = max_chunks_per_s
        self._streams = 0

    @property
    def interval_s(self) -> float:
        """Between two chunks of one stream, now."""
        return self._streams / self._max_chunks_per_s

    @contextmanager
    def stream(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Count one stream more; await what this gives after each chunk that was sent."""
        self._streams += 1
        try:
            yield self._wait
        finally:
            self._streams -= 1

    async def _wait(self) -> None:
        await asyncio.sleep(self.interval_s)
