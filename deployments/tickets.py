"""Where an engine replica collects the tickets that its scheduler process pushes.

The socket is local to the node. A ticket that nobody takes is dropped here when its lease is over;
the scheduler half has freed its blocks by then.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from deployments.control import ask
from deployments.messages import (
    AskCensus,
    Census,
    EngineLayout,
    NoTicket,
    Release,
    Ticket,
    decode,
)

log = logging.getLogger("kvcascade.tickets")
_ANSWER_TIMEOUT_S = 30.0


class TicketDesk:
    """Futures of tickets by request id; one event loop."""

    def __init__(self, *, lease_s: float) -> None:
        self._path = Path(tempfile.gettempdir()) / f"kvcascade-{uuid.uuid4().hex}.sock"
        self.address = f"ipc://{self._path}"
        self._lease_s = lease_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)
        self._tickets: dict[str, asyncio.Future[Ticket | None]] = {}
        self._arrived: dict[str, float] = {}
        self._layout: asyncio.Future[EngineLayout] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._collect())

    async def layout(self) -> EngineLayout:
        """Where the engine keeps its KV; raises TimeoutError when the core never said so."""
        return await asyncio.wait_for(asyncio.shield(self._layout), _ANSWER_TIMEOUT_S)

    async def census(self) -> Census:
        """What the engine's KV pool is used for; raises TimeoutError when the core is silent."""
        answer = await self._ask_scheduler(AskCensus())
        assert isinstance(answer, Census)
        return answer

    def expect(self, request_id: str) -> None:
        """A request with a keep rule starts: exactly one answer will arrive for it."""
        self._tickets[request_id] = asyncio.get_running_loop().create_future()

    async def take(self, request_id: str) -> Ticket | None:
        """The ticket of a request that has ended or been aborted, once."""
        future = self._tickets.get(request_id)
        if future is None:
            return None
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await asyncio.shield(future)
        except TimeoutError:
            log.warning("no ticket for request %s in %s s", request_id, _ANSWER_TIMEOUT_S)
            return None
        finally:
            self.forget(request_id)

    async def release(self, request_id: str) -> None:
        """Free what is kept for a request that has ended; does nothing when nothing is."""
        await self.take(request_id)
        await self._ask_scheduler(Release(ticket_id=request_id))

    async def _ask_scheduler(self, message: AskCensus | Release) -> Any:
        """The answer of this engine's own scheduler half, once it has introduced itself."""
        address = (await self.layout()).control_address
        return await ask(self._context, address, message, timeout_s=_ANSWER_TIMEOUT_S)

    def forget(self, request_id: str) -> None:
        """No answer will come for this request, or nobody wants it."""
        self._tickets.pop(request_id, None)
        self._arrived.pop(request_id, None)

    async def _collect(self) -> None:
        while True:
            frame = await self._socket.recv()
            message = decode(frame)
            if isinstance(message, EngineLayout):
                self._layout.set_result(message)
                continue
            assert isinstance(message, Ticket | NoTicket), "only our own scheduler writes here"
            future = self._tickets.get(message.ticket_id)
            if future is not None and not future.done():
                future.set_result(message if isinstance(message, Ticket) else None)
            now = time.monotonic()
            self._arrived[message.ticket_id] = now
            for request_id, at in list(self._arrived.items()):
                if now - at > self._lease_s:
                    self.forget(request_id)

    def close(self) -> None:
        """Stop collecting and remove the socket."""
        self._task.cancel()
        self._context.destroy(linger=0)
        self._path.unlink(missing_ok=True)
