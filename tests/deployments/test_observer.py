"""What the splice records, as spans and as metrics."""

from __future__ import annotations

from typing import Any

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
    observer = Observer(metrics, provider.get_tracer("test"), running)  # type: ignore[arg-type]
    watch = observer.begin("cascade", {"traceparent": TRACEPARENT})
    watch.route(model="big", reason="low_margin")
    watch.handoff(record)
    watch.answered(input_tokens=7, output_tokens=9)
    watch.end()
    watch.end()
    return metrics, {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_genai_span_in_the_callers_trace() -> None:
    _, spans = watched(RECORD)
    span = spans["chat cascade"]
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


def test_a_handoff_is_a_child_with_its_stages() -> None:
    _, spans = watched(RECORD)
    assert spans["handoff"].parent.span_id == spans["chat cascade"].context.span_id
    assert spans["handoff.read"].parent.span_id == spans["handoff"].context.span_id
    assert spans["handoff"].attributes["kvcascade.handoff.bytes_written"] == 20


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


def test_a_cancelled_escalation_adds_no_times() -> None:
    cancelled = HandoffRecord(outcome="cancelled", reason=None, started_unix_s=0, stages_s={})
    metrics, spans = watched(cancelled)
    assert "observe_stages" not in dict(metrics.calls)
    assert "handoff" not in spans


def test_running_totals_are_kept_and_published_as_gauges() -> None:
    running = Running(large="big", policy="margin", target_fraction=0.3)
    running.route(model="small", reason="confident")
    metrics, _ = watched(RECORD, running)
    assert ("set_fractions", {"realised": 0.5, "target": 0.3}) in metrics.calls
    assert running.snapshot()["handoffs"]["mapped"] == 1
