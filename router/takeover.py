"""One model's tokens after a handoff: with mapped KV when that works, else by reading again.

A handoff is an optimisation, never a dependency. Whatever goes wrong before the first token, the
request with the mapped KV is aborted and the same tokens are sent once more, as a new request in a
prefix cache of its own: the answer is the cold answer. It serves both directions; it does not
decide when to take over, and does not know how KV travels.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.errors import EngineError, HandoffError
from router.api import HandoffInfo, Prediction
from router.background import Background
from router.forecast import Forecast
from router.ports import (
    EngineChunk,
    EnginePort,
    EngineRequest,
    Handoff,
    HandoffPort,
    HandoffReport,
    affinity_of,
    new_request_id,
)
from router.stats import HandoffRecord, Recorder

logger = logging.getLogger(__name__)

REPORT_WAIT_S = 2.0
"""How long an answer waits at its end for the costs of its handoff."""


PLANNED = ("short", "cheaper")
"""Reasons to read rather than map although nothing is wrong: what the target has is used."""

UNWANTED = "abandoned"
"""A handoff ends with this when the target found that it has everything already."""


@dataclass(kw_only=True)
class Takeover:
    """One handoff to `engine`, for which it goes on with `request`.

    `request` is complete but for its id, its prefix cache and its KV. `lineage` names the cache
    that holds what the engine has of this conversation, `held_tokens` of it at most. `skip` is a
    reason not to try a handoff; `decided_s` is monotonic.
    """

    engine: EnginePort
    handoffs: HandoffPort
    recorder: Recorder
    background: Background
    forecast: Forecast
    source_request_id: str
    request: EngineRequest
    skip: str | None
    decided_s: float
    lineage: str | None = None
    held_tokens: int = 0
    _started_unix_s: float = field(default_factory=time.time)
    _traceparent: str | None = None
    _reason: str | None = None
    _handoff: Handoff | None = None
    _given_up: bool = False
    _report: asyncio.Task[HandoffReport] | None = None
    _stream: AsyncGenerator[EngineChunk, None] | None = None
    _sent: EngineRequest | None = None
    _total_s: float | None = None
    _cached_tokens: int | None = None
    _covered_tokens: int = 0
    _predicted: Prediction = field(default_factory=Prediction)
    _info: HandoffInfo | None = None

    @property
    def took_ticket(self) -> bool:
        """Whether a handoff owns what the source kept."""
        return self._handoff is not None

    @property
    def request_id(self) -> str | None:
        """The engine's request that answers, once there is one."""
        return None if self._sent is None else self._sent.request_id

    @property
    def salt(self) -> str | None:
        """The prefix cache that the answer's KV is in; None before the first token."""
        return None if self._sent is None or self._total_s is None else self._sent.cache_salt

    @property
    def covered_tokens(self) -> int:
        """Tokens that came as mapped KV, known after `info` or `close`."""
        return self._covered_tokens

    async def chunks(self) -> AsyncGenerator[EngineChunk, None]:
        """The engine's tokens, which go on right after the request's prompt."""
        missing_tokens = len(self.request.prompt_token_ids) - self.held_tokens
        mapped_s = self.forecast.mapped_s(missing_tokens)
        recompute_s = self.forecast.recompute_s(missing_tokens)
        self._predicted = Prediction(mapped=_ms(mapped_s), recompute=_ms(recompute_s))
        self._traceparent = self.recorder.open_handoff(self._started_unix_s)
        self._reason = self.skip or await self._begin()
        first: EngineChunk | None = None
        if self._reason is None:
            first = await self._first_mapped()
        if first is None:
            planned = self._reason in PLANNED
            salt = (self.lineage or self.request.cache_salt) if planned else uuid.uuid4().hex
            self._stream = self._generate(salt)
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
        raise EngineError("the engine ended a stream without a finish reason")

    async def info(self) -> HandoffInfo:
        """What this escalation cost; waits at most REPORT_WAIT_S for the mapper's report."""
        await self._conclude()
        assert self._info is not None
        return self._info

    async def close(self) -> None:
        """Abort the request if it runs, give up an unfinished handoff, record the rest."""
        if self._stream is not None:
            await self._stream.aclose()
        await self._conclude()

    async def _begin(self) -> str | None:
        """Order the handoff; a reason when there is none."""
        try:
            self._handoff = await self.handoffs.begin(
                source_request_id=self.source_request_id,
                token_ids=self.request.prompt_token_ids,
                held_tokens=self.held_tokens,
                traceparent=self._traceparent,
            )
        except Exception as error:
            return _reason_of(error)
        return None

    async def _first_mapped(self) -> EngineChunk | None:
        """First tokens computed on mapped KV; None, with `_reason` set, when it failed."""
        assert self._handoff is not None
        handoff = self._handoff
        self._stream = self._generate(self.lineage or uuid.uuid4().hex, handoff)
        first = asyncio.create_task(_first_tokens(self._stream))
        failed = asyncio.create_task(handoff.failure())
        try:
            await asyncio.wait({first, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done() and failed.result().reason == UNWANTED:
                await asyncio.wait({first})
            elif failed.done() and (not first.done() or first.exception() is not None):
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

    def _generate(
        self, salt: str | None, handoff: Handoff | None = None
    ) -> AsyncGenerator[EngineChunk, None]:
        # Mapped KV enters the engine's prefix cache, so only this conversation may name its salt.
        # After a failure nothing of the attempt may be found: a late WRITE could have hit it.
        self._sent = replace(
            self.request,
            request_id=new_request_id(affinity_of(self.request.request_id)),
            cache_salt=salt,
            kv_transfer_params=None if handoff is None else handoff.kv_transfer_params,
        )
        return self.engine.generate(self._sent)

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
            stages_s |= report.stages_s
        if report is not None and self._total_s is not None:
            stages_s["admit"] = max(0.0, self._total_s - ticket_s - report.convert_s)
        self._publish(stages_s, report)

    def _publish(self, stages_s: dict[str, float], report: HandoffReport | None) -> None:
        if self._info is not None:
            return
        path: Literal["mapped", "recompute"] = "mapped" if self._reason is None else "recompute"
        tokens = len(self.request.prompt_token_ids)
        covered = 0 if report is None else report.covered_tokens
        cached = self._cached_tokens if self._cached_tokens is not None else covered
        self._covered_tokens = covered
        if self._total_s is not None:
            self._observe(covered, tokens - cached, warm=report is None or not report.cold)
        self._info = HandoffInfo(
            path=path,
            reason=self._reason,
            handoff_ms=_ms(self._total_s),
            stages_ms={name: round(value * 1000.0, 3) for name, value in stages_s.items()},
            bytes_read=0 if report is None else report.bytes_read,
            bytes_written=0 if report is None else report.bytes_written,
            covered_tokens=covered,
            held_tokens=max(0, cached - covered),
            reread_tokens=None if self._total_s is None else tokens - cached,
            temperature=None if report is None else report.temperature,
            predicted_ms=self._predicted,
        )
        if self._total_s is not None:
            stages_s = {**stages_s, "total": self._total_s}
        expected_ms = self._predicted.recompute
        self.recorder.handoff(
            HandoffRecord(
                outcome="cancelled" if self._total_s is None else path,
                reason=self._reason,
                started_unix_s=self._started_unix_s,
                stages_s=stages_s,
                temperature=self._info.temperature,
                bytes_read=self._info.bytes_read,
                bytes_written=self._info.bytes_written,
                predicted_recompute_s=None if expected_ms is None else expected_ms / 1000.0,
                traceparent=self._traceparent,
            )
        )

    def _observe(self, covered_tokens: int, reread_tokens: int, *, warm: bool) -> None:
        """Let the forecast learn; first handshakes are no measure of what comes."""
        assert self._total_s is not None
        if self._reason is not None:
            # Not after a failed attempt: its time is in the total.
            if self.skip is not None and reread_tokens:
                self.forecast.observe_recompute(reread_tokens, self._total_s)
        elif covered_tokens and warm:
            self.forecast.observe_mapped(covered_tokens, self._total_s)

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
    raise EngineError("the engine ended a stream without a token")


def _reason_of(error: Exception) -> str:
    """The short word that is counted and shown for a failed handoff."""
    if isinstance(error, HandoffError) and error.reason == UNWANTED:
        return "held"
    if isinstance(error, HandoffError):
        logger.warning("handoff failed, reading again: %s", error)
        return error.reason
    if isinstance(error, EngineError):
        logger.warning("the engine failed with mapped KV, reading again: %s", error)
        return "target_failed"
    logger.error("handoff failed unexpectedly, reading again", exc_info=error)
    return "error"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)
