"""Engines that read from a script and handoffs that fail on demand: the router's outside, faked.

They keep every request and count what is still open, so a test can say what was asked and that
nothing was left behind. They know no model and no network.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import EngineError, HandoffError
from router.ports import EngineChunk, EngineRequest, HandoffReport, TokenStep
from router.stats import HandoffRecord

SURE = 8.0
"""A margin, in nats, of a token that the model does not doubt."""


def step(token_id: int, margin: float | None = SURE, *, top: int = 2) -> TokenStep:
    """A token with `top` candidates, the best `margin` nats above the second; None: no numbers."""
    if margin is None:
        return TokenStep(token_id=token_id)
    others = [(token_id + rank, -margin - 0.5 * (rank - 2), rank) for rank in range(2, top + 1)]
    return TokenStep(token_id=token_id, logprobs=((token_id, 0.0, 1), *others))


def steps(token_ids: Sequence[int], margin: float | None = SURE) -> list[TokenStep]:
    """One certain token per id."""
    return [step(token_id, margin) for token_id in token_ids]


Script = Callable[[EngineRequest], Sequence[TokenStep]]


@dataclass
class ScriptedEngine:
    """Answers with the tokens of `script`, one chunk each; the last one is the model's own end.

    `script` is a list, or a function of the request. `fail_after` raises EngineError after so many
    tokens; `hang_after` waits for ever. `gate`, when set, is awaited before the first token.
    """

    script: Sequence[TokenStep] | Script
    fail_after: int | None = None
    hang_after: int | None = None
    gate: asyncio.Event | None = None
    chunk_tokens: int = 1
    cached_tokens: int | None = 0
    requests: list[EngineRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    open: int = 0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.requests.append(request)
        self.open += 1
        ended = False
        try:
            script = self.script(request) if callable(self.script) else self.script
            if self.gate is not None:
                await self.gate.wait()
            wanted = list(script[: request.max_tokens])
            count = 0
            while count < len(wanted):
                await asyncio.sleep(0)
                if self.fail_after is not None and count >= self.fail_after:
                    raise EngineError("scripted failure")
                if self.hang_after is not None and count >= self.hang_after:
                    await asyncio.Event().wait()
                part = tuple(wanted[count : count + self.chunk_tokens])
                first = count == 0
                count += len(part)
                reason = None
                if count >= len(wanted):
                    reason = "stop" if len(wanted) == len(script) else "length"
                    ended = True
                yield EngineChunk(
                    steps=part,
                    finish_reason=reason,
                    cached_tokens=self.cached_tokens if first else None,
                )
        finally:
            self.open -= 1
            if not ended:
                self.aborted.append(request.request_id)

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)


def report(covered_tokens: int, *, cold: bool = False) -> HandoffReport:
    """A plausible report: 1 ms of everything."""
    return HandoffReport(
        covered_tokens=covered_tokens,
        bytes_read=covered_tokens * 10,
        bytes_written=covered_tokens * 20,
        queue_s=0.001,
        read_s=0.001,
        map_s=0.001,
        write_s=0.001,
        wait_target_s=0.001,
        convert_s=0.003,
        chunks=1,
        cold=cold,
    )


@dataclass
class FakeHandoff:
    """A handoff that succeeds, unless `failed` is given an error (at any time)."""

    handoff_id: str
    covered_tokens: int
    port: FakeHandoffPort
    ticket_s: float = 0.0
    failed: asyncio.Future[HandoffError] = field(default_factory=asyncio.Future)
    cancelled: bool = False

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        return {"handoff_id": self.handoff_id}

    async def failure(self) -> HandoffError:
        return await asyncio.shield(self.failed)

    async def report(self) -> HandoffReport:
        if self.port.report_error is not None:
            raise self.port.report_error
        if self.port.report_hangs:
            await asyncio.Event().wait()
        self.port.open.discard(self.handoff_id)
        return report(self.covered_tokens)

    async def cancel(self) -> None:
        self.cancelled = True
        self.port.open.discard(self.handoff_id)


@dataclass
class FakeHandoffPort:
    """Hands over at once; `begin_error`, `fail_at_once`, `report_error` make it fail there."""

    begin_error: Exception | None = None
    fail_at_once: HandoffError | None = None
    report_error: HandoffError | None = None
    report_hangs: bool = False
    begin_hangs: bool = False
    begun: list[FakeHandoff] = field(default_factory=list)
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    held_tokens: list[int] = field(default_factory=list)
    traceparents: list[str | None] = field(default_factory=list)
    open: set[str] = field(default_factory=set)

    async def begin(
        self,
        *,
        source_request_id: str,
        token_ids: tuple[int, ...],
        held_tokens: int = 0,
        traceparent: str | None = None,
    ) -> FakeHandoff:
        self.calls.append((source_request_id, token_ids))
        self.traceparents.append(traceparent)
        self.held_tokens.append(held_tokens)
        if self.begin_hangs:
            await asyncio.Event().wait()
        if self.begin_error is not None:
            raise self.begin_error
        handoff = FakeHandoff(uuid.uuid4().hex, len(token_ids) - 1, self)
        if self.fail_at_once is not None:
            handoff.failed.set_result(self.fail_at_once)
        self.begun.append(handoff)
        self.open.add(handoff.handoff_id)
        return handoff


@dataclass
class ListRecorder:
    """Keeps what was recorded. Handoffs are traced as `handoff-1` and so on, if anything is."""

    routes: list[tuple[str, str]] = field(default_factory=list)
    handoffs: list[HandoffRecord] = field(default_factory=list)
    traceparent: str | None = None
    opened: list[float] = field(default_factory=list)

    def open_handoff(self, started_unix_s: float) -> str | None:
        self.opened.append(started_unix_s)
        return None if self.traceparent is None else f"handoff-{len(self.opened)}"

    def route(self, *, model: str, reason: str) -> None:
        self.routes.append((model, reason))

    def handoff(self, record: HandoffRecord) -> None:
        self.handoffs.append(record)
