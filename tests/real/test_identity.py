"""A handoff between two engines of the same model must not change the answer.

The identity mapper is the specification of the whole data path: vLLM's blocks, the connector's two
halves, NIXL and the pipeline. Two vLLM engines and a converter, without Ray.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cluster.config import HandoffConfig, MapperConfig
from deployments.messages import Census, HandoffOrder, MapperAddress
from deployments.tickets import TicketDesk
from router.conversations import common_prefix_tokens
from router.ports import HandoffReport

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
ANSWER_TOKENS = 64
TIE_NATS = 0.1
"""Two candidates of a bf16 model closer than this are a tie: products of other shapes (one token
alone, or thirty-two at once) round differently. fp32 is held to the letter."""


@dataclass
class Engine:
    client: Any
    desk: TicketDesk

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        request_id: str | None = None,
        transfer: dict[str, Any] | None = None,
    ) -> tuple[list[int], list[float], int]:
        """Greedy tokens, the margin at each in nats, and how much of the prompt was not read."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        prompt = tokens_input(list(token_ids), cache_salt=uuid.uuid4().hex)
        ids: list[int] = []
        margins: list[float] = []
        cached: int | None = None
        stream = self.client.generate(prompt, params, request_id or uuid.uuid4().hex)
        async for output in stream:
            answer = output.outputs[0]
            ids += answer.token_ids
            for entries in answer.logprobs or []:
                best = sorted((entry.logprob for entry in entries.values()), reverse=True)
                margins.append(best[0] - best[1])
            cached = output.num_cached_tokens if cached is None else cached
        return ids, margins, cached or 0

    async def census(self) -> Census:
        return await self.desk.census()


@dataclass
class Pair:
    dtype: str
    source: Engine
    target: Engine
    converter: Any
    text_ids: list[int]

    async def keep(self, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], Any]:
        request_id = uuid.uuid4().hex
        self.source.desk.expect(request_id)
        keep = {"keep": {"ticket_id": request_id, "rule": "always"}}
        answer, _, _ = await self.source.generate(
            token_ids, max_tokens, request_id=request_id, transfer=keep
        )
        return answer, await self.source.desk.take(request_id)

    async def hand_over(
        self, token_ids: Sequence[int], ticket: Any, max_tokens: int
    ) -> tuple[list[int], int, HandoffReport | None]:
        covered = common_prefix_tokens(ticket.token_ids, tuple(token_ids))
        order = HandoffOrder(handoff_id=uuid.uuid4().hex, ticket=ticket, covered_tokens=covered)
        stream = self.converter.convert(order)
        address = await anext(stream)
        assert isinstance(address, MapperAddress)
        handoff = {
            "handoff_id": order.handoff_id,
            "mapper_address": address.address,
            "covered_tokens": covered,
        }
        report = asyncio.ensure_future(anext(stream))
        answer, _, cached = await self.target.generate(
            token_ids, max_tokens, transfer={"handoff": handoff}
        )
        (result,) = await asyncio.gather(report, return_exceptions=True)
        return answer, cached, result if isinstance(result, HandoffReport) else None


def start_engine(folder: Path, name: str, dtype: str, desk: TicketDesk) -> Engine:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    from cluster.sources import kv_bytes_per_token

    settings = {
        "engine": name,
        "host": "127.0.0.1",
        "ticket_address": desk.address,
        "lease_s": 5.0,
        "deadline_s": 20.0,
        "quarantine_s": 2.0,
        "max_pinned_fraction": 0.5,
        "native_suffix_tokens": 1,
        "progress_delay_us": 1_000,
    }
    config = AsyncEngineArgs(
        model=str(folder),
        dtype=dtype,
        max_model_len=2_048,
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        enforce_eager=True,
        kv_cache_memory_bytes=4_096 * kv_bytes_per_token(str(folder), dtype),
        kv_transfer_config={  # type: ignore[arg-type]
            "kv_connector": "CascadeConnector",
            "kv_connector_module_path": "deployments.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        },
    ).create_engine_config()
    config.parallel_config.distributed_executor_backend = "uni"
    client = AsyncLLM(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False
    )
    return Engine(client, desk)


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
        # The engine core computes in its own process, on one core; see deployments/engine_setup.py.
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("source", "target"):
            engines.append(start_engine(folder, name, dtype, TicketDesk(lease_s=5.0)))
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
            engine.client.shutdown()
            engine.desk.close()


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
    assert report is not None and report.chunks == 16
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
    await wait_empty(pair.source, timeout_s=8)
    with pytest.raises(Exception, match="expired"):
        await anext_of(pair, ticket)


async def test_a_released_ticket_is_freed_at_once(pair: Pair) -> None:
    request_id = uuid.uuid4().hex
    pair.source.desk.expect(request_id)
    keep = {"keep": {"ticket_id": request_id, "rule": "always"}}
    await pair.source.generate(pair.text_ids[:100], 1, request_id=request_id, transfer=keep)
    await pair.source.desk.release(request_id)
    await wait_empty(pair.source, timeout_s=2)


async def test_more_than_half_the_pool_is_never_kept(pair: Pair) -> None:
    # The pool holds 128 blocks; a ticket of 40 blocks fits once, not twice.
    _, first = await pair.keep(pair.text_ids[: 40 * BLOCK], 1)
    _, second = await pair.keep(pair.text_ids[100 : 100 + 40 * BLOCK], 1)
    assert first is not None and second is None
    await pair.source.desk.release(first.request_id)
    await wait_empty(pair.source, timeout_s=8)


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
    await wait_empty(pair.target, timeout_s=30)


async def anext_of(pair: Pair, ticket: Any) -> None:
    order = HandoffOrder(handoff_id=uuid.uuid4().hex, ticket=ticket, covered_tokens=64)
    async for _ in pair.converter.convert(order):
        pass


async def wait_empty(engine: Engine, *, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            census = await engine.census()
            held = census.pinned_blocks + census.loading_blocks
            # One block is vLLM's own null block.
            if held == 0 and census.free_blocks == census.num_blocks - 1:
                return
            await asyncio.sleep(0.05)
