"""One mapper replica's work: read raw blocks, map them, write finished blocks, overlapped.

    reader ──raw chunk──► mapper ──mapped chunk──► writer
      READ(i+1)             map(i)                   WRITE(i−1)

The three stages are coroutines joined by queues; each handoff owns two raw and two mapped buffers
of one registered pool. The reader starts before the target has announced its blocks. The last
WRITE carries the done notification, and it leaves only after the source has confirmed that the
blocks were still held when the last READ landed. Knows NIXL and layouts, neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import zmq
import zmq.asyncio
from torch import Tensor

from cluster.config import HandoffConfig, MapperConfig
from cluster.errors import HandoffError, HandoffRefused, TransportError
from cluster.transport import Initiator, Peer, Transfer
from deployments.control import ask, tell
from deployments.layout import DTYPES, EngineCodec, descriptors
from deployments.messages import (
    Abandon,
    Claim,
    EngineLayout,
    HandoffOrder,
    MapperAddress,
    Release,
    Settled,
    TargetBlocks,
    Verdict,
    decode,
    done_notification,
)
from mappers.mapper import Mapper
from router.ports import HandoffReport

log = logging.getLogger("kvcascade.conversion")
_CONTROL_TIMEOUT_S = 5.0


@dataclass(kw_only=True)
class _Slot:
    """Buffers of one handoff: two raw and two mapped ones, so that neighbours overlap."""

    raw: list[Tensor]
    mapped: list[Tensor]


@dataclass(kw_only=True)
class _Running:
    """State of one handoff; lives on the event loop."""

    order: HandoffOrder
    target: asyncio.Future[TargetBlocks]
    stop: asyncio.Future[HandoffError]
    in_flight: set[Future[Transfer]] = field(default_factory=set)
    notified: bool = False
    cold: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    chunks: int = 0
    queue_s: float = 0.0
    read_s: float = 0.0
    map_s: float = 0.0
    write_s: float = 0.0
    wait_target_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _RawChunk:
    first_token: int
    last_token: int
    buffers: list[Tensor]
    pool: Tensor


@dataclass(frozen=True, kw_only=True)
class _MappedChunk:
    block_ids: tuple[int, ...]
    last: bool
    buffers: list[Tensor]
    pool: Tensor


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
        self._mapper_id = mapper_id
        self._config = config
        self._handoff = handoff
        self._dtype = dtype
        self._device = torch.device(config.device)
        step = math.lcm(*block_sizes_tokens)
        self._chunk_tokens = -(-config.chunk_tokens // step) * step
        self._generation = uuid.uuid4().hex
        item = torch.empty(0, dtype=DTYPES[dtype]).element_size()
        raw_bytes, mapped_bytes = (
            g.layers * self._chunk_tokens * g.kv_heads * 2 * g.head_dim * item
            for g in (mapper.source, mapper.target)
        )
        slots = config.max_concurrent_handoffs
        self._pool = torch.zeros(
            slots * 2 * (raw_bytes + mapped_bytes), dtype=torch.uint8, device=self._device
        )
        pieces = self._pool.split(([raw_bytes] * 2 + [mapped_bytes] * 2) * slots)
        self._free_slots: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for i in range(0, len(pieces), 4):
            self._free_slots.put_nowait(
                _Slot(raw=list(pieces[i : i + 2]), mapped=list(pieces[i + 2 : i + 4]))
            )
        self._initiator = Initiator(
            f"mapper-{self._generation}",
            pool_address=self._pool.data_ptr(),
            pool_bytes=self._pool.numel(),
            memory="DRAM" if self._device.type == "cpu" else "VRAM",
        )
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="map")
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, float] = {}
        self._codecs: dict[str, EngineCodec] = {}
        self._peers: dict[str, set[str]] = {}
        self._tasks: set[asyncio.Task[HandoffReport]] = set()
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.setsockopt(zmq.LINGER, 0)
        port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self.address = MapperAddress(
            address=f"tcp://{host}:{port}", generation=self._generation, mapper_id=mapper_id
        )
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    @property
    def running(self) -> int:
        """Handoffs accepted and not over."""
        return len(self._running)

    @property
    def pool_in_use_bytes(self) -> int:
        """Bytes of the pool that handoffs hold."""
        slots = self._config.max_concurrent_handoffs
        return self._pool.numel() // slots * (slots - self._free_slots.qsize())

    async def convert(self, order: HandoffOrder) -> AsyncIterator[MapperAddress | HandoffReport]:
        """Yield where the target announces its blocks, then the report of the finished handoff.

        Raises HandoffError. When it does, or when the iterator is closed, nothing of this handoff
        is written any more once the target has been told `Settled`.
        """
        self._check(order)
        loop = asyncio.get_running_loop()
        state = _Running(order=order, target=loop.create_future(), stop=loop.create_future())
        self._running[order.handoff_id] = state
        # The work outlives a caller that goes away: what was posted must settle first.
        task = loop.create_task(self._supervise(state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            yield self.address
            yield await asyncio.shield(task)
        finally:
            if not task.done():
                self._stop(state, HandoffRefused("cancelled", "the router gave the handoff up"))
                task.add_done_callback(_retrieve)

    def _check(self, order: HandoffOrder) -> None:
        geometry, layout = self._mapper.source, order.ticket.layout
        expected = (geometry.layers, geometry.kv_heads, geometry.head_dim)
        found = (layout.layers, layout.kv_heads, layout.workers[0].head_dim)
        if expected != found or layout.workers[0].dtype != self._dtype:
            raise HandoffRefused("layout", f"source (layers, heads, dim) {found}, not {expected}")
        if len(self._running) >= (
            self._config.max_concurrent_handoffs + self._config.max_queued_handoffs
        ):
            raise HandoffRefused("mapper_full", f"{len(self._running)} handoffs are waiting")
        if order.handoff_id in self._running or order.handoff_id in self._ended:
            raise HandoffRefused("replayed", "this handoff was ordered before")

    def _stop(self, state: _Running, error: HandoffError) -> None:
        if not state.stop.done():
            state.stop.set_result(error)

    async def _supervise(self, state: _Running) -> HandoffReport:
        """Run the pipeline until it ends, is stopped or is late, then settle everything."""
        started = time.perf_counter()
        work = asyncio.create_task(self._pipeline(state))
        failure: HandoffError | None = None
        try:
            await asyncio.wait(
                {work, state.stop},
                timeout=self._handoff.deadline_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not work.done():
                work.cancel()
                failure = (
                    state.stop.result()
                    if state.stop.done()
                    else HandoffRefused("deadline", f"not done in {self._handoff.deadline_s} s")
                )
            await asyncio.gather(work, return_exceptions=True)
            if failure is None and (error := work.exception()) is not None:
                failure = _as_handoff_error(error)
        finally:
            # Only what NIXL reports as over is over.
            waiting = [asyncio.wrap_future(f) for f in state.in_flight]
            await asyncio.gather(*waiting, return_exceptions=True)
            del self._running[state.order.handoff_id]
            self._remember(state.order.handoff_id)
        if failure is not None and not state.notified:
            await self._undo(state)
            raise failure
        return HandoffReport(
            covered_tokens=state.target.result().num_tokens,
            bytes_read=state.bytes_read,
            bytes_written=state.bytes_written,
            queue_s=state.queue_s,
            read_s=state.read_s,
            map_s=state.map_s,
            write_s=state.write_s,
            wait_target_s=state.wait_target_s,
            convert_s=time.perf_counter() - started,
            chunks=state.chunks,
            cold=state.cold,
        )

    def _remember(self, handoff_id: str) -> None:
        """An announcement may arrive after the end; it is answered for as long as one can."""
        now = time.monotonic()
        horizon = self._handoff.deadline_s + self._handoff.quarantine_s
        self._ended = {key: at for key, at in self._ended.items() if now - at < horizon}
        self._ended[handoff_id] = now

    async def _undo(self, state: _Running) -> None:
        """A failed handoff frees both ends: blocks of the source, the wait of the target."""
        order = state.order
        try:
            await tell(
                self._context,
                order.ticket.layout.control_address,
                Release(ticket_id=order.ticket.ticket_id),
            )
            if state.target.done() and not state.target.cancelled():
                await tell(
                    self._context,
                    state.target.result().layout.control_address,
                    Settled(handoff_id=order.handoff_id, ok=False),
                )
        except zmq.ZMQError as error:
            log.warning("could not report the end of handoff %s: %s", order.handoff_id, error)

    async def _pipeline(self, state: _Running) -> None:
        queued = time.perf_counter()
        slot = await self._free_slots.get()
        state.queue_s = time.perf_counter() - queued
        try:
            await self._connect(state, state.order.ticket.layout)
            raw: asyncio.Queue[_RawChunk | None] = asyncio.Queue()
            mapped: asyncio.Queue[_MappedChunk | None] = asyncio.Queue()
            free_raw: asyncio.Queue[Tensor] = asyncio.Queue()
            free_mapped: asyncio.Queue[Tensor] = asyncio.Queue()
            for piece in slot.raw:
                free_raw.put_nowait(piece)
            for piece in slot.mapped:
                free_mapped.put_nowait(piece)
            held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(state, free_raw, raw, held))
                group.create_task(self._map(state, raw, free_raw, free_mapped, mapped))
                group.create_task(self._write(state, mapped, free_mapped, held))
        finally:
            waiting = [asyncio.wrap_future(f) for f in state.in_flight]
            await asyncio.shield(asyncio.gather(*waiting, return_exceptions=True))
            self._free_slots.put_nowait(slot)

    async def _connect(self, state: _Running, layout: EngineLayout) -> None:
        for worker in layout.workers:
            peer = Peer(
                name=worker.agent_name, metadata=worker.agent_metadata, memory=worker.memory
            )
            if await asyncio.wrap_future(self._initiator.connect(peer)):
                state.cold = True
        self._forget_older(layout)

    def _forget_older(self, layout: EngineLayout) -> None:
        """A restarted engine is a new peer; what is known of the old one is dropped."""
        names = {worker.agent_name for worker in layout.workers}
        known = self._peers.setdefault(layout.control_address, names)
        if known != names:
            for name in known - names:
                self._initiator.forget(name)
            self._peers[layout.control_address] = names

    def _codec(self, layout: EngineLayout) -> EngineCodec:
        if layout.generation not in self._codecs:
            self._codecs[layout.generation] = EngineCodec(layout, self._device)
            while len(self._codecs) > 16:
                self._codecs.pop(next(iter(self._codecs)))
        return self._codecs[layout.generation]

    def _views(self, pool: Tensor, layout: EngineLayout, blocks: int) -> list[Tensor]:
        """`[L, B, H, S]` buffers of one chunk, one per rank, side by side in a pool piece."""
        views, at = [], 0
        for worker in layout.workers:
            size = layout.layers * blocks * worker.block_bytes
            flat = pool[at : at + size].view(DTYPES[worker.dtype])
            views.append(flat.view(layout.layers, blocks, worker.kv_heads, -1))
            at += size
        return views

    async def _read(
        self,
        state: _Running,
        free: asyncio.Queue[Tensor],
        out: asyncio.Queue[_RawChunk | None],
        held: asyncio.Future[None],
    ) -> None:
        ticket, layout = state.order.ticket, state.order.ticket.layout
        size = layout.block_size_tokens
        await self._verdict(layout, Claim(ticket_id=ticket.ticket_id, lease_s=self._handoff.deadline_s))
        for first in range(0, state.order.covered_tokens, self._chunk_tokens):
            last = min(first + self._chunk_tokens, state.order.covered_tokens)
            if state.target.done():
                target = state.target.result()
                if first >= target.start_token + target.num_tokens:
                    break
                if last <= target.start_token:
                    continue
            pool = await free.get()
            block_ids = ticket.block_ids[first // size : -(-last // size)]
            buffers = self._views(pool, layout, len(block_ids))
            started = time.perf_counter()
            await self._transfer(state, "READ", layout, block_ids, buffers, b"")
            state.read_s += time.perf_counter() - started
            await out.put(
                _RawChunk(first_token=first, last_token=last, buffers=buffers, pool=pool)
            )
        await out.put(None)
        await self._verdict(layout, Release(ticket_id=ticket.ticket_id))
        held.set_result(None)

    async def _verdict(self, layout: EngineLayout, message: Claim | Release) -> None:
        try:
            answer = await ask(
                self._context, layout.control_address, message, timeout_s=_CONTROL_TIMEOUT_S
            )
        except TimeoutError:
            raise HandoffRefused("source_silent", "the source does not answer") from None
        if not isinstance(answer, Verdict) or not answer.held:
            raise HandoffRefused("expired", "the source no longer holds the blocks")

    async def _map(
        self,
        state: _Running,
        raw: asyncio.Queue[_RawChunk | None],
        free_raw: asyncio.Queue[Tensor],
        free_mapped: asyncio.Queue[Tensor],
        out: asyncio.Queue[_MappedChunk | None],
    ) -> None:
        loop = asyncio.get_running_loop()
        source = self._codec(state.order.ticket.layout)
        while (chunk := await raw.get()) is not None:
            started = time.perf_counter()
            k_LTHD, v_LTHD = await loop.run_in_executor(
                self._compute, self._apply, source, chunk
            )
            state.map_s += time.perf_counter() - started
            free_raw.put_nowait(chunk.pool)
            started = time.perf_counter()
            target = await state.target
            state.wait_target_s += time.perf_counter() - started
            end = target.start_token + target.num_tokens
            first, last = max(chunk.first_token, target.start_token), min(chunk.last_token, end)
            if first >= last:
                continue
            pool = await free_mapped.get()
            size = target.layout.block_size_tokens
            lo, hi = ((t - target.start_token) // size for t in (first, last))
            buffers = self._views(pool, target.layout, hi - lo)
            keep = slice(first - chunk.first_token, last - chunk.first_token)
            started = time.perf_counter()
            await loop.run_in_executor(
                self._compute,
                self._encode,
                self._codec(target.layout),
                k_LTHD[:, keep],
                v_LTHD[:, keep],
                buffers,
            )
            state.map_s += time.perf_counter() - started
            state.chunks += 1
            await out.put(
                _MappedChunk(
                    block_ids=target.block_ids[lo:hi],
                    last=last == end,
                    buffers=buffers,
                    pool=pool,
                )
            )
        await out.put(None)

    def _apply(self, source: EngineCodec, chunk: _RawChunk) -> tuple[Tensor, Tensor]:
        tokens = chunk.last_token - chunk.first_token
        with torch.inference_mode():
            k_LTHD, v_LTHD = source.decode(chunk.buffers)
            return self._mapper.apply(k_LTHD[:, :tokens], v_LTHD[:, :tokens], chunk.first_token)

    def _encode(
        self, codec: EngineCodec, k_LTHD: Tensor, v_LTHD: Tensor, buffers: list[Tensor]
    ) -> None:
        with torch.inference_mode():
            codec.encode(k_LTHD, v_LTHD, buffers)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    async def _write(
        self,
        state: _Running,
        mapped: asyncio.Queue[_MappedChunk | None],
        free: asyncio.Queue[Tensor],
        held: asyncio.Future[None],
    ) -> None:
        connected = False
        while (chunk := await mapped.get()) is not None:
            target = state.target.result()
            if not connected:
                await self._connect(state, target.layout)
                connected = True
            note = b""
            if chunk.last:
                await held
                note = done_notification(state.order.handoff_id)
            started = time.perf_counter()
            await self._transfer(
                state, "WRITE", target.layout, chunk.block_ids, chunk.buffers, note
            )
            state.write_s += time.perf_counter() - started
            state.notified = state.notified or chunk.last
            free.put_nowait(chunk.pool)

    async def _transfer(
        self,
        state: _Running,
        operation: str,
        layout: EngineLayout,
        block_ids: tuple[int, ...],
        buffers: list[Tensor],
        note: bytes,
    ) -> None:
        if state.stop.done():
            raise state.stop.result()
        futures = []
        for worker, buffer in zip(layout.workers, buffers, strict=True):
            try:
                remote, local = descriptors(worker, block_ids, buffer.data_ptr())
            except ValueError as error:
                raise HandoffRefused("block_range", str(error)) from None
            peer = Peer(
                name=worker.agent_name, metadata=worker.agent_metadata, memory=worker.memory
            )
            future = self._initiator.post(
                "READ" if operation == "READ" else "WRITE", local, remote, peer, note
            )
            state.in_flight.add(future)
            futures.append(future)
        results = await asyncio.gather(
            *(asyncio.wrap_future(f) for f in futures), return_exceptions=True
        )
        state.in_flight.difference_update(futures)
        for worker, result in zip(layout.workers, results, strict=True):
            if isinstance(result, BaseException):
                self._initiator.forget(worker.agent_name)
                raise result
        done = sum(r.bytes for r in results if isinstance(r, Transfer))
        if operation == "READ":
            state.bytes_read += done
        else:
            state.bytes_written += done

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
        state = self._running.get(message.handoff_id)
        geometry, layout = self._mapper.target, message.layout
        expected = (geometry.layers, geometry.kv_heads, geometry.head_dim, self._dtype)
        worker = layout.workers[0]
        found = (layout.layers, layout.kv_heads, worker.head_dim, worker.dtype)
        if state is None or state.target.done():
            await tell(
                self._context,
                layout.control_address,
                Settled(handoff_id=message.handoff_id, ok=False),
            )
            return
        state.target.set_result(message)
        whole = message.num_tokens == len(message.block_ids) * layout.block_size_tokens
        end = message.start_token + message.num_tokens
        if expected != found:
            self._stop(state, HandoffRefused("layout", f"target {found}, not {expected}"))
        elif not whole or message.num_tokens < 1 or end > state.order.covered_tokens:
            self._stop(state, HandoffRefused("block_range", "blocks do not fit the ticket"))

    async def _abandoned(self, message: Abandon) -> None:
        state = self._running.get(message.handoff_id)
        if state is None:
            await tell(
                self._context,
                message.control_address,
                Settled(handoff_id=message.handoff_id, ok=False),
            )
            return
        self._stop(state, HandoffRefused("abandoned", "the target needs no blocks"))

    async def close(self) -> None:
        """Finish what runs, then give up socket, pool and agent."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.cancel()
        self._inbox.close()
        self._context.term()
        await asyncio.to_thread(self._initiator.close)
        self._compute.shutdown()


def _as_handoff_error(error: BaseException) -> HandoffError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, HandoffError):
        return error
    if isinstance(error, Exception):
        log.error("a handoff failed unexpectedly", exc_info=error)
        return TransportError("internal", f"{type(error).__name__}: {error}")
    raise error


def _retrieve(task: asyncio.Task[HandoffReport]) -> None:
    """Look at the result of a handoff that nobody waits for, so that asyncio stays quiet."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("a handoff without a router ended: %s", error)
