"""vLLM engines with the cascade's connector, and handoffs between them, without Ray."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.transport import Initiator
from deployments.cpu_environment import executor
from deployments.layout import EngineCodec, descriptors
from deployments.messages import Census, HandoffOrder, MapperAddress, Ticket
from deployments.pipeline import peer_of
from deployments.tickets import TicketDesk
from router.conversations import common_prefix_tokens
from router.ports import HandoffReport


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

    async def keep(
        self, token_ids: Sequence[int], max_tokens: int, **transfer: Any
    ) -> tuple[list[int], int, Any]:
        """Answer and keep the KV: the tokens, how much was not read, and the ticket."""
        request_id = uuid.uuid4().hex
        self.desk.expect(request_id)
        transfer["keep"] = {"ticket_id": request_id, "rule": "always"}
        answer, _, cached = await self.generate(
            token_ids, max_tokens, request_id=request_id, transfer=transfer
        )
        return answer, cached, await self.desk.take(request_id)

    async def census(self) -> Census:
        return await self.desk.census()

    async def wait_empty(self, *, timeout_s: float) -> None:
        """Until nothing is pinned or loading and the whole pool is free."""
        async with asyncio.timeout(timeout_s):
            while True:
                census = await self.census()
                held = census.pinned_blocks + census.loading_blocks
                # One block is vLLM's own null block.
                if held == 0 and census.free_blocks == census.num_blocks - 1:
                    return
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self.client.shutdown()
        self.desk.close()


@dataclass
class Handoff:
    """One handoff that a converter has accepted; `transfer` is what its target needs to know."""

    transfer: dict[str, Any]
    end: asyncio.Future[HandoffReport]

    @classmethod
    async def begin(cls, converter: Any, ticket: Any, token_ids: Sequence[int]) -> Handoff:
        covered = common_prefix_tokens(ticket.token_ids, tuple(token_ids))
        order = HandoffOrder(handoff_id=uuid.uuid4().hex, ticket=ticket, covered_tokens=covered)
        stream = converter.convert(order)
        address = await anext(stream)
        assert isinstance(address, MapperAddress)
        handoff = {
            "handoff_id": order.handoff_id,
            "mapper_address": address.address,
            "covered_tokens": covered,
        }
        return cls({"handoff": handoff}, asyncio.ensure_future(anext(stream)))

    async def report(self) -> HandoffReport | None:
        """None for a handoff that failed."""
        (result,) = await asyncio.gather(self.end, return_exceptions=True)
        return result if isinstance(result, HandoffReport) else None


def start_engine(
    folder: Path,
    name: str,
    dtype: str,
    *,
    block_tokens: int = 32,
    tensor_parallel: int = 1,
    pool_tokens: int = 4_096,
    max_model_len: int = 2_048,
    **arguments: Any,
) -> Engine:
    """An engine on the cores that the environment names (`deployments/cpu_environment.py`)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    from cluster.sources import kv_bytes_per_token

    desk = TicketDesk(lease_s=5.0)
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
        max_model_len=max_model_len,
        block_size=block_tokens,
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="mp",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        enforce_eager=True,
        kv_cache_memory_bytes=pool_tokens
        * kv_bytes_per_token(str(folder), dtype)
        // tensor_parallel,
        kv_transfer_config={
            "kv_connector": "CascadeConnector",
            "kv_connector_module_path": "deployments.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        },
        **arguments,
    ).create_engine_config()
    config.parallel_config.distributed_executor_backend = executor(tensor_parallel)
    client = AsyncLLM(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False
    )
    return Engine(client, desk)


class KVReader:
    """Looks into engines' KV pools from outside, as a mapper does."""

    def __init__(self, *, pool_bytes: int) -> None:
        self._pool = torch.zeros(pool_bytes, dtype=torch.uint8)
        self._initiator = Initiator(
            f"reader-{uuid.uuid4().hex}",
            pool_address=self._pool.data_ptr(),
            pool_bytes=pool_bytes,
            memory="DRAM",
        )

    async def read(self, ticket: Ticket, tokens: int) -> tuple[Tensor, Tensor]:
        """K and V `[L, T, H, D]` of a ticket's first tokens."""
        layout = ticket.layout
        block_ids = ticket.block_ids[: -(-tokens // layout.block_size_tokens)]
        codec = EngineCodec(layout, torch.device("cpu"))
        chunks, at = [], 0
        for worker in layout.workers:
            size = layout.layers * len(block_ids) * worker.block_bytes
            chunk = self._pool[at : at + size].view(codec.dtype)
            chunks.append(chunk.view(layout.layers, len(block_ids), worker.kv_heads, -1))
            at += size
            remote, local = descriptors(worker, block_ids, chunk.data_ptr())
            peer = peer_of(worker)
            await asyncio.wrap_future(self._initiator.connect(peer))
            await asyncio.wrap_future(self._initiator.post("READ", local, remote, peer))
        out = chunks[0].new_empty(sum(chunk.numel() for chunk in chunks))
        k_LTHD, v_LTHD = codec.decode(chunks, out)
        return k_LTHD[:, :tokens], v_LTHD[:, :tokens]

    def close(self) -> None:
        self._initiator.close()
