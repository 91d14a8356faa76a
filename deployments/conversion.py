"""One mapper replica: takes orders, hears from targets, ends every handoff properly.

A handoff is over only when nothing of it is in flight; then both ends are told. The work itself is
`pipeline.py`. Knows NIXL and layouts, neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch
import zmq
import zmq.asyncio

from cluster.chunking import PACED, Cutting
from cluster.config import HandoffConfig, MapperConfig
from cluster.errors import HandoffError, HandoffRefused, TransportError
from cluster.transport import Initiator
from deployments.control import tell
from deployments.messages import (
    Abandon,
    EngineLayout,
    HandoffOrder,
    MapperAddress,
    Release,
    Settled,
    TargetBlocks,
    decode,
)
from deployments.pipeline import Pipeline
from deployments.tally import Tally
from deployments.workshop import Slot, Workshop, slot_bytes
from mappers.geometry import KVGeometry
from mappers.mapper import Mapper
from router.ports import HandoffReport

log = logging.getLogger("kvcascade.conversion")


class Converter:
    """Owns the agent, the pool and the control socket of one mapper replica."""

    def __init__(
        self,
        mapper: Mapper,
        mapper_id: str,
        config: MapperConfig,
        handoff: HandoffConfig,
        *,
        dtype: str,
        block_sizes_tokens: tuple[int, int],
        host: str,
    ) -> None:
        self._mapper = mapper
        self._config = config
        self._handoff = handoff
        self._dtype = dtype
        device = torch.device(config.device)
        # Chunks begin and end on blocks of both engines.
        grid = math.lcm(*block_sizes_tokens)
        chunk_tokens = -(-config.chunk_tokens // grid) * grid
        raw_bytes, mapped_bytes = slot_bytes(mapper, chunk_tokens, dtype)
        slots = config.max_concurrent_handoffs
        self._pool = torch.zeros(
            slots * (raw_bytes + mapped_bytes), dtype=torch.uint8, device=device
        )
        self._free_slots: asyncio.LifoQueue[Slot] = asyncio.LifoQueue()
        for piece in self._pool.chunk(slots):
            raw, mapped = piece.split((raw_bytes, mapped_bytes))
            # Fresh memory costs more than what is then copied to it.
            plain = torch.zeros(raw_bytes // 2, dtype=torch.uint8, device=device)
            self._free_slots.put_nowait(Slot(raw=raw, plain=plain, mapped=mapped))
        generation = uuid.uuid4().hex
        self._initiator = Initiator(
            f"mapper-{generation}",
            pool_address=self._pool.data_ptr(),
            pool_bytes=self._pool.numel(),
            memory="DRAM" if device.type == "cpu" else "VRAM",
        )
        self._context = zmq.asyncio.Context()
        self._shop = Workshop(
            mapper=mapper,
            initiator=self._initiator,
            device=device,
            context=self._context,
            cutting=Cutting(grid_tokens=grid, most_tokens=chunk_tokens),
            deadline_s=handoff.deadline_s,
        )
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.setsockopt(zmq.LINGER, 0)
        port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self.address = MapperAddress(
            address=f"tcp://{host}:{port}", generation=generation, mapper_id=mapper_id
        )
        self._running: dict[str, Pipeline] = {}
        self._ended: dict[str, float] = {}
        self._tasks: set[asyncio.Task[HandoffReport]] = set()
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    @property
    def running(self) -> int:
        """Handoffs accepted and not over."""
        return len(self._running)

    @property
    def backlog_s(self) -> float:
        """Seconds that this replica needs for what was accepted and is not mapped yet, be it the
        map or a link that is the limit.

        At the rate of the latest handoffs; before the first one nothing is known and it is 0.
        """
        tokens = sum(pipeline.unmapped_tokens for pipeline in self._running.values())
        return tokens * max(cost.token_s or 0.0 for cost in self._shop.costs.values())

    @property
    def pool_in_use_bytes(self) -> int:
        """Bytes of the pool that handoffs hold."""
        return self._pool.numel() // self._config.max_concurrent_handoffs * self._at_work

    @property
    def _at_work(self) -> int:
        return self._config.max_concurrent_handoffs - self._free_slots.qsize()

    async def convert(self, order: HandoffOrder) -> AsyncIterator[MapperAddress | HandoffReport]:
        """Yield where the target announces its blocks, then the report of the finished handoff.

        Raises HandoffError. When it does, or when the iterator is closed, both ends are told once
        nothing of this handoff is in flight.
        """
        self._check(order)
        loop = asyncio.get_running_loop()
        pipeline = Pipeline(
            shop=self._shop, order=order, target=loop.create_future(), stop=loop.create_future()
        )
        self._running[order.handoff_id] = pipeline
        # The work outlives a caller that goes away: what was posted must settle first.
        task = loop.create_task(self._supervise(pipeline))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            yield self.address
            yield await asyncio.shield(task)
        finally:
            if not task.done():
                _stop(pipeline, HandoffRefused("cancelled", "the router gave the handoff up"))
                task.add_done_callback(_look)

    def _check(self, order: HandoffOrder) -> None:
        self._check_layout("source", self._mapper.source, order.ticket.layout)
        accepted = self._config.max_concurrent_handoffs + self._config.max_queued_handoffs
        if len(self._running) >= accepted:
            raise HandoffRefused("mapper_full", f"{accepted} handoffs are at work or waiting")
        if order.handoff_id in self._running or order.handoff_id in self._ended:
            raise HandoffRefused("replayed", "this handoff was ordered before")
        if not 0 < order.covered_tokens <= len(order.ticket.token_ids):
            raise HandoffRefused("nothing_covered", "no common prefix with the ticket")

    def _check_layout(self, side: str, geometry: KVGeometry, layout: EngineLayout) -> None:
        worker = layout.workers[0]
        expected = (geometry.layers, geometry.kv_heads, geometry.head_dim, self._dtype)
        found = (layout.layers, layout.kv_heads, worker.head_dim, worker.dtype)
        if expected != found:
            raise HandoffRefused(
                "layout", f"{side} (layers, KV heads, head_dim, dtype) is {found}, not {expected}"
            )

    async def _supervise(self, pipeline: Pipeline) -> HandoffReport:
        """Run the pipeline until it ends, is stopped or is late; then settle and tell."""
        handoff_id = pipeline.order.handoff_id
        started = time.perf_counter()
        work = asyncio.create_task(self._work(pipeline))
        ends: set[asyncio.Future[Any]] = {work, pipeline.stop}
        done, _ = await asyncio.wait(
            ends,
            timeout=self._handoff.deadline_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not done:
            _stop(pipeline, HandoffRefused("deadline", f"late after {self._handoff.deadline_s} s"))
        if not work.done():
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        del self._running[handoff_id]
        self._remember(handoff_id)
        if not pipeline.notified:
            await self._undo(pipeline)
            if work.cancelled():
                raise pipeline.stop.result()
            error = work.exception()
            assert error is not None, "a pipeline that ends well has notified the target"
            raise _as_handoff_error(error)
        queue_s, tally = work.result() if not work.cancelled() else 0.0, pipeline.tally
        return HandoffReport(
            covered_tokens=pipeline.target.result().num_tokens,
            bytes_read=tally.bytes_read,
            bytes_written=tally.bytes_written,
            queue_s=queue_s,
            read_s=tally.spent_s("read"),
            map_s=tally.spent_s("map"),
            write_s=tally.spent_s("write"),
            wait_target_s=tally.spent_s("wait_target"),
            convert_s=time.perf_counter() - started,
            chunks=tally.chunks,
            cold=tally.cold,
            steps=tuple(tally.steps),
        )

    async def rehearse(self) -> None:
        """Learn what the map takes before the first handoff is cut into chunks."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._shop.compute, self._shop.rehearse)

    async def greet(self, layout: EngineLayout) -> bool:
        """Shake hands with an engine before the first handoff needs it; False: known already."""
        return await self._shop.connect(layout)

    async def _work(self, pipeline: Pipeline) -> float:
        """Wait for a slot and run; returns the seconds spent waiting."""
        queued = time.perf_counter()
        if self._free_slots.empty():
            # The line may be longer than the lease.
            await pipeline.claim()
        slot = await self._free_slots.get()
        queue_s = time.perf_counter() - queued
        try:
            await pipeline.run(slot)
            self._learn(pipeline.tally)
        finally:
            # NIXL may still write into these buffers, or read from them.
            await pipeline.settle()
            self._free_slots.put_nowait(slot)
        return queue_s

    def _learn(self, tally: Tally) -> None:
        """Remember what each stage took."""
        for stage in PACED:
            spent_s = tally.spent_s(stage)
            self._shop.costs[stage].saw(tally.chunks, tally.mapped_tokens, spent_s)

    def _remember(self, handoff_id: str) -> None:
        """An announcement may arrive after the end; it is answered for as long as one can."""
        now = time.monotonic()
        horizon_s = self._handoff.deadline_s + self._handoff.quarantine_s
        self._ended = {key: at for key, at in self._ended.items() if now - at < horizon_s}
        self._ended[handoff_id] = now

    async def _undo(self, pipeline: Pipeline) -> None:
        """A failed handoff frees both ends: blocks of the source, the wait of the target."""
        ticket = pipeline.order.ticket
        await self._tell(ticket.layout.control_address, Release(ticket_id=ticket.ticket_id))
        if pipeline.target.done() and not pipeline.target.cancelled():
            await self._settled(pipeline.target.result().layout.control_address, pipeline.order)

    async def _settled(self, address: str, order: HandoffOrder | TargetBlocks | Abandon) -> None:
        await self._tell(address, Settled(handoff_id=order.handoff_id, ok=False))

    async def _tell(self, address: str, message: Release | Settled) -> None:
        try:
            await tell(self._context, address, message)
        except zmq.ZMQError as error:
            log.warning("could not send %s to %s: %s", type(message).__name__, address, error)

    async def _listen(self) -> None:
        """Announcements and withdrawals of targets."""
        while True:
            *_, frame = await self._inbox.recv_multipart()
            try:
                message = decode(frame)
            except ValueError as error:
                log.warning("ignored a control message: %s", error)
                continue
            match message:
                case TargetBlocks():
                    await self._announced(message)
                case Abandon():
                    await self._abandoned(message)
                case _:
                    log.warning("unexpected control message %s", type(message).__name__)

    async def _announced(self, message: TargetBlocks) -> None:
        pipeline = self._running.get(message.handoff_id)
        if pipeline is None or pipeline.target.done():
            await self._settled(message.layout.control_address, message)
            return
        pipeline.target.set_result(message)
        whole = message.num_tokens == len(message.block_ids) * message.layout.block_size_tokens
        end = message.start_token + message.num_tokens
        try:
            self._check_layout("target", self._mapper.target, message.layout)
            if not whole or message.num_tokens < 1 or end > pipeline.order.covered_tokens:
                raise HandoffRefused("block_range", "the announced blocks do not fit the ticket")
        except HandoffRefused as error:
            _stop(pipeline, error)

    async def _abandoned(self, message: Abandon) -> None:
        pipeline = self._running.get(message.handoff_id)
        if pipeline is None:
            await self._settled(message.control_address, message)
        else:
            _stop(pipeline, HandoffRefused("abandoned", "the target needs no blocks"))

    async def close(self) -> None:
        """Finish what runs, then give up socket, pool and agent."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.cancel()
        self._inbox.close()
        self._context.destroy()
        await asyncio.to_thread(self._initiator.close)
        self._shop.compute.shutdown()


def _stop(pipeline: Pipeline, error: HandoffError) -> None:
    if not pipeline.stop.done():
        pipeline.stop.set_result(error)


def _as_handoff_error(error: BaseException) -> HandoffError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, HandoffError):
        return error
    if isinstance(error, Exception):
        log.error("a handoff failed unexpectedly", exc_info=error)
        return TransportError("internal", f"{type(error).__name__}: {error}")
    raise error


def _look(task: asyncio.Task[HandoffReport]) -> None:
    """Look at the result of a handoff that nobody waits for, so that asyncio stays quiet."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("a handoff without a router ended: %s", error)
