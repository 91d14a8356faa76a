"""The desk where a replica collects tickets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from deployments.control import Outbox
from deployments.messages import NoTicket, Release
from deployments.tickets import TicketDesk
from tests.deployments.engine_memory import EngineMemory


@pytest.fixture
def memory() -> Iterator[EngineMemory]:
    made = EngineMemory()
    yield made
    made.close()


@pytest.fixture
async def desk(memory: EngineMemory) -> AsyncIterator[TicketDesk]:
    made = TicketDesk(lease_s=0.2)
    outbox = Outbox()
    outbox.send(made.address, memory.layout)
    yield made
    outbox.close()
    made.close()


def push(desk: TicketDesk, message: object) -> None:
    outbox = Outbox()
    outbox.send(desk.address, message)
    outbox.close()


async def test_a_ticket_that_comes_later_is_waited_for(
    desk: TicketDesk, memory: EngineMemory
) -> None:
    ticket = memory.ticket(10, (1,))
    desk.expect(ticket.ticket_id)
    taking = asyncio.create_task(desk.take(ticket.ticket_id))
    await asyncio.sleep(0.02)
    assert not taking.done()
    push(desk, ticket)
    assert await taking == ticket


async def test_a_ticket_is_given_out_once(desk: TicketDesk, memory: EngineMemory) -> None:
    ticket = memory.ticket(10, (1,))
    desk.expect(ticket.ticket_id)
    push(desk, ticket)
    assert await desk.take(ticket.ticket_id) == ticket
    assert await desk.take(ticket.ticket_id) is None


async def test_nothing_kept_is_none_and_an_unknown_request_too(desk: TicketDesk) -> None:
    desk.expect("r")
    push(desk, NoTicket(ticket_id="r"))
    assert await desk.take("r") is None
    assert await desk.take("never asked for") is None


async def test_a_release_reaches_the_engine_even_after_the_ticket_was_taken(
    desk: TicketDesk, memory: EngineMemory
) -> None:
    ticket = memory.ticket(10, (1,))
    desk.expect(ticket.ticket_id)
    push(desk, ticket)
    await desk.take(ticket.ticket_id)
    await desk.release(ticket.ticket_id)
    assert [message.ticket_id for message in memory.told(Release)] == [ticket.ticket_id]


async def test_tickets_nobody_takes_are_dropped_after_their_lease(
    desk: TicketDesk, memory: EngineMemory
) -> None:
    old, new = memory.ticket(10, (1,)), memory.ticket(10, (2,))
    desk.expect(old.ticket_id)
    push(desk, old)
    await asyncio.sleep(0.3)
    desk.expect(new.ticket_id)
    push(desk, new)
    assert await desk.take(new.ticket_id) == new
    assert await desk.take(old.ticket_id) is None
