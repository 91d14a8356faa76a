"""How a handoff ends when it does not go well, over real NIXL on loopback."""

from __future__ import annotations

import asyncio

import pytest
from torch import Tensor

from cluster.errors import HandoffError
from deployments.conversion import Converter
from deployments.messages import Claim, MapperAddress, Release
from mappers.mapper import IdentityMapper
from tests.deployments.conversion.converters import (
    GEOMETRY,
    begin,
    converter,
    kv,
    make,
    order_for,
    run,
)
from tests.deployments.engine_memory import LAYERS, EngineMemory


class Stuck(IdentityMapper):
    """Never gets done in time."""

    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        import time

        time.sleep(0.6)
        return k_STHD, v_STHD


async def test_blocks_that_the_source_lost_are_never_reported_as_done(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories, held=False), make(memories)
    source.fill(*kv(64), (0, 1))
    with pytest.raises(HandoffError) as caught:
        await run(
            identity, order_for(source, 64, (0, 1)), target,
            start=0, tokens=32, block_ids=(1,),
        )  # fmt: skip
    assert caught.value.reason == "expired"
    assert target.done() == []


async def test_a_source_that_loses_blocks_while_they_are_read_fails_the_handoff(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories, held_at_release=False), make(memories)
    source.fill(*kv(64), (0, 1))
    with pytest.raises(HandoffError) as caught:
        await run(
            identity, order_for(source, 64, (0, 1)), target,
            start=0, tokens=32, block_ids=(1,),
        )  # fmt: skip
    assert caught.value.reason == "expired"
    assert len(source.told(Claim)) == 1
    assert target.done() == []
    assert (await target.settled()).ok is False


async def test_a_target_that_withdraws_gets_its_settlement_and_the_source_is_freed(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    order = order_for(source, 64, (0, 1))
    stream, address = await begin(identity, order)
    target.abandon(order.handoff_id, address)
    with pytest.raises(HandoffError) as caught:
        await anext(stream)
    assert caught.value.reason == "abandoned"
    await source.wait_told(Release)
    target.abandon(order.handoff_id, address)
    assert (await target.settled()).handoff_id == order.handoff_id
    assert identity.pool_in_use_bytes == 0


async def test_an_announcement_after_the_end_is_settled_at_once(
    memories: list[EngineMemory],
) -> None:
    made = await converter(deadline_s=0.3)
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    order = order_for(source, 64, (0, 1))
    stream, address = await begin(made, order)
    with pytest.raises(HandoffError) as caught:
        await anext(stream)
    assert caught.value.reason == "deadline"
    target.announce(order.handoff_id, address, start=0, tokens=32, block_ids=(1,))
    assert (await target.settled()).ok is False
    assert not target.caches[0].any()
    await made.close()


async def test_a_late_mapper_writes_nothing_after_its_deadline(
    memories: list[EngineMemory],
) -> None:
    made = await converter(Stuck(GEOMETRY), deadline_s=0.3)
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    with pytest.raises(HandoffError) as caught:
        await run(made, order_for(source, 64, (0, 1)), target, start=0, tokens=32, block_ids=(1,))
    assert caught.value.reason == "deadline"
    await target.settled()
    await asyncio.sleep(0.8)
    assert not target.caches[0].any() and target.done() == []
    await made.close()


async def test_a_router_that_goes_away_frees_both_ends(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source = make(memories)
    source.fill(*kv(64), (0, 1))
    order = order_for(source, 64, (0, 1))
    stream = identity.convert(order)
    await anext(stream)
    await stream.aclose()
    await source.wait_told(Release)
    async with asyncio.timeout(5):
        while identity.running:
            await asyncio.sleep(0.005)
    assert identity.pool_in_use_bytes == 0


@pytest.mark.parametrize(
    ("start", "tokens", "block_ids"),
    [(0, 64, (1,)), (0, 32, (99,)), (32, 64, (1, 2)), (0, 0, ())],
    ids=["too few blocks", "outside the pool", "beyond the ticket", "nothing"],
)
async def test_an_announcement_that_does_not_fit_is_refused(
    memories: list[EngineMemory],
    identity: Converter,
    start: int,
    tokens: int,
    block_ids: tuple[int, ...],
) -> None:
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    with pytest.raises(HandoffError) as caught:
        await run(
            identity, order_for(source, 64, (0, 1)), target,
            start=start, tokens=tokens, block_ids=block_ids,
        )  # fmt: skip
    assert caught.value.reason == "block_range"
    assert not target.caches[0].any()
    assert (await target.settled()).ok is False


async def test_an_engine_of_another_shape_is_refused_before_anything_is_read(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source = make(memories, layers=LAYERS + 1)
    with pytest.raises(HandoffError) as caught:
        await anext(identity.convert(order_for(source, 64, (0, 1))))
    assert caught.value.reason == "layout"
    assert source.messages == []


async def test_a_target_of_another_shape_is_refused(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories, layers=LAYERS + 1)
    source.fill(*kv(64), (0, 1))
    with pytest.raises(HandoffError) as caught:
        await run(
            identity, order_for(source, 64, (0, 1)), target,
            start=0, tokens=32, block_ids=(1,),
        )  # fmt: skip
    assert caught.value.reason == "layout"


async def test_a_replayed_order_is_refused(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    order = order_for(source, 64, (0, 1))
    await run(identity, order, target, start=0, tokens=32, block_ids=(1,))
    with pytest.raises(HandoffError) as caught:
        await anext(identity.convert(order))
    assert caught.value.reason == "replayed"


async def test_more_handoffs_than_the_pool_holds_wait_and_more_than_the_queue_are_refused(
    memories: list[EngineMemory],
) -> None:
    made = await converter(handoffs=1, queued=1)
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    first, second, third = (order_for(source, 64, (0, 1)) for _ in range(3))
    streams = [made.convert(first), made.convert(second)]
    addresses = [await anext(stream) for stream in streams]
    with pytest.raises(HandoffError) as caught:
        await anext(made.convert(third))
    assert caught.value.reason == "mapper_full"
    for order, address, stream, block in zip(
        (first, second), addresses, streams, (3, 4), strict=True
    ):
        assert isinstance(address, MapperAddress)
        target.announce(order.handoff_id, address, start=0, tokens=32, block_ids=(block,))
        await anext(stream)
    for order in (first, second):
        found = await target.wait_done(order.handoff_id)
    assert found == sorted([first.handoff_id, second.handoff_id])
    await made.close()


async def test_what_waits_in_line_is_claimed_at_once(memories: list[EngineMemory]) -> None:
    made = await converter(handoffs=1)
    source = make(memories)
    source.fill(*kv(64), (0, 1))
    streams = [made.convert(order_for(source, 64, (0, 1))) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    async with asyncio.timeout(5):
        while len(source.told(Claim)) < 2:
            await asyncio.sleep(0.01)
    # The first one waits for its target, so the second one has no buffers yet.
    assert made.running == 2
    assert made.pool_in_use_bytes > 0
    assert len({claim.ticket_id for claim in source.told(Claim)}) == 2
    for stream in streams:
        await stream.aclose()
    await made.close()
