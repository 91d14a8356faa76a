"""Turns what the splice records into Prometheus metrics, OpenTelemetry spans and running totals.

It knows the names in `cluster/telemetry.py`, makes the router's part of the trace that
`deployments/spans.py` describes, and knows nothing of engines or HTTP.
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
        span = self.tracer.start_span(
            f"{operation} {model}", context, kind=trace.SpanKind.SERVER, attributes=attributes
        )
        return Observation(self, span)

    def count(self, change: int) -> None:
        """Requests came (+) or went (-)."""
        self._in_flight += change
        if self.metrics is not None:
            self.metrics.set_in_flight(self._in_flight)

    def renew(self) -> None:
        """Set every gauge; Ray forgets one that was not set for twenty seconds."""
        self.count(0)
        self.show_fractions()
        self.show_saved()

    def show_fractions(self) -> None:
        """An answer was settled."""
        if self.metrics is not None and self.running is not None:
            self.metrics.set_fractions(
                realised=self.running.realised_fraction, target=self.running.target_fraction
            )

    def show_saved(self) -> None:
        """A handoff is over."""
        if self.metrics is not None and self.running is not None:
            self.metrics.set_saved_prefill(self.running.saved_prefill_s)


class Observation:
    """One request; a `router.stats.Recorder`."""

    def __init__(self, observer: Observer, span: trace.Span) -> None:
        self._observer = observer
        self._span = span
        self._ended = False
        self._handoffs: dict[str, trace.Span] = {}
        self.traceparent = telemetry.traceparent_of(span)

    def route(self, *, model: str, reason: str) -> None:
        """See `router.stats.Recorder`."""
        self._span.set_attribute(telemetry.RESPONSE_MODEL, model)
        self._span.set_attribute(telemetry.DECISION_REASON, reason)
        metrics, running = self._observer.metrics, self._observer.running
        if running is not None:
            running.route(model=model, reason=reason)
            self._observer.show_fractions()
        if metrics is not None:
            metrics.count_route(model=model, reason=reason)

    def open_handoff(self, started_unix_s: float) -> str | None:
        """See `router.stats.Recorder`."""
        if not self._span.is_recording():
            return self.traceparent
        span = self._observer.tracer.start_span(
            "handoff", trace.set_span_in_context(self._span), start_time=_ns(started_unix_s)
        )
        traceparent = telemetry.traceparent_of(span)
        assert traceparent is not None
        self._handoffs[traceparent] = span
        return traceparent

    def handoff(self, record: HandoffRecord) -> None:
        """See `router.stats.Recorder`."""
        if span := self._handoffs.pop(record.traceparent or "", None):
            self._end_handoff(span, record)
        metrics, running = self._observer.metrics, self._observer.running
        if running is not None:
            running.handoff(record)
            self._observer.show_saved()
        if metrics is None:
            return
        metrics.count_handoff(outcome=record.outcome, reason=record.reason)
        metrics.count_bytes(read=record.bytes_read, written=record.bytes_written)
        if record.outcome != "cancelled":
            metrics.observe_stages(
                record.stages_s, path=record.outcome, temperature=record.temperature
            )

    def _end_handoff(self, span: trace.Span, record: HandoffRecord) -> None:
        """Router's times alone: the mapper tells its own."""
        span.set_attribute(telemetry.HANDOFF_OUTCOME, record.outcome)
        if record.reason is not None:
            span.set_attribute(telemetry.HANDOFF_REASON, record.reason)
        started_s, stages_s = record.started_unix_s, record.stages_s
        if "ticket" in stages_s:
            inside = trace.set_span_in_context(span)
            ticket = self._observer.tracer.start_span(
                "handoff.ticket", inside, start_time=_ns(started_s)
            )
            ticket.end(_ns(started_s + stages_s["ticket"]))
        span.end(_ns(started_s + stages_s["total"]) if "total" in stages_s else None)

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


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
