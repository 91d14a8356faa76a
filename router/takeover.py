"""The large model's part of one answer: with mapped KV when that works, else by reading again.

A handoff is an optimisation, never a dependency. Whatever goes wrong before the large model's
first token, the request with the mapped KV is aborted and the same tokens are sent once more, as
a new request in a prefix cache of its own: the answer is the cold answer. It does not decide when
to take over, and does not know how KV travels.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.errors import EngineError, HandoffError
from router.api import HandoffInfo
from router.background import Background
from router.ports import (
    EngineChunk,
    EnginePort,
    EngineRequest,
    Handoff,
    HandoffPort,
    HandoffReport,
)
from router.stats import HandoffRecord, Recorder

logger = logging.getLogger(__name__)

REPORT_WAIT_S = 2.0
"""How long an answer waits at its end for the costs of its handoff."""


@dataclass(kw_only=True)
class Takeover:
    """One escalation. `skip` is a reason not to try a handoff; `decided_s` is monotonic."""

    engine: EnginePort
    handoffs: HandoffPort
    recorder: Recorder
    background: Background
    small_request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Any
    skip: str | None
    decided_s: float
    _started_unix_s: float = field(default_factory=time.time)
    _reason: str | None = None
    _handoff: Handoff | None = None
    _given_up: bool = False
    _report: asyncio.Task[HandoffReport] | None = None
    _stream: AsyncGenerator[EngineChunk, None] | None = None
    _total_s: float | None = None
    _cached_tokens: int | None = None
    _record: HandoffRecord | None = None
    _info: HandoffInfo | None = None

    @property
    def took_ticket(self) -> bool:
        """Whether a handoff owns what the small engine kept."""
        return self._handoff is not None

    async def chunks(self) -> AsyncGenerator[EngineChunk, None]:
        """The large model's tokens, which go on right after `token_ids`."""
        self._reason = self.skip or await self._begin()
        first: EngineChunk | None = None
        if self._reason is None:
            first = await self._first_mapped()
        if first is None:
            self._stream = self.engine.generate(self._request(fresh=self._reason != "short"))
            first = await _first_tokens(self._stream)
        self._total_s = time.monotonic() - self.decided_s
        self._cached_tokens = first.cached_tokens
        if self._reason is None:
            assert self._handoff is not None
            self._report = asyncio.create_task(self._handoff.report())
        yield first
        if first.finish_reason is not None:
            return
        assert self._stream is not None
        async for chunk in self._stream:
            yield chunk
            if chunk.finish_reason is not None:
                return
        raise EngineError("the large engine ended a stream without a finish reason")

    async def info(self) -> HandoffInfo:
        """What this escalation cost; waits at most REPORT_WAIT_S for the mapper's report."""
        await self._conclude()
        assert self._info is not None
        return self._info

    async def close(self) -> None:
        """Abort the large request if it runs, give up an unfinished handoff, record the rest."""
        if self._stream is not None:
            await self._stream.aclose()
        await self._conclude()

    async def _begin(self) -> str | None:
        """Order the handoff; a reason when there is none."""
        try:
            self._handoff = await self.handoffs.begin(
                small_request_id=self.small_request_id, token_ids=self.token_ids
            )
        except Exception as error:
            return _reason_of(error)
        return None

    async def _first_mapped(self) -> EngineChunk | None:
        """First tokens computed on mapped KV; None, with `_reason` set, when it failed."""
        assert self._handoff is not None
        handoff = self._handoff
        self._stream = self.engine.generate(self._request(fresh=True, handoff=handoff))
        first = asyncio.create_task(_first_tokens(self._stream))
        failed = asyncio.create_task(handoff.failure())
        try:
            await asyncio.wait({first, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done() and (not first.done() or first.exception() is not None):
                raise failed.result()
            return first.result()
        except Exception as error:
            self._reason = _reason_of(error)
        finally:
            first.cancel()
            failed.cancel()
            await asyncio.gather(first, failed, return_exceptions=True)
        await self._stream.aclose()
        self._give_up(handoff)
        return None

    def _request(self, *, fresh: bool, handoff: Handoff | None = None) -> EngineRequest:
        # Mapped KV enters the engine's prefix cache, so no other request may share its salt; and
        # a cold answer must not find what an earlier turn left there.
        return EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=self.token_ids,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            cache_salt=uuid.uuid4().hex if fresh else None,
            kv_transfer_params=None if handoff is None else handoff.kv_transfer_params,
        )

    async def _conclude(self) -> None:
        """Collect the report, fill `_info` and record once."""
        if self._info is not None:
            return
        report = await self._wait_for_report()
        ticket_s = 0.0 if self._handoff is None else self._handoff.ticket_s
        stages_s: dict[str, float] = {}
        if self._handoff is not None:
            stages_s["ticket"] = ticket_s
        if report is not None:
            stages_s |= {
                "queue": report.queue_s,
                "read": report.read_s,
                "map": report.map_s,
                "write": report.write_s,
                "wait_target": report.wait_target_s,
            }
        if report is not None and self._total_s is not None:
            stages_s["admit"] = max(0.0, self._total_s - ticket_s - report.convert_s)
        self._publish(stages_s, report)

    def _publish(self, stages_s: dict[str, float], report: HandoffReport | None) -> None:
        if self._info is not None:
            return
        path: Literal["mapped", "recompute"] = "mapped" if self._reason is None else "recompute"
        covered = 0 if report is None else report.covered_tokens
        known = self._cached_tokens if self._cached_tokens is not None else covered
        self._info = HandoffInfo(
            path=path,
            reason=self._reason,
            handoff_ms=None if self._total_s is None else _ms(self._total_s),
            stages_ms={name: _ms(value) for name, value in stages_s.items()},
            bytes_read=0 if report is None else report.bytes_read,
            bytes_written=0 if report is None else report.bytes_written,
            covered_tokens=covered,
            reread_tokens=None if self._total_s is None else len(self.token_ids) - known,
            temperature=None if report is None else ("cold" if report.cold else "warm"),
        )
        if self._total_s is not None:
            stages_s = {**stages_s, "total": self._total_s}
        self.recorder.handoff(
            HandoffRecord(
                outcome="cancelled" if self._total_s is None else path,
                reason=self._reason,
                started_unix_s=self._started_unix_s,
                stages_s=stages_s,
                temperature=self._info.temperature,
                bytes_read=self._info.bytes_read,
                bytes_written=self._info.bytes_written,
            )
        )

    async def _wait_for_report(self) -> HandoffReport | None:
        """The report of a handoff whose first token came; else it is given up."""
        if self._report is not None:
            done, _ = await asyncio.wait({self._report}, timeout=REPORT_WAIT_S)
            if done:
                try:
                    return self._report.result()
                except Exception as error:
                    # The target found out by itself and computed the tokens: a cold answer.
                    self._reason = _reason_of(error)
            self._report.cancel()
        if self._handoff is not None:
            self._give_up(self._handoff)
        return None

    def _give_up(self, handoff: Handoff) -> None:
        # In the background: a silent mapper must not hold the answer up.
        if not self._given_up:
            self._given_up = True
            self.background.spawn(handoff.cancel())


async def _first_tokens(stream: AsyncGenerator[EngineChunk, None]) -> EngineChunk:
    """The first chunk that holds a token or ends the answer."""
    async for chunk in stream:
        if chunk.steps or chunk.finish_reason is not None:
            return chunk
    raise EngineError("the large engine ended a stream without a token")


def _reason_of(error: Exception) -> str:
    """The short word that is counted and shown for a failed handoff."""
    if isinstance(error, HandoffError):
        logger.warning("handoff failed, reading again: %s", error)
        return error.reason
    if isinstance(error, EngineError):
        logger.warning("the large engine failed with mapped KV, reading again: %s", error)
        return "large_failed"
    logger.error("handoff failed unexpectedly, reading again", exc_info=error)
    return "error"


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)
