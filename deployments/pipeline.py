"""One handoff's work: read raw blocks, map them, write finished blocks, overlapped.

    reader ──raw chunk──► mapper ──mapped chunk──► writer
      READ(i+1)             map(i)                   WRITE(i−1)

The three stages are coroutines joined by queues; a handoff owns two raw and two mapped buffers of
the replica's registered pool. The reader starts before the target has announced its blocks. The
last WRITE carries the done notification, and it leaves only after the source has confirmed that
the blocks were still held when the last READ landed. When it has to stop, and who is told so, is
`conversion.py`'s business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from cluster.errors import HandoffError, HandoffRefused
from cluster.transport import Transfer
from deployments.control import ask
from deployments.layout import descriptors
from deployments.messages import (
    Claim,
    EngineLayout,
    HandoffOrder,
    Release,
    TargetBlocks,
    Verdict,
    done_notification,
)
from deployments.workshop import Slot, Workshop, chunk_views, peer_of

T = TypeVar("T")
_CONTROL_TIMEOUT_S = 5.0


@dataclass(kw_only=True)
class Tally:
    """What a handoff cost; the mapper's own clock. Stages overlap."""

    cold: bool = False
    bytes_read: int = 0
    bytes_written: int = 0
    chunks: int = 0
    mapped_tokens: int = 0
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


@dataclass(kw_only=True)
class Pipeline:
    """One order at work. `target` is set when the target announces its blocks, `stop` when the
    handoff must end; after `stop` nothing new is posted."""

    shop: Workshop
    order: HandoffOrder
    target: asyncio.Future[TargetBlocks]
    stop: asyncio.Future[HandoffError]
    tally: Tally = field(default_factory=Tally)
    notified: bool = False
    """The last WRITE is complete: the target has everything."""
    _in_flight: set[Future[Transfer]] = field(default_factory=set)

    @property
    def unmapped_tokens(self) -> int:
        """Tokens that wait for the map, as far as is known."""
        wanted = self.order.covered_tokens - self.order.first_token
        if self.target.done() and not self.target.cancelled():
            wanted = self.target.result().num_tokens
        return max(0, wanted - self.tally.mapped_tokens)

    async def run(self, slot: Slot) -> None:
        """Convert everything the target wants; raises HandoffError (perhaps in a group)."""
        self.tally.cold = await self.shop.connect(self.order.ticket.layout)
        raw: asyncio.Queue[_RawChunk | None] = asyncio.Queue()
        mapped: asyncio.Queue[_MappedChunk | None] = asyncio.Queue()
        free_raw, free_mapped = _queue_of(slot.raw), _queue_of(slot.mapped)
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(free_raw, raw, held))
            group.create_task(self._map(raw, free_raw, free_mapped, mapped))
            group.create_task(self._write(mapped, free_mapped, held))

    async def settle(self) -> None:
        """Wait until NIXL has reported the end of everything that was posted."""
        waiting = [asyncio.wrap_future(future) for future in self._in_flight]
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _read(
        self,
        free: asyncio.Queue[Tensor],
        out: asyncio.Queue[_RawChunk | None],
        held: asyncio.Future[None],
    ) -> None:
        ticket, layout = self.order.ticket, self.order.ticket.layout
        size = layout.block_size_tokens
        await self._require_held(Claim(ticket_id=ticket.ticket_id, lease_s=self.shop.deadline_s))
        async for first, last in self._spans():
            pool = await free.get()
            block_ids = ticket.block_ids[first // size : -(-last // size)]
            buffers = chunk_views(pool, layout, len(block_ids))
            spent_s, done = await _timed(self._transfer("READ", layout, block_ids, buffers))
            self.tally.read_s += spent_s
            self.tally.bytes_read += done
            out.put_nowait(
                _RawChunk(first_token=first, last_token=last, buffers=buffers, pool=pool)
            )
        out.put_nowait(None)
        await self._require_held(Release(ticket_id=ticket.ticket_id))
        held.set_result(None)

    async def _spans(self) -> AsyncIterator[tuple[int, int]]:
        """Token ranges to read, in order; all begin on a block of both engines.

        They begin where the router believes that the target's own KV ends. A target that has lost
        some of it announces more: then they begin anew, further in front.
        """
        order, grid, step = self.order, self.shop.block_grid_tokens, self.shop.chunk_tokens
        begin = first = order.first_token // grid * grid
        while True:
            end = order.covered_tokens
            if self.target.done():
                target = self.target.result()
                wanted = target.start_token // grid * grid
                if wanted < begin:
                    begin = first = wanted
                first, end = max(first, wanted), target.start_token + target.num_tokens
            if first < end:
                last = min(first + step, order.covered_tokens)
                yield first, last
                first = last
            elif begin == 0 or self.target.done():
                return
            else:
                # Before it has spoken, the source's promise has to stand.
                await asyncio.shield(self.target)

    async def _require_held(self, message: Claim | Release) -> None:
        address = self.order.ticket.layout.control_address
        try:
            answer = await ask(self.shop.context, address, message, timeout_s=_CONTROL_TIMEOUT_S)
        except TimeoutError:
            raise HandoffRefused("source_silent", "the source does not answer") from None
        if not isinstance(answer, Verdict) or not answer.held:
            raise HandoffRefused("expired", "the source no longer holds the blocks")

    async def _map(
        self,
        raw: asyncio.Queue[_RawChunk | None],
        free_raw: asyncio.Queue[Tensor],
        free_mapped: asyncio.Queue[Tensor],
        out: asyncio.Queue[_MappedChunk | None],
    ) -> None:
        written: int | None = None
        while (chunk := await raw.get()) is not None:
            spent_s, (k_LTHD, v_LTHD) = await _timed(self._compute(partial(self._apply, chunk)))
            self.tally.map_s += spent_s
            self.tally.mapped_tokens += chunk.last_token - chunk.first_token
            free_raw.put_nowait(chunk.pool)
            spent_s, target = await _timed(self.target)
            self.tally.wait_target_s += spent_s
            end = target.start_token + target.num_tokens
            first = target.start_token if written is None else written
            last = min(chunk.last_token, end)
            # What was read before the target wanted more from further in front comes again.
            if not chunk.first_token <= first < last:
                continue
            written = last
            pool = await free_mapped.get()
            size = target.layout.block_size_tokens
            lo, hi = ((token - target.start_token) // size for token in (first, last))
            buffers = chunk_views(pool, target.layout, hi - lo)
            wanted = slice(first - chunk.first_token, last - chunk.first_token)
            k_LTHD, v_LTHD = k_LTHD[:, wanted], v_LTHD[:, wanted]
            spent_s, _ = await _timed(
                self._compute(partial(self._encode, target.layout, k_LTHD, v_LTHD, buffers))
            )
            self.tally.map_s += spent_s
            self.tally.chunks += 1
            out.put_nowait(
                _MappedChunk(
                    block_ids=target.block_ids[lo:hi],
                    last=last == end,
                    buffers=buffers,
                    pool=pool,
                )
            )
        out.put_nowait(None)

    async def _compute(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.shop.compute, work)

    @torch.inference_mode()
    def _apply(self, chunk: _RawChunk) -> tuple[Tensor, Tensor]:
        tokens = chunk.last_token - chunk.first_token
        k_LTHD, v_LTHD = self.shop.codec(self.order.ticket.layout).decode(chunk.buffers)
        result = self.shop.mapper.apply(k_LTHD[:, :tokens], v_LTHD[:, :tokens], chunk.first_token)
        self._synchronize()
        return result

    @torch.inference_mode()
    def _encode(
        self, layout: EngineLayout, k_LTHD: Tensor, v_LTHD: Tensor, buffers: list[Tensor]
    ) -> None:
        self.shop.codec(layout).encode(k_LTHD, v_LTHD, buffers)
        self._synchronize()

    def _synchronize(self) -> None:
        """Buffers change hands with NIXL, which knows no CUDA streams."""
        if self.shop.device.type == "cuda":
            torch.cuda.synchronize(self.shop.device)

    async def _write(
        self,
        mapped: asyncio.Queue[_MappedChunk | None],
        free: asyncio.Queue[Tensor],
        held: asyncio.Future[None],
    ) -> None:
        connected = False
        while (chunk := await mapped.get()) is not None:
            layout = self.target.result().layout
            if not connected:
                self.tally.cold |= await self.shop.connect(layout)
                connected = True
            note = b""
            if chunk.last:
                await held
                note = done_notification(self.order.handoff_id)
            spent_s, done = await _timed(
                self._transfer("WRITE", layout, chunk.block_ids, chunk.buffers, note)
            )
            self.tally.write_s += spent_s
            self.tally.bytes_written += done
            self.notified |= chunk.last
            free.put_nowait(chunk.pool)

    async def _transfer(
        self,
        operation: Literal["READ", "WRITE"],
        layout: EngineLayout,
        block_ids: tuple[int, ...],
        buffers: list[Tensor],
        note: bytes = b"",
    ) -> int:
        """One chunk to or from every worker of an engine; the bytes that moved."""
        if self.stop.done():
            raise self.stop.result()
        futures = []
        for worker, buffer in zip(layout.workers, buffers, strict=True):
            try:
                remote, local = descriptors(worker, block_ids, buffer.data_ptr())
            except ValueError as error:
                raise HandoffRefused("block_range", str(error)) from None
            futures.append(
                self.shop.initiator.post(operation, local, remote, peer_of(worker), note)
            )
        self._in_flight.update(futures)
        results = await asyncio.gather(
            *(asyncio.wrap_future(future) for future in futures), return_exceptions=True
        )
        self._in_flight.difference_update(futures)
        for worker, result in zip(layout.workers, results, strict=True):
            if isinstance(result, BaseException):
                # Its connection may be broken: the next handoff shakes hands again.
                self.shop.initiator.forget(worker.agent_name)
                raise result
        return sum(result.bytes for result in results if isinstance(result, Transfer))


def _queue_of(pieces: tuple[Tensor, ...]) -> asyncio.Queue[Tensor]:
    queue: asyncio.Queue[Tensor] = asyncio.Queue()
    for piece in pieces:
        queue.put_nowait(piece)
    return queue


async def _timed(work: Awaitable[T]) -> tuple[float, T]:
    started = time.perf_counter()
    result = await work
    return time.perf_counter() - started, result
