"""A converter between two engines' memories, over real NIXL on loopback."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cluster.config import HandoffConfig, MapperConfig
from cluster.errors import HandoffError
from deployments.conversion import Converter
from deployments.messages import Claim, HandoffOrder, MapperAddress, Release
from mappers.geometry import KVGeometry
from mappers.mapper import IdentityMapper
from router.ports import HandoffReport
from tests.deployments.engine_memory import DIM, HEADS, LAYERS, EngineMemory

GEOMETRY = KVGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM)


class Shifted(IdentityMapper):
    """Adds each token's absolute position to its values, so that a wrong offset shows."""

    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        positions_T = torch.arange(start_position, start_position + k_STHD.shape[1])
        return k_STHD, v_STHD + positions_T[None, :, None, None]


class Stuck(IdentityMapper):
    """Never gets done in time."""

    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        import time

        time.sleep(0.6)
        return k_STHD, v_STHD


async def converter(
    mapper: IdentityMapper | None = None,
    *,
    blocks: tuple[int, int] = (32, 32),
    dtype: str = "bfloat16",
    handoffs: int = 2,
    queued: int = 2,
    deadline_s: float = 10.0,
) -> Converter:
    return Converter(
        mapper or IdentityMapper(GEOMETRY, getattr(torch, dtype)),
        "id",
        MapperConfig(
            small_to_large="identity",
            chunk_tokens=64,
            max_concurrent_handoffs=handoffs,
            max_queued_handoffs=queued,
        ),
        HandoffConfig(deadline_s=deadline_s, quarantine_s=0.5),
        dtype=dtype,
        block_sizes_tokens=blocks,
        host="127.0.0.1",
    )


@pytest.fixture
def memories() -> Iterator[list[EngineMemory]]:
    """Engines that a test appends are closed after it."""
    made: list[EngineMemory] = []
    yield made
    for memory in made:
        memory.close()


@pytest.fixture
async def identity() -> AsyncIterator[Converter]:
    made = await converter()
    yield made
    await made.close()


def make(memories: list[EngineMemory], **options: object) -> EngineMemory:
    memories.append(EngineMemory(**options))  # type: ignore[arg-type]
    return memories[-1]


def kv(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    both = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=generator).to(dtype)
    return both[0], both[1]


def order_for(source: EngineMemory, tokens: int, block_ids: tuple[int, ...]) -> HandoffOrder:
    ticket = source.ticket(tokens, block_ids)
    return HandoffOrder(handoff_id=uuid.uuid4().hex, ticket=ticket, covered_tokens=tokens)


async def run(
    made: Converter,
    order: HandoffOrder,
    target: EngineMemory,
    *,
    start: int,
    tokens: int,
    block_ids: tuple[int, ...],
) -> HandoffReport:
    stream = made.convert(order)
    address = await anext(stream)
    assert isinstance(address, MapperAddress)
    target.announce(order.handoff_id, address, start=start, tokens=tokens, block_ids=block_ids)
    async with asyncio.timeout(10):
        report = await anext(stream)
    assert isinstance(report, HandoffReport)
    return report


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2)])
async def test_blocks_arrive_whole_over_any_number_of_workers(
    memories: list[EngineMemory], identity: Converter, ranks: tuple[int, int]
) -> None:
    source, target = make(memories, ranks=ranks[0]), make(memories, ranks=ranks[1])
    k_LTHD, v_LTHD = kv(160)
    source.fill(k_LTHD, v_LTHD, (7, 8, 2, 11, 3))
    order = order_for(source, 150, (7, 8, 2, 11, 3))
    report = await run(identity, order, target, start=0, tokens=128, block_ids=(5, 4, 12, 13))
    got_k, got_v = target.content((5, 4, 12, 13))
    assert torch.equal(got_k, k_LTHD[:, :128]) and torch.equal(got_v, v_LTHD[:, :128])
    assert await target.wait_done(order.handoff_id) == [order.handoff_id]
    assert report.covered_tokens == 128 and report.chunks == 2 and report.cold
    token_bytes = LAYERS * HEADS * 2 * DIM * 2
    assert report.bytes_written == 128 * token_bytes
    # The source covers 150 tokens: the reader may have begun the last 22 before it knew better.
    assert report.bytes_read in (128 * token_bytes, 160 * token_bytes)
    assert identity.pool_in_use_bytes == 0 and identity.running == 0


async def test_nothing_outside_the_announced_blocks_is_touched(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories)
    k_LTHD, v_LTHD = kv(160)
    source.fill(k_LTHD, v_LTHD, (0, 1, 2, 3, 4))
    await run(
        identity, order_for(source, 160, (0, 1, 2, 3, 4)), target,
        start=32, tokens=64, block_ids=(9, 3),
    )  # fmt: skip
    others = [b for b in range(target.num_blocks) if b not in (9, 3)]
    assert not target.caches[0][:, others].any()


async def test_what_the_target_has_already_is_skipped_and_positions_stay_absolute(
    memories: list[EngineMemory],
) -> None:
    made = await converter(Shifted(GEOMETRY, torch.float32), dtype="float32")
    source, target = make(memories, dtype="float32"), make(memories, dtype="float32")
    k_LTHD, v_LTHD = kv(192, torch.float32)
    source.fill(k_LTHD, v_LTHD, tuple(range(6)))
    order = order_for(source, 190, tuple(range(6)))
    stream = made.convert(order)
    address = await anext(stream)
    assert isinstance(address, MapperAddress)
    target.announce(order.handoff_id, address, start=96, tokens=64, block_ids=(1, 0))
    report = await anext(stream)
    _, got_v = target.content((1, 0))
    expected = v_LTHD[:, 96:160] + torch.arange(96, 160)[None, :, None, None]
    assert torch.equal(got_v, expected)
    assert isinstance(report, HandoffReport) and report.covered_tokens == 64
    await made.close()


async def test_only_what_a_target_lacks_is_read(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories)
    k_LTHD, v_LTHD = kv(192)
    source.fill(k_LTHD, v_LTHD, tuple(range(6)))
    order = replace(order_for(source, 192, tuple(range(6))), first_token=150)
    report = await run(identity, order, target, start=128, tokens=64, block_ids=(9, 3))
    got_k, _ = target.content((9, 3))
    assert torch.equal(got_k, k_LTHD[:, 128:192])
    token_bytes = LAYERS * HEADS * 2 * DIM * 2
    assert report.bytes_read == report.bytes_written == 64 * token_bytes


@pytest.mark.parametrize("late", [False, True])
async def test_a_target_that_lost_what_it_was_believed_to_have_gets_it(
    memories: list[EngineMemory], identity: Converter, late: bool
) -> None:
    source, target = make(memories), make(memories)
    k_LTHD, v_LTHD = kv(192)
    source.fill(k_LTHD, v_LTHD, tuple(range(6)))
    order = replace(order_for(source, 192, tuple(range(6))), first_token=128)
    stream = identity.convert(order)
    address = await anext(stream)
    assert isinstance(address, MapperAddress)
    if late:
        await asyncio.sleep(0.2)  # the reader has read the end and waits
    blocks = (9, 3, 1, 2, 4)
    target.announce(order.handoff_id, address, start=32, tokens=160, block_ids=blocks)
    async with asyncio.timeout(10):
        report = await anext(stream)
    got_k, got_v = target.content(blocks)
    assert torch.equal(got_k, k_LTHD[:, 32:]) and torch.equal(got_v, v_LTHD[:, 32:])
    assert isinstance(report, HandoffReport) and report.covered_tokens == 160
    assert await target.wait_done(order.handoff_id) == [order.handoff_id]


@pytest.mark.parametrize("sizes", [(32, 64), (64, 32)])
async def test_engines_may_have_different_block_sizes(
    memories: list[EngineMemory], sizes: tuple[int, int]
) -> None:
    made = await converter(blocks=sizes)
    source = make(memories, block_tokens=sizes[0])
    target = make(memories, block_tokens=sizes[1])
    k_LTHD, v_LTHD = kv(192)
    blocks = tuple(range(192 // sizes[0]))
    source.fill(k_LTHD, v_LTHD, blocks)
    wanted = tuple(range(128 // sizes[1]))
    await run(made, order_for(source, 140, blocks), target, start=0, tokens=128, block_ids=wanted)
    got_k, _ = target.content(wanted)
    assert torch.equal(got_k, k_LTHD[:, :128])
    await made.close()


async def test_the_second_handoff_between_two_engines_is_warm(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    colds = []
    for _ in range(2):
        report = await run(
            identity, order_for(source, 64, (0, 1)), target,
            start=0, tokens=32, block_ids=(1,),
        )  # fmt: skip
        colds.append(report.cold)
    assert colds == [True, False]


async def test_an_engine_that_was_greeted_is_warm_from_the_first_handoff(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    order = order_for(source, 64, (0, 1))
    assert await identity.greet(order.ticket.layout)
    assert await identity.greet(target.layout)
    assert not await identity.greet(target.layout)
    report = await run(identity, order, target, start=0, tokens=64, block_ids=(2, 3))
    assert not report.cold


async def test_the_backlog_is_the_unmapped_tokens_at_the_measured_rate(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, target = make(memories), make(memories)
    source.fill(*kv(192), tuple(range(6)))
    assert identity.backlog_s == 0.0
    await run(identity, order_for(source, 64, (0, 1)), target, start=0, tokens=64, block_ids=(0, 1))
    # Orders whose target has not spoken wait for the map of its first answer, then for the target.
    orders = [order_for(source, 192, tuple(range(6))) for _ in range(4)]
    streams = [identity.convert(order) for order in orders]
    for stream in streams:
        await anext(stream)
    waiting = identity.backlog_s
    assert waiting > 0.0
    for stream in streams:
        await stream.aclose()
    await asyncio.sleep(0.3)
    assert identity.backlog_s == 0.0


async def test_a_restarted_engine_at_the_same_address_is_a_new_peer(
    memories: list[EngineMemory], identity: Converter
) -> None:
    source, old, new = make(memories), make(memories), make(memories)
    source.fill(*kv(64), (0, 1))
    await run(identity, order_for(source, 64, (0, 1)), old, start=0, tokens=32, block_ids=(1,))
    new.layout = replace(new.layout, control_address=old.layout.control_address)
    report = await run(
        identity, order_for(source, 64, (0, 1)), new, start=0, tokens=32, block_ids=(1,)
    )
    assert report.cold
    assert new.caches[0].any()


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
    stream = identity.convert(order)
    address = await anext(stream)
    assert isinstance(address, MapperAddress)
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
    stream = made.convert(order)
    address = await anext(stream)
    assert isinstance(address, MapperAddress)
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
