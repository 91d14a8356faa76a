"""Who is next in a lane."""

from __future__ import annotations

import asyncio

import pytest

from deployments.lane import Lane


class Course:
    """Owners that pass through a lane, and the order in which they got a place."""

    def __init__(self, places: int) -> None:
        self.lane = Lane(places)
        self.served: list[str] = []
        self.open = asyncio.Event()

    async def enter(self, name: str, had: int) -> asyncio.Task[None]:
        """Join the lane; whoever has a place keeps it until `open`."""

        async def visit() -> None:
            async with self.lane.turn(had):
                self.served.append(name)
                await self.open.wait()

        task = asyncio.create_task(visit())
        await asyncio.sleep(0)
        return task


async def test_whoever_had_least_is_next_and_equals_come_in_order() -> None:
    course = Course(1)
    order = (("first", 0), ("long", 900), ("short", 64), ("middle", 300), ("short too", 64))
    tasks = [await course.enter(name, had) for name, had in order]
    course.open.set()
    await asyncio.gather(*tasks)
    assert course.served == ["first", "short", "short too", "middle", "long"]


async def test_there_are_never_more_inside_than_places() -> None:
    course = Course(2)
    tasks = [await course.enter(str(number), number) for number in range(5)]
    assert course.served == ["0", "1"]
    course.open.set()
    await asyncio.gather(*tasks)
    assert course.served == ["0", "1", "2", "3", "4"]
    # Both places are free again, and no third one came to be.
    course.open.clear()
    tasks = [await course.enter(name, 0) for name in ("a", "b", "c")]
    assert course.served[5:] == ["a", "b"]
    course.open.set()
    await asyncio.gather(*tasks)


async def test_one_that_gave_up_while_it_waited_holds_nobody_up() -> None:
    course = Course(1)
    first, gone, stays = [await course.enter(name, 0) for name in ("first", "gone", "stays")]
    gone.cancel()
    course.open.set()
    await asyncio.gather(first, stays)
    assert course.served == ["first", "stays"]


async def test_one_that_is_cancelled_when_its_turn_has_come_passes_it_on() -> None:
    course = Course(1)

    async def leave_and_cancel() -> None:
        async with course.lane.turn(0):
            await course.open.wait()
        # Its turn has come, and it has not run since.
        gone.cancel()

    first = asyncio.create_task(leave_and_cancel())
    await asyncio.sleep(0)
    gone, stays = [await course.enter(name, 0) for name in ("gone", "stays")]
    course.open.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, stays)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert course.served == ["stays"]


async def test_an_error_is_the_callers_and_the_place_is_free_again() -> None:
    lane = Lane(1)
    with pytest.raises(ValueError, match="no"):
        async with lane.turn(0):
            raise ValueError("no")
    async with asyncio.timeout(1), lane.turn(0):
        pass
