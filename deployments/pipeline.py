"""One handoff's work: read raw blocks, map them, write finished blocks, overlapped.

    reader ──raw chunk──► mapper ──mapped chunk──► writer
      READ(i+1)             map(i)                   WRITE(i−1)

The three stages are coroutines joined by queues; a handoff owns a raw and a mapped part of the
replica's registered pool, of two or more chunks each. One transfer each way moves and the next one
is prepared, so that a link does not fall idle; whose they are, and who maps next, is decided by
what each handoff had so far (`lane.py`). The reader starts before the target has announced its
blocks. The last WRITE carries the done notification; it leaves alone, after all others have landed
and the source has confirmed that the blocks were still held when the last READ did. When it has to
stop, and who is told so, is `conversion.py`'s business.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
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
from deployments.tally import Tally
from deployments.workshop import (
    TRANSFERS_UNDER_WAY,
    Slot,
    Workshop,
    chunk_views,
    peer_of,
)

T = TypeVar("T")
_CONTROL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class _RawChunk:
    first_token: int
    last_token: int
    buffers: list[Tensor]
    pool: Tensor
    landed: asyncio.Task[None]


@dataclass(frozen=True, kw_only=True)
class _MappedChunk:
    first_token: int
    last_token: int
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

    async def claim(self) -> None:
        """Have the source keep the blocks until the handoff's deadline; HandoffRefused when it no
        longer does."""
        ticket_id = self.order.ticket.ticket_id
        await self._require_held(Claim(ticket_id=ticket_id, lease_s=self.shop.deadline_s))

    async def run(self, slot: Slot) -> None:
        """Convert everything the target wants; raises HandoffError (perhaps in a group)."""
        self.tally.cold = await self.shop.connect(self.order.ticket.layout)
        raw: asyncio.Queue[_RawChunk | None] = asyncio.Queue()
        mapped: asyncio.Queue[_MappedChunk | None] = asyncio.Queue()
        begin = self._begin
        chunks = self.shop.cutting.cut(self.order.covered_tokens - begin, self.shop.costs)
        buffers = self.shop.cutting.buffers(chunks)
        free_raw, free_mapped = _pieces(slot.raw, buffers), _pieces(slot.mapped, buffers)
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(group, chunks, free_raw, raw, held))
            group.create_task(self._map(slot.plain, raw, free_raw, free_mapped, mapped))
            group.create_task(self._write(group, mapped, free_mapped, held))

    async def settle(self) -> None:
        """Wait until NIXL has reported the end of everything that was posted."""
        waiting = [asyncio.wrap_future(future) for future in self._in_flight]
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _read(
        self,
        group: asyncio.TaskGroup,
        chunks: list[int],
        free: asyncio.Queue[Tensor],
        out: asyncio.Queue[_RawChunk | None],
        held: asyncio.Future[None],
    ) -> None:
        ticket, layout = self.order.ticket, self.order.ticket.layout
        size = layout.block_size_tokens
        # What was read of blocks that are not held is of no use, and of no harm.
        claimed = group.create_task(self.claim())
        landed: list[asyncio.Task[None]] = []
        async for first, last in self._spans(chunks):
            if len(landed) >= TRANSFERS_UNDER_WAY:
                await landed[-TRANSFERS_UNDER_WAY]
            pool = await free.get()
            block_ids = ticket.block_ids[first // size : -(-last // size)]
            buffers = chunk_views(pool, layout, len(block_ids))
            landed.append(group.create_task(self._read_chunk(first, last, block_ids, buffers)))
            out.put_nowait(
                _RawChunk(
                    first_token=first,
                    last_token=last,
                    buffers=buffers,
                    pool=pool,
                    landed=landed[-1],
                )
            )
        await asyncio.gather(*landed)
        out.put_nowait(None)
        await claimed
        await self._require_held(Release(ticket_id=ticket.ticket_id))
        held.set_result(None)

    async def _read_chunk(
        self, first: int, last: int, block_ids: tuple[int, ...], buffers: list[Tensor]
    ) -> None:
        layout = self.order.ticket.layout
        lane = self.shop.transfer_lane("READ", layout)
        async with lane.turn(self.tally.bytes_read):
            moved = await self._transfer("READ", layout, block_ids, buffers)
        self.tally.note("read", first, last, moved.started, moved.ended)
        self.tally.bytes_read += moved.bytes

    async def _spans(self, chunks: list[int]) -> AsyncIterator[tuple[int, int]]:
        """Token ranges to read, in order; all begin on a block of both engines.

        They begin where the router believes that the target's own KV ends. A target that has lost
        some of it announces more: then they begin anew, further in front.
        """
        order = self.order
        begin = first = self._begin
        ends = [*accumulate(chunks, initial=begin)]
        while True:
            end = order.covered_tokens
            if self.target.done():
                target = self.target.result()
                wanted = self._on_grid(target.start_token)
                if wanted < begin:
                    begin = first = wanted
                    ends = [*range(first, end, self.shop.cutting.largest(chunks)), end]
                first, end = max(first, wanted), target.start_token + target.num_tokens
            if first < end:
                last = ends[bisect_right(ends, first)]
                yield first, last
                first = last
            elif begin == 0 or self.target.done():
                return
            else:
                # Before it has spoken, the source's promise has to stand.
                await asyncio.shield(self.target)

    @property
    def _begin(self) -> int:
        """Where to read from before the target has spoken; there is always something to read."""
        order = self.order
        return self._on_grid(min(order.first_token, order.covered_tokens - 1))

    def _on_grid(self, token: int) -> int:
        grid = self.shop.cutting.grid_tokens
        return token // grid * grid

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
        plain: Tensor,
        raw: asyncio.Queue[_RawChunk | None],
        free_raw: asyncio.Queue[Tensor],
        free_mapped: asyncio.Queue[Tensor],
        out: asyncio.Queue[_MappedChunk | None],
    ) -> None:
        written: int | None = None
        while (chunk := await raw.get()) is not None:
            await chunk.landed
            k_LTHD, v_LTHD = await self._compute(chunk, partial(self._apply, chunk, plain))
            self.tally.mapped_tokens += chunk.last_token - chunk.first_token
            free_raw.put_nowait(chunk.pool)
            with self.tally.step("wait_target", chunk.first_token, chunk.last_token):
                target = await self.target
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
            await self._compute(
                chunk, partial(self._encode, target.layout, k_LTHD, v_LTHD, buffers)
            )
            self.tally.chunks += 1
            out.put_nowait(
                _MappedChunk(
                    first_token=first,
                    last_token=last,
                    block_ids=target.block_ids[lo:hi],
                    last=last == end,
                    buffers=buffers,
                    pool=pool,
                )
            )
        out.put_nowait(None)

    async def _compute(self, chunk: _RawChunk, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        async with self.shop.map_lane.turn(self.tally.mapped_tokens):
            with self.tally.step("map", chunk.first_token, chunk.last_token):
                return await loop.run_in_executor(self.shop.compute, work)

    @torch.inference_mode()
    def _apply(self, chunk: _RawChunk, plain: Tensor) -> tuple[Tensor, Tensor]:
        tokens = chunk.last_token - chunk.first_token
        k_LTHD, v_LTHD = self.shop.codec(self.order.ticket.layout).decode(chunk.buffers, plain)
        result = self.shop.mapper.apply(k_LTHD[:, :tokens], v_LTHD[:, :tokens], chunk.first_token)
        self.shop.synchronize()
        return result

    @torch.inference_mode()
    def _encode(
        self, layout: EngineLayout, k_LTHD: Tensor, v_LTHD: Tensor, buffers: list[Tensor]
    ) -> None:
        self.shop.codec(layout).encode(k_LTHD, v_LTHD, buffers)
        self.shop.synchronize()

    async def _write(
        self,
        group: asyncio.TaskGroup,
        mapped: asyncio.Queue[_MappedChunk | None],
        free: asyncio.Queue[Tensor],
        held: asyncio.Future[None],
    ) -> None:
        landed: list[asyncio.Task[None]] = []
        while (chunk := await mapped.get()) is not None:
            if not landed:
                self.tally.cold |= await self.shop.connect(self.target.result().layout)
            if chunk.last:
                await asyncio.gather(held, *landed)
            landed.append(group.create_task(self._write_chunk(chunk, free)))

    async def _write_chunk(self, chunk: _MappedChunk, free: asyncio.Queue[Tensor]) -> None:
        layout = self.target.result().layout
        note = done_notification(self.order.handoff_id) if chunk.last else b""
        lane = self.shop.transfer_lane("WRITE", layout)
        async with lane.turn(self.tally.bytes_written):
            moved = await self._transfer("WRITE", layout, chunk.block_ids, chunk.buffers, note)
        self.tally.note("write", chunk.first_token, chunk.last_token, moved.started, moved.ended)
        self.tally.bytes_written += moved.bytes
        self.notified |= chunk.last
        free.put_nowait(chunk.pool)

    async def _transfer(
        self,
        operation: Literal["READ", "WRITE"],
        layout: EngineLayout,
        block_ids: tuple[int, ...],
        buffers: list[Tensor],
        note: bytes = b"",
    ) -> Transfer:
        """One chunk to or from every worker of an engine."""
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
        moved = [result for result in results if isinstance(result, Transfer)]
        return Transfer(
            bytes=sum(one.bytes for one in moved),
            started=min(one.started for one in moved),
            ended=max(one.ended for one in moved),
        )


def _pieces(pool: Tensor, count: int) -> asyncio.Queue[Tensor]:
    """Buffers of one size out of a part of the pool."""
    queue: asyncio.Queue[Tensor] = asyncio.Queue()
    size = pool.numel() // count
    for at in range(count):
        queue.put_nowait(pool[at * size : (at + 1) * size])
    return queue
