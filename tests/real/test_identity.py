"""A handoff between two engines of the same model must not change the answer.

The identity mapper is the specification of the whole data path: vLLM's blocks, the connector's two
halves, NIXL and the pipeline. Two vLLM engines and a converter, without Ray.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from cluster.config import HandoffConfig, MapperConfig
from deployments.messages import HandoffOrder
from router.conversations import common_prefix_tokens
from router.ports import HandoffReport
from tests.real.engines import Engine, Handoff, start_engine

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
ANSWER_TOKENS = 64
TIE_NATS = 0.1
"""Two candidates of a bf16 model closer than this are a tie: products of other shapes (one token
alone, or thirty-two at once) round differently. fp32 is held to the letter."""


@dataclass
class Pair:
    dtype: str
    source: Engine
    target: Engine
    converter: Any
    text_ids: list[int]

    async def keep(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], Any]:
        answer, _, ticket = await self.source.keep(token_ids, max_tokens)
        return answer, ticket

    async def hand_over(
        self, token_ids: Sequence[int], ticket: Any, max_tokens: int
    ) -> tuple[list[int], int, HandoffReport | None]:
        handoff = await Handoff.begin(self.converter, ticket, token_ids)
        answer, _, cached = await self.target.generate(
            token_ids, max_tokens, transfer=handoff.transfer
        )
        return answer, cached, await handoff.report()


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["float32", "bfloat16"])
async def pair(request: pytest.FixtureRequest, quickstart_pair: Any) -> AsyncIterator[Pair]:
    import torch
    from transformers import AutoTokenizer

    from cluster.quickstart.text import heldout_texts
    from deployments.conversion import Converter
    from mappers.geometry import KVGeometry
    from mappers.mapper import IdentityMapper

    dtype = request.param
    folder = quickstart_pair.small
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text_ids = tokenizer("\n".join(heldout_texts()))["input_ids"]
    engines: list[Engine] = []
    with pytest.MonkeyPatch.context() as patch:
        # The engine core computes in its own process, on one core: deployments/cpu_environment.py.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("source", "target"):
            engines.append(start_engine(folder, name, dtype, block_tokens=BLOCK))
    converter = Converter(
        IdentityMapper(KVGeometry(layers=15, kv_heads=3, head_dim=64), getattr(torch, dtype)),
        "identity",
        MapperConfig(small_to_large="identity", chunk_tokens=64),
        HandoffConfig(deadline_s=20.0, quarantine_s=2.0),
        dtype=dtype,
        block_sizes_tokens=(BLOCK, BLOCK),
        host="127.0.0.1",
    )
    try:
        yield Pair(dtype, *engines, converter, text_ids)
    finally:
        await converter.close()
        for engine in engines:
            engine.close()


LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("generated", [0, 1, 2, 40])
async def test_the_answer_after_a_handoff_is_the_cold_answer(
    pair: Pair, length: int, generated: int
) -> None:
    start = 500 * LENGTHS.index(length)
    prompt = pair.text_ids[start : start + length]
    answer, ticket = await pair.keep(prompt, max(generated, 1))
    conversation = prompt + answer[:generated]
    warm, cached, report = await pair.hand_over(conversation, ticket, ANSWER_TOKENS)
    cold, margins, _ = await pair.target.generate(conversation, ANSWER_TOKENS)

    # The last sampled token was never read, and the target reads at least one token itself.
    readable = min(length + max(generated, 1) - 1, len(conversation) - 1)
    assert cached == readable // BLOCK * BLOCK
    assert (report.covered_tokens if report else 0) == cached
    if pair.dtype == "float32":
        assert warm == cold
    else:
        same = common_prefix_tokens(tuple(cold), tuple(warm))
        assert same == ANSWER_TOKENS or margins[same] < TIE_NATS


async def test_many_chunks_arrive_in_order(pair: Pair) -> None:
    prompt = pair.text_ids[4_000:5_001]
    _, ticket = await pair.keep(prompt, 1)
    warm, cached, report = await pair.hand_over(prompt, ticket, 16)
    cold, margins, _ = await pair.target.generate(prompt, 16)
    assert cached == 992
    assert report is not None and report.chunks >= 16
    same = common_prefix_tokens(tuple(cold), tuple(warm))
    assert same == 16 or margins[same] < TIE_NATS


async def test_a_request_that_ends_without_an_escalation_keeps_nothing(pair: Pair) -> None:
    request_id = uuid.uuid4().hex
    pair.source.desk.expect(request_id)
    keep = {"keep": {"ticket_id": request_id, "rule": "on_abort"}}
    await pair.source.generate(pair.text_ids[:100], 4, request_id=request_id, transfer=keep)
    assert await pair.source.desk.take(request_id) is None
    assert (await pair.source.census()).pinned_blocks == 0


async def test_a_ticket_that_nobody_uses_is_freed_when_its_lease_is_over(pair: Pair) -> None:
    _, ticket = await pair.keep(pair.text_ids[:100], 1)
    assert (await pair.source.census()).pinned_blocks == len(ticket.block_ids) == 4
    await pair.source.wait_empty(timeout_s=8)
    with pytest.raises(Exception, match="expired"):
        await anext_of(pair, ticket)


async def test_a_released_ticket_is_freed_at_once(pair: Pair) -> None:
    request_id = uuid.uuid4().hex
    pair.source.desk.expect(request_id)
    keep = {"keep": {"ticket_id": request_id, "rule": "always"}}
    await pair.source.generate(pair.text_ids[:100], 1, request_id=request_id, transfer=keep)
    await pair.source.desk.release(request_id)
    await pair.source.wait_empty(timeout_s=2)


async def test_more_than_half_the_pool_is_never_kept(pair: Pair) -> None:
    # The pool holds 128 blocks; a ticket of 40 blocks fits once, not twice.
    _, first = await pair.keep(pair.text_ids[: 40 * BLOCK], 1)
    _, second = await pair.keep(pair.text_ids[100 : 100 + 40 * BLOCK], 1)
    assert first is not None and second is None
    await pair.source.desk.release(first.ticket_id)
    await pair.source.wait_empty(timeout_s=8)


async def test_a_target_that_is_aborted_while_it_loads_frees_its_blocks(pair: Pair) -> None:
    prompt = pair.text_ids[:1_000]
    _, ticket = await pair.keep(prompt, 1)
    handoff = {
        "handoff_id": uuid.uuid4().hex,
        # Nobody listens there: what a target sees of a mapper that died.
        "mapper_address": "tcp://127.0.0.1:9",
        "covered_tokens": 1_000,
    }
    load = asyncio.ensure_future(
        pair.target.generate(prompt, 4, request_id="doomed", transfer={"handoff": handoff})
    )
    async with asyncio.timeout(10):
        while (await pair.target.census()).loading_blocks == 0:
            await asyncio.sleep(0.01)
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    # Other requests run meanwhile, and the quarantine (deadline 20 s + 2 s) ends the wait.
    answer, _, _ = await pair.target.generate(prompt, 4)
    assert len(answer) == 4
    assert (await pair.target.census()).loading_blocks > 0
    await pair.target.wait_empty(timeout_s=30)


async def anext_of(pair: Pair, ticket: Any) -> None:
    order = HandoffOrder(handoff_id=uuid.uuid4().hex, ticket=ticket, covered_tokens=64)
    async for _ in pair.converter.convert(order):
        pass
