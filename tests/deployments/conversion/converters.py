"""Converters between engines' memories, and what a handoff between two of them needs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch
from torch import Tensor

from cluster.config import HandoffConfig, MapperConfig
from deployments.conversion import Converter
from deployments.messages import HandoffOrder, MapperAddress
from mappers.geometry import KVGeometry
from mappers.mapper import IdentityMapper
from router.ports import HandoffReport
from tests.deployments.engine_memory import DIM, HEADS, LAYERS, EngineMemory

Stream = AsyncIterator[MapperAddress | HandoffReport]

GEOMETRY = KVGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM)


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


def make(memories: list[EngineMemory], **options: Any) -> EngineMemory:
    memories.append(EngineMemory(**options))
    return memories[-1]


def kv(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    both = torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=generator).to(dtype)
    return both[0], both[1]


def order_for(source: EngineMemory, tokens: int, block_ids: tuple[int, ...]) -> HandoffOrder:
    ticket = source.ticket(tokens, block_ids)
    return HandoffOrder(handoff_id=uuid.uuid4().hex, ticket=ticket, covered_tokens=tokens)


async def begin(made: Converter, order: HandoffOrder) -> tuple[Stream, MapperAddress]:
    """Have an order accepted; the rest of its stream, and where the target has to speak."""
    stream = made.convert(order)
    address = await anext(stream)
    assert isinstance(address, MapperAddress)
    return stream, address


async def run(
    made: Converter,
    order: HandoffOrder,
    target: EngineMemory,
    *,
    start: int,
    tokens: int,
    block_ids: tuple[int, ...],
) -> HandoffReport:
    stream, address = await begin(made, order)
    target.announce(order.handoff_id, address, start=start, tokens=tokens, block_ids=block_ids)
    async with asyncio.timeout(10):
        report = await anext(stream)
    assert isinstance(report, HandoffReport)
    return report
