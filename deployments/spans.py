"""The spans of a cascade. One request is one trace, over the processes that work on it:

    chat cascade                   router  the request, until its last token is out
    ├─ text_completion small       small   one call of the engine
    ├─ handoff                     router  from the decision to the target's first token
    │  ├─ handoff.ticket           router  until the source's ticket and a mapper's answer are there
    │  └─ convert small_to_large   mapper  from the order to the last WRITE
    └─ text_completion large       large   waits for those blocks, reads the rest, writes on

The root continues the client's `traceparent`. The router's spans are made in `observer.py`, the
others here, each in the process that spends the time and by that process's clock alone: no interval
is told twice. So bytes and the mapper's stages are on `convert` only, as attributes, for reading,
mapping and writing overlap and their sums are no intervals; each chunk's way through them is there
as events, one at the end of every step. What `handoff` has left after its children is the target
admitting the request and reading its own part. The root's token counts are what the client got, an
engine's are what it computed: add up one kind or the other. Tokens that came as mapped KV count as
cached.

A handoff that was tried and failed has both calls of the target below the root, the first one
cancelled. A call without a trace context, as for the shadow of an answer, is a trace of its own.
Across nodes spans lie as true to each other as the nodes' clocks.

This module knows what a call and a conversion are, and neither Ray nor vLLM.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from cluster import telemetry
from cluster.errors import HandoffError
from deployments.messages import HandoffOrder
from router.ports import EngineRequest, HandoffReport, HandoffStep

CANCELLED = "cancelled"
"""Finish reason, or outcome, of what its caller gave up; that is no error."""

UNWANTED = frozenset({"abandoned", CANCELLED})
"""Reasons of handoffs that ended because nobody wanted them any more."""


class _Timed(ABC):
    """A span that lasts what a monotonic clock says, whatever becomes of the wall clock.

    Made where the time is spent; a context manager that ends the span.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        name: str,
        traceparent: str | None,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        self._started_unix_ns = time.time_ns()
        self._started_ns = time.perf_counter_ns()
        self._span = tracer.start_span(
            name,
            telemetry.context_of(traceparent),
            attributes=attributes,
            start_time=self._started_unix_ns,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span.is_recording():
            self._conclude(error)
            self._span.end(self._started_unix_ns + self._elapsed_ns())

    def _elapsed_ns(self) -> int:
        return time.perf_counter_ns() - self._started_ns

    @abstractmethod
    def _conclude(self, error: BaseException | None) -> None:
        """Say how it went; `error` is what left the `with` block, if anything did."""

    def _fail(self, kind: str) -> None:
        # The message may quote a prompt, so it stays in the log.
        self._span.set_attribute(telemetry.ERROR_TYPE, kind)
        self._span.set_status(trace.StatusCode.ERROR, kind)


class Generation(_Timed):
    """One call of an engine, from its arrival to its last token. Enter it around the stream."""

    def __init__(self, tracer: trace.Tracer, model: str, request: EngineRequest) -> None:
        super().__init__(
            tracer,
            f"text_completion {model}",
            request.traceparent,
            {
                telemetry.OPERATION: "text_completion",
                telemetry.PROVIDER: "kvcascade",
                telemetry.REQUEST_MODEL: model,
                telemetry.MAX_TOKENS: request.max_tokens,
                telemetry.RESPONSE_ID: request.request_id,
                telemetry.INPUT_TOKENS: len(request.prompt_token_ids),
            },
        )
        self._tokens = 0
        self._cached_tokens: int | None = None
        self._first_token_ns: int | None = None
        self._finish_reason: str | None = None

    def saw(self, output: Any) -> None:
        """The next delta: vLLM's RequestOutput of one answer, before anybody judged it."""
        answer = output.outputs[0]
        self._tokens += len(answer.token_ids)
        self._finish_reason = answer.finish_reason
        if self._first_token_ns is None and self._tokens:
            self._first_token_ns = self._elapsed_ns()
            self._cached_tokens = output.num_cached_tokens

    def _conclude(self, error: BaseException | None) -> None:
        span, reason = self._span, self._finish_reason
        span.set_attribute(telemetry.OUTPUT_TOKENS, self._tokens)
        if self._first_token_ns is not None:
            span.set_attribute(telemetry.FIRST_TOKEN_S, self._first_token_ns / 1e9)
        if self._cached_tokens is not None:
            span.set_attribute(telemetry.CACHED_TOKENS, self._cached_tokens)
        if reason == "abort" or (reason is None and _given_up(error)):
            reason = CANCELLED
        if reason is not None:
            span.set_attribute(telemetry.FINISH_REASONS, (reason,))
        elif error is not None:
            self._fail(type(error).__name__)


class Conversion(_Timed):
    """One handoff in a mapper, from the order to its report. Enter it around the stream."""

    def __init__(self, tracer: trace.Tracer, direction: str, order: HandoffOrder) -> None:
        super().__init__(
            tracer,
            f"convert {direction}",
            order.traceparent,
            {telemetry.HANDOFF_ID: order.handoff_id},
        )
        self._report: HandoffReport | None = None
        self._converted_ns: int | None = None

    def done(self, report: HandoffReport) -> None:
        """It is over; the costs are known."""
        self._converted_ns = super()._elapsed_ns()
        self._report = report

    def _elapsed_ns(self) -> int:
        """Telling the router is no part of the conversion."""
        return super()._elapsed_ns() if self._converted_ns is None else self._converted_ns

    def _conclude(self, error: BaseException | None) -> None:
        if self._report is not None:
            self._span.set_attributes(_costs(self._report))
            for step in self._report.steps:
                self._show(step)
            return
        reason = error.reason if isinstance(error, HandoffError) else None
        if reason is None:
            reason = CANCELLED if error is None or _given_up(error) else type(error).__name__
        unwanted = reason in UNWANTED
        self._span.set_attribute(telemetry.HANDOFF_OUTCOME, CANCELLED if unwanted else "failed")
        self._span.set_attribute(telemetry.HANDOFF_REASON, reason)
        if not unwanted:
            self._fail(reason)

    def _show(self, step: HandoffStep) -> None:
        self._span.add_event(
            step.stage,
            {
                telemetry.STEP_FIRST_TOKEN: step.first_token,
                telemetry.STEP_LAST_TOKEN: step.last_token,
                telemetry.STEP_S: step.seconds,
            },
            self._started_unix_ns + round(1e9 * step.end_s),
        )


def _costs(report: HandoffReport) -> dict[str, AttributeValue]:
    return {
        telemetry.HANDOFF_OUTCOME: "mapped",
        telemetry.HANDOFF_TEMPERATURE: report.temperature,
        telemetry.HANDOFF_COVERED_TOKENS: report.covered_tokens,
        telemetry.HANDOFF_BYTES_READ: report.bytes_read,
        telemetry.HANDOFF_BYTES_WRITTEN: report.bytes_written,
        telemetry.HANDOFF_CHUNKS: report.chunks,
        **{telemetry.HANDOFF_STAGE_S.format(stage=name): s for name, s in report.stages_s.items()},
    }


def _given_up(error: BaseException | None) -> bool:
    """Whether the caller closed the stream or was cancelled itself."""
    return isinstance(error, GeneratorExit | asyncio.CancelledError)
