"""Turns what the splice records into Prometheus metrics, OpenTelemetry spans and running totals.

It knows the names in `cluster/telemetry.py` and nothing of engines or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace

from cluster import telemetry
from cluster.telemetry import Metrics
from router.running import Running
from router.stats import HandoffRecord


class Observer:
    """One per router replica. Without `metrics` only spans are made; `running` counts if given."""

    def __init__(
        self, metrics: Metrics | None, tracer: trace.Tracer, running: Running | None = None
    ) -> None:
        self.metrics = metrics
        self.tracer = tracer
        self.running = running
        self._in_flight = 0

    def begin(
        self, model: str, headers: Mapping[str, str], *, operation: str = "chat"
    ) -> Observation:
        """Start watching one request; `headers` may carry the caller's trace.

        `operation` is OpenTelemetry's word for it: `chat` or `text_completion`.
        """
        self.count(+1)
        attributes = {
            telemetry.OPERATION: operation,
            telemetry.PROVIDER: "kvcascade",
            telemetry.REQUEST_MODEL: model,
        }
        context = telemetry.extract_context(headers)
        span = self.tracer.start_span(f"{operation} {model}", context, attributes=attributes)
        return Observation(self, span)

    def count(self, change: int) -> None:
        """Requests came (+) or went (-)."""
        self._in_flight += change
        if self.metrics is not None:
            self.metrics.set_in_flight(self._in_flight)


class Observation:
    """One request; a `router.stats.Recorder`."""

    def __init__(self, observer: Observer, span: trace.Span) -> None:
        self._observer = observer
        self._span = span
        self._ended = False

    def route(self, *, model: str, reason: str) -> None:
        """See `router.stats.Recorder`."""
        self._span.set_attribute(telemetry.RESPONSE_MODEL, model)
        self._span.set_attribute(telemetry.DECISION_REASON, reason)
        metrics, running = self._observer.metrics, self._observer.running
        if running is not None:
            running.route(model=model, reason=reason)
        if metrics is None:
            return
        metrics.count_route(model=model, reason=reason)
        if running is not None:
            metrics.set_fractions(
                realised=running.realised_fraction, target=running.target_fraction
            )

    def handoff(self, record: HandoffRecord) -> None:
        """See `router.stats.Recorder`."""
        telemetry.emit_handoff_spans(
            self._observer.tracer,
            trace.set_span_in_context(self._span),
            started_unix_s=record.started_unix_s,
            stages_s=record.stages_s,
            attributes={
                telemetry.HANDOFF_OUTCOME: record.outcome,
                telemetry.HANDOFF_REASON: record.reason or "none",
                telemetry.HANDOFF_TEMPERATURE: record.temperature or "none",
                telemetry.HANDOFF_BYTES_READ: record.bytes_read,
                telemetry.HANDOFF_BYTES_WRITTEN: record.bytes_written,
            },
        )
        metrics, running = self._observer.metrics, self._observer.running
        if running is not None:
            running.handoff(record)
        if metrics is None:
            return
        if running is not None:
            metrics.set_saved_prefill(running.saved_prefill_s)
        metrics.count_handoff(outcome=record.outcome, reason=record.reason)
        metrics.count_bytes(read=record.bytes_read, written=record.bytes_written)
        if record.outcome != "cancelled":
            metrics.observe_stages(
                record.stages_s, path=record.outcome, temperature=record.temperature
            )

    def answered(self, *, input_tokens: int, output_tokens: int) -> None:
        """What the answer counted."""
        self._span.set_attribute(telemetry.INPUT_TOKENS, input_tokens)
        self._span.set_attribute(telemetry.OUTPUT_TOKENS, output_tokens)

    def end(self, error: BaseException | None = None) -> None:
        """The request is over. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            self._span.set_status(trace.StatusCode.ERROR, type(error).__name__)
        self._span.end()
        self._observer.count(-1)
