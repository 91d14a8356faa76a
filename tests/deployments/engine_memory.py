"""An engine's memory without an engine: KV blocks registered with NIXL, and its control socket.

Plays the scheduler half's part of the protocol by script, so that a converter can be tested over
real NIXL transfers in milliseconds.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cluster.transport import make_agent
from deployments.control import ControlServer, Outbox
from deployments.layout import DTYPES, EngineCodec
from deployments.messages import (
    Abandon,
    Claim,
    EngineLayout,
    MapperAddress,
    Release,
    Settled,
    TargetBlocks,
    Ticket,
    Verdict,
    WorkerLayout,
    handoff_of_notification,
)

LAYERS, HEADS, DIM = 3, 2, 8


@dataclass
class EngineMemory:
    """One engine of `ranks` workers with `num_blocks` blocks each.

    `held` is what it answers to claims and `held_at_release` to releases; `messages` collects what
    it was told.
    """

    ranks: int = 1
    block_tokens: int = 32
    num_blocks: int = 16
    layers: int = LAYERS
    dtype: str = "bfloat16"
    held: bool = True
    held_at_release: bool = True
    messages: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        heads = HEADS // self.ranks
        self.caches: list[Tensor] = []
        self.agents: list[Any] = []
        self._notified: list[set[str]] = []
        self.control = ControlServer("127.0.0.1", self._answer)
        self.outbox = Outbox()
        workers = []
        for rank in range(self.ranks):
            slab = self.block_tokens * 2 * DIM
            cache_LBHS = torch.zeros(
                self.layers, self.num_blocks, heads, slab, dtype=DTYPES[self.dtype]
            )
            name = f"memory-{uuid.uuid4().hex}"
            agent = make_agent(name, progress_thread=True, progress_delay_us=1_000)
            agent.register_memory([(cache_LBHS.data_ptr(), cache_LBHS.nbytes, 0, "")], "DRAM")
            self.caches.append(cache_LBHS)
            self.agents.append(agent)
            self._notified.append(set())
            workers.append(
                WorkerLayout(
                    rank=rank,
                    agent_name=name,
                    agent_metadata=agent.get_agent_metadata(),
                    memory="DRAM",
                    device_id=0,
                    dtype=self.dtype,  # type: ignore[arg-type]
                    layer_addresses=tuple(layer.data_ptr() for layer in cache_LBHS),
                    num_blocks=self.num_blocks,
                    block_stride_bytes=cache_LBHS[0, 0].nbytes,
                    block_size_tokens=self.block_tokens,
                    kv_heads=heads,
                    head_dim=DIM,
                    permutation=None,
                )
            )
        self.layout = EngineLayout(
            engine="memory",
            generation=uuid.uuid4().hex,
            control_address=self.control.address,
            workers=tuple(workers),
        )
        self.codec = EngineCodec(self.layout, torch.device("cpu"))

    def _answer(self, message: Any) -> Verdict | None:
        self.messages.append(message)
        match message:
            case Claim(ticket_id=ticket_id):
                return Verdict(ticket_id=ticket_id, held=self.held)
            case Release(ticket_id=ticket_id):
                return Verdict(ticket_id=ticket_id, held=self.held_at_release)
        return None

    def fill(self, k_LTHD: Tensor, v_LTHD: Tensor, block_ids: tuple[int, ...]) -> None:
        """Put a whole number of blocks of K and V where `block_ids` say."""
        buffers = [cache[:, list(block_ids)] for cache in self.caches]
        self.codec.encode(k_LTHD, v_LTHD, buffers)
        for cache, buffer in zip(self.caches, buffers, strict=True):
            cache[:, list(block_ids)] = buffer

    def content(self, block_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """K and V of some blocks as plain tensors."""
        chunks = [cache[:, list(block_ids)] for cache in self.caches]
        out = chunks[0].new_empty(sum(chunk.numel() for chunk in chunks))
        return self.codec.decode(chunks, out)

    def ticket(self, tokens: int, block_ids: tuple[int, ...]) -> Ticket:
        return Ticket(
            ticket_id=uuid.uuid4().hex,
            request_id="r",
            token_ids=tuple(range(tokens)),
            block_ids=block_ids,
            lease_s=5.0,
            layout=self.layout,
        )

    def announce(
        self,
        handoff_id: str,
        mapper: MapperAddress,
        *,
        start: int,
        tokens: int,
        block_ids: tuple[int, ...],
    ) -> None:
        """What a target's scheduler half says once vLLM has allocated."""
        self.outbox.send(
            mapper.address,
            TargetBlocks(
                handoff_id=handoff_id,
                start_token=start,
                num_tokens=tokens,
                block_ids=block_ids,
                layout=self.layout,
            ),
        )

    def abandon(self, handoff_id: str, mapper: MapperAddress) -> None:
        self.outbox.send(
            mapper.address,
            Abandon(handoff_id=handoff_id, control_address=self.control.address),
        )

    def done(self) -> list[str]:
        """Handoffs whose done notification every worker has received by now."""
        for agent, seen in zip(self.agents, self._notified, strict=True):
            notes = [note for notes in agent.get_new_notifs().values() for note in notes]
            seen |= {handoff_of_notification(note) or "?" for note in notes}
        return sorted(set.intersection(*self._notified))

    async def wait_done(self, handoff_id: str) -> list[str]:
        """The same, once one of them is there: a notification may come after the report."""
        async with asyncio.timeout(5):
            while handoff_id not in (found := self.done()):
                await asyncio.sleep(0.01)
        return found

    def told(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    async def wait_told(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(5):
            while not self.told(kind):
                await asyncio.sleep(0.005)
        return self.told(kind)[-1]

    async def settled(self) -> Settled:
        message = await self.wait_told(Settled)
        assert isinstance(message, Settled)
        return message

    def close(self) -> None:
        self.control.close()
        self.outbox.close()
