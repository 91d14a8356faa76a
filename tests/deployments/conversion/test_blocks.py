"""What arrives: a converter between two engines' memories, over real NIXL on loopback."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deployments.conversion import Converter
from mappers.mapper import IdentityMapper
from router.ports import HandoffReport
from tests.deployments.conversion.converters import (
    GEOMETRY,
    begin,
    converter,
    kv,
    make,
    order_for,
    run,
)
from tests.deployments.engine_memory import DIM, HEADS, LAYERS, EngineMemory


class Shifted(IdentityMapper):
    """Adds each token's absolute position to its values, so that a wrong offset shows."""

    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        positions_T = torch.arange(start_position, start_position + k_STHD.shape[1])
        return k_STHD, v_STHD + positions_T[None, :, None, None]


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
    stream, address = await begin(made, order)
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
    stream, address = await begin(identity, order)
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
