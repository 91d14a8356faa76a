"""Who is next on the thread of the map."""

from __future__ import annotations

import asyncio
import threading

import pytest

from deployments.lane import Lane


class Gate:
    """Work that holds the lane until it is opened, and a record of who was served."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.served: list[str] = []

    def hold(self) -> None:
        assert self.open.wait(5)


async def waiting(lane: Lane, gate: Gate, had: int, name: str) -> asyncio.Task[None]:
    task = asyncio.create_task(lane.run(had, lambda: gate.served.append(name)))
    await asyncio.sleep(0)
    return task


async def test_whoever_had_least_is_next_and_equals_come_in_order() -> None:
    lane, gate = Lane(), Gate()
    tasks = [asyncio.create_task(lane.run(0, gate.hold))]
    await asyncio.sleep(0)
    for had, name in ((900, "long"), (64, "short"), (300, "middle"), (64, "short too")):
        tasks.append(await waiting(lane, gate, had, name))
    gate.open.set()
    await asyncio.gather(*tasks)
    assert gate.served == ["short", "short too", "middle", "long"]
    lane.close()


async def test_one_that_gave_up_while_it_waited_holds_nobody_up() -> None:
    lane, gate = Lane(), Gate()
    first = asyncio.create_task(lane.run(0, gate.hold))
    await asyncio.sleep(0)
    gone = await waiting(lane, gate, 1, "gone")
    stays = await waiting(lane, gate, 2, "stays")
    gone.cancel()
    gate.open.set()
    await asyncio.gather(first, stays)
    assert gate.served == ["stays"]
    assert await lane.run(0, lambda: 7) == 7
    lane.close()


async def test_one_that_is_cancelled_when_its_turn_has_come_passes_it_on() -> None:
    lane, gate = Lane(), Gate()
    first = asyncio.create_task(lane.run(0, gate.hold))
    await asyncio.sleep(0)
    gone = await waiting(lane, gate, 1, "gone")
    stays = await waiting(lane, gate, 2, "stays")
    first.add_done_callback(lambda _: gone.cancel())
    gate.open.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, stays)
    assert gate.served[-1] == "stays"
    with pytest.raises(asyncio.CancelledError):
        await gone
    lane.close()


async def test_an_error_is_the_callers_and_the_lane_goes_on() -> None:
    lane = Lane()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await lane.run(0, fail)
    assert await lane.run(0, lambda: 7) == 7
    lane.close()
