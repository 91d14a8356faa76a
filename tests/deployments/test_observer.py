"""What the splice records, as spans and as metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.observer import Observer
from router.running import Running
from router.stats import HandoffRecord

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
RECORD = HandoffRecord(
    outcome="mapped",
    reason=None,
    started_unix_s=50.0,
    stages_s={"ticket": 0.1, "read": 0.2, "total": 0.5},
    temperature="warm",
    bytes_read=10,
    bytes_written=20,
)


class ListMetrics:
    """Keeps the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args or kwargs))


def watched(
    record: HandoffRecord, running: Running | None = None
) -> tuple[ListMetrics, dict[str, Any]]:
    exporter, metrics = InMemorySpanExporter(), ListMetrics()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observer = Observer(metrics, provider.get_tracer("test"), running)
    watch = observer.begin("cascade", {"traceparent": TRACEPARENT})
    watch.route(model="big", reason="low_margin")
    watch.handoff(replace(record, traceparent=watch.open_handoff(record.started_unix_s)))
    watch.answered(input_tokens=7, output_tokens=9)
    watch.end()
    watch.end()
    return metrics, {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_genai_span_in_the_callers_trace() -> None:
    _, spans = watched(RECORD)
    span = spans["chat cascade"]
    assert span.kind is trace.SpanKind.SERVER
    assert format(span.parent.span_id, "016x") == TRACEPARENT.split("-")[2]
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvcascade",
        "gen_ai.request.model": "cascade",
        "gen_ai.response.model": "big",
        "kvcascade.decision.reason": "low_margin",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 9,
    }


def test_a_handoff_is_a_child_with_the_routers_times_and_no_others() -> None:
    _, spans = watched(RECORD)
    root, handoff, ticket = spans["chat cascade"], spans["handoff"], spans["handoff.ticket"]
    assert set(spans) == {"chat cascade", "handoff", "handoff.ticket"}
    assert handoff.parent.span_id == root.context.span_id
    assert ticket.parent.span_id == handoff.context.span_id
    assert (handoff.start_time, handoff.end_time) == (50_000_000_000, 50_500_000_000)
    assert (ticket.start_time, ticket.end_time) == (50_000_000_000, 50_100_000_000)
    assert dict(handoff.attributes) == {"kvcascade.handoff.outcome": "mapped"}


def test_two_handoffs_at_once_keep_their_spans_apart() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    watch = Observer(None, provider.get_tracer("test")).begin("cascade", {})
    first, second = watch.open_handoff(1.0), watch.open_handoff(2.0)
    failed = replace(RECORD, outcome="recompute", reason="expired", started_unix_s=2.0)
    watch.handoff(replace(failed, traceparent=second))
    watch.handoff(replace(RECORD, started_unix_s=1.0, traceparent=first))
    ended = [span for span in exporter.get_finished_spans() if span.name == "handoff"]
    assert [span.start_time for span in ended] == [2_000_000_000, 1_000_000_000]
    assert ended[0].attributes["kvcascade.handoff.reason"] == "expired"
    assert format(ended[1].context.span_id, "016x") == first.split("-")[2]


def test_metrics_count_the_route_the_handoff_and_one_request_in_flight() -> None:
    metrics, _ = watched(RECORD)
    assert metrics.calls == [
        ("set_in_flight", (1,)),
        ("count_route", {"model": "big", "reason": "low_margin"}),
        ("count_handoff", {"outcome": "mapped", "reason": None}),
        ("count_bytes", {"read": 10, "written": 20}),
        ("observe_stages", (RECORD.stages_s,)),
        ("set_in_flight", (0,)),
    ]


def test_a_cancelled_escalation_adds_no_times_and_says_so_in_its_span() -> None:
    cancelled = HandoffRecord(outcome="cancelled", reason=None, started_unix_s=0, stages_s={})
    metrics, spans = watched(cancelled)
    assert "observe_stages" not in dict(metrics.calls)
    assert spans["handoff"].attributes["kvcascade.handoff.outcome"] == "cancelled"


def test_running_totals_are_kept_and_published_as_gauges() -> None:
    running = Running(large="big", policy="margin", target_fraction=0.3)
    running.route(model="small", reason="confident")
    metrics, _ = watched(RECORD, running)
    assert ("set_fractions", {"realised": 0.5, "target": 0.3}) in metrics.calls
    assert running.snapshot()["handoffs"]["mapped"] == 1
