"""The router's side of a handoff: ticket from the source engine, order to a mapper.

Implements `router.ports.HandoffPort` over Ray handles. Control only; the caches never come here.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from cluster.errors import HandoffError, HandoffRefused, TransportError
from deployments.messages import HandoffOrder, MapperAddress, Ticket
from deployments.replica_call import call_replica
from router.conversations import common_prefix_tokens
from router.ports import HandoffReport


class RayHandoffPort:
    """Opens handoffs from one engine deployment through the mapper deployment of a direction."""

    def __init__(self, source: Any, mapper: Any, *, deadline_s: float) -> None:
        self._source = source
        self._mapper = mapper
        self._deadline_s = deadline_s

    async def begin(
        self,
        *,
        source_request_id: str,
        token_ids: tuple[int, ...],
        held_tokens: int = 0,
        traceparent: str | None = None,
    ) -> RayHandoff:
        """See `router.ports.HandoffPort`."""
        started = time.perf_counter()
        asked = source_request_id, source_request_id
        try:
            ticket: Ticket | None = await call_replica(self._source, "take_ticket", *asked)
        except Exception as error:
            raise _as_handoff_error(error, gone="source_gone") from error
        if ticket is None:
            raise HandoffRefused("no_ticket", "the source engine kept nothing")
        order = HandoffOrder(
            handoff_id=uuid.uuid4().hex,
            ticket=ticket,
            covered_tokens=common_prefix_tokens(ticket.token_ids, token_ids),
            first_token=held_tokens,
            traceparent=traceparent,
        )
        stream = self._mapper.options(stream=True).convert.remote(order)
        try:
            async with asyncio.timeout(self._deadline_s):
                address = await anext(aiter(stream))
        except BaseException as error:
            stream.cancel()
            call_replica(self._source, "release", *asked)
            if not isinstance(error, Exception):
                raise
            raise _as_handoff_error(error, gone="mapper_gone") from error
        assert isinstance(address, MapperAddress)
        return RayHandoff(order, address, stream, ticket_s=time.perf_counter() - started)


class RayHandoff:
    """One order at work; `router.ports.Handoff`."""

    def __init__(
        self, order: HandoffOrder, address: MapperAddress, stream: Any, *, ticket_s: float
    ) -> None:
        self.handoff_id = order.handoff_id
        self.covered_tokens = order.covered_tokens
        self.ticket_s = ticket_s
        self._address = address
        self._stream = stream
        self._end = asyncio.create_task(self._wait(aiter(stream)))
        self._end.add_done_callback(_look)

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """What the target's connector needs; plain msgpack types."""
        return {
            "handoff": {
                "handoff_id": self.handoff_id,
                "mapper_address": self._address.address,
                "covered_tokens": self.covered_tokens,
            }
        }

    async def failure(self) -> HandoffError:
        """See `router.ports.Handoff`."""
        await asyncio.wait({self._end})
        error = None if self._end.cancelled() else self._end.exception()
        if isinstance(error, HandoffError):
            return error
        # It succeeded: there is no failure to wait for.
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def report(self) -> HandoffReport:
        """See `router.ports.Handoff`."""
        return await asyncio.shield(self._end)

    async def cancel(self) -> None:
        """See `router.ports.Handoff`."""
        if not self._end.done():
            self._stream.cancel()
            self._end.cancel()

    async def _wait(self, stream: AsyncIterator[Any]) -> HandoffReport:
        try:
            report = await anext(stream)
        except Exception as error:
            raise _as_handoff_error(error, gone="mapper_gone") from error
        assert isinstance(report, HandoffReport)
        return report


def _as_handoff_error(error: Exception, *, gone: str) -> HandoffError:
    """Ray's wrapping undone: a HandoffError of the other side, or what its death means."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TimeoutError):
        return TransportError("mapper_silent", "no mapper took the order in time")
    if isinstance(cause, HandoffError):
        return cause
    if isinstance(error, RayActorError):
        return TransportError(gone, "the replica died")
    return TransportError(gone, f"{type(cause).__name__}: {cause}")


def _look(task: asyncio.Task[HandoffReport]) -> None:
    """Nobody may wait for the end of a handoff that was given up; that is no news."""
    if not task.cancelled():
        task.exception()
