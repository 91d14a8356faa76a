"""What the handoffs of one mapper replica share: the map, the NIXL agent, buffers, one thread.

It knows layouts and peers, and nothing of a handoff's course.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
import zmq.asyncio
from torch import Tensor

from cluster.chunking import Cost, Cutting, chunk_s_of, new_costs
from cluster.transport import Initiator, Peer
from deployments.lane import Lane
from deployments.layout import DTYPES, EngineCodec
from deployments.messages import EngineLayout, WorkerLayout
from mappers.mapper import Mapper

_KEPT_CODECS = 16

_REHEARSALS = 2
"""The first one makes what later ones have: kernels, memory."""

TRANSFERS_UNDER_WAY = 2
"""To or from one engine: one moves, the next is prepared. What was posted cannot be overtaken."""


class Workshop:
    """What all handoffs of one replica share: the map, the agent, one compute thread, and what
    chunks cost until now."""

    def __init__(
        self,
        *,
        mapper: Mapper,
        initiator: Initiator,
        device: torch.device,
        context: zmq.asyncio.Context,
        cutting: Cutting,
        deadline_s: float,
    ) -> None:
        self.mapper = mapper
        self.initiator = initiator
        self.device = device
        self.context = context
        self.cutting = cutting
        self.costs = new_costs()
        self.deadline_s = deadline_s
        self.compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="map")
        self.map_lane = Lane(1)
        self._transfer_lanes: dict[tuple[str, str], Lane] = {}
        self._codecs: dict[str, EngineCodec] = {}
        self._agents: dict[str, set[str]] = {}

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Learn what the map takes, by mapping zeros in a smallest and in a largest chunk."""
        source, sizes = self.mapper.source, (self.cutting.grid_tokens, self.cutting.most_tokens)
        taken: list[tuple[int, float]] = []
        for tokens in sizes:
            shape = (source.layers, tokens, source.kv_heads, source.head_dim)
            k_LTHD = torch.zeros(shape, dtype=self.mapper.dtype, device=self.device)
            for _ in range(_REHEARSALS):
                started = time.perf_counter()
                self.mapper.apply(k_LTHD, k_LTHD, 0)
                self.synchronize()
                last_s = time.perf_counter() - started
            taken.append((tokens, last_s))
        small, large = taken
        if small[0] < large[0]:
            self.costs["map"] = Cost(chunk_s_of(small, large))
        self.costs["map"].saw(1, *large)

    def synchronize(self) -> None:
        """Buffers change hands with NIXL, which knows no CUDA streams."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def codec(self, layout: EngineLayout) -> EngineCodec:
        """The codec of an engine's blocks; the last few engines' are kept."""
        if layout.generation not in self._codecs:
            self._codecs[layout.generation] = EngineCodec(layout, self.device)
            while len(self._codecs) > _KEPT_CODECS:
                self._codecs.pop(next(iter(self._codecs)))
        return self._codecs[layout.generation]

    def transfer_lane(self, operation: Literal["READ", "WRITE"], layout: EngineLayout) -> Lane:
        """For one direction of the way to an engine."""
        key = operation, layout.generation
        if key not in self._transfer_lanes:
            self._transfer_lanes[key] = Lane(TRANSFERS_UNDER_WAY)
        return self._transfer_lanes[key]

    async def connect(self, layout: EngineLayout) -> bool:
        """Connect to all workers of an engine; True when a handshake was needed.

        A restarted engine is a new peer: what is known of the one before it is dropped.
        """
        cold = False
        for worker in layout.workers:
            cold |= await asyncio.wrap_future(self.initiator.connect(peer_of(worker)))
        names = {worker.agent_name for worker in layout.workers}
        for name in self._agents.get(layout.control_address, set()) - names:
            self.initiator.forget(name)
        self._agents[layout.control_address] = names
        return cold


def peer_of(worker: WorkerLayout) -> Peer:
    """An engine worker as NIXL sees it."""
    return Peer(name=worker.agent_name, metadata=worker.agent_metadata, memory=worker.memory)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Memory of one handoff for raw and for mapped chunks, two of the largest each, and for what
    the map is given of one."""

    raw: Tensor
    plain: Tensor
    mapped: Tensor


def slot_bytes(mapper: Mapper, chunk_tokens: int, dtype: str) -> tuple[int, int]:
    """Bytes of a slot's raw and of its mapped part, for two chunks of so many tokens."""
    item = DTYPES[dtype].itemsize
    raw, mapped = (
        2 * g.layers * chunk_tokens * g.kv_heads * 2 * g.head_dim * item
        for g in (mapper.source, mapper.target)
    )
    return raw, mapped


def chunk_views(pool: Tensor, layout: EngineLayout, blocks: int) -> list[Tensor]:
    """`[L, B, H, S]` buffers of one chunk, one per rank, side by side in a pool piece."""
    views, at = [], 0
    for worker in layout.workers:
        size = layout.layers * blocks * worker.block_bytes
        flat = pool[at : at + size].view(DTYPES[worker.dtype])
        views.append(flat.view(layout.layers, blocks, worker.kv_heads, -1))
        at += size
    return views
