"""Span layout, trace context and the names of the metrics."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.config import TelemetryConfig
from cluster.telemetry import (
    HANDOFF_REASON,
    STAGES,
    Metrics,
    emit_handoff_spans,
    extract_context,
    make_tracer,
    make_tracer_provider,
    traceparent_of,
)

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_without_a_collector_there_is_no_provider_and_spans_are_not_recorded() -> None:
    provider = make_tracer_provider(TelemetryConfig())
    assert provider is None
    assert not make_tracer(provider).start_span("x").is_recording()


def test_with_a_collector_spans_carry_the_service_name() -> None:
    provider = make_tracer_provider(
        TelemetryConfig(otlp_endpoint="http://127.0.0.1:9", service_name="front")
    )
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "front"
    assert make_tracer(provider).start_span("x").is_recording()


def test_the_callers_trace_goes_on() -> None:
    context = extract_context({"traceparent": TRACEPARENT})
    span = trace.get_current_span(context).get_span_context()
    assert format(span.trace_id, "032x") == TRACEPARENT.split("-")[1]
    assert traceparent_of(context) == TRACEPARENT


def test_a_broken_traceparent_starts_a_new_trace() -> None:
    assert traceparent_of(extract_context({"traceparent": "nonsense"})) is None


def emitted(stages_s: dict[str, float]) -> dict[str, tuple[float, float]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    emit_handoff_spans(
        provider.get_tracer("test"),
        extract_context({"traceparent": TRACEPARENT}),
        started_unix_s=100.0,
        stages_s=stages_s,
        attributes={HANDOFF_REASON: "none"},
    )
    spans = exporter.get_finished_spans()
    root = next((span for span in spans if span.name == "handoff"), None)
    for span in spans:
        assert span.parent is not None and root is not None
        expected = root.context.span_id if span is not root else int("00f067aa0ba902b7", 16)
        assert span.parent.span_id == expected
    return {
        span.name: (span.start_time / 1e9 - 100.0, span.end_time / 1e9 - 100.0) for span in spans
    }


def test_stages_become_children_with_their_own_times() -> None:
    spans = emitted({"ticket": 0.1, "queue": 0.2, "read": 0.3, "admit": 0.25, "total": 1.0})
    expected = {
        "handoff": (0.0, 1.0),
        "handoff.ticket": (0.0, 0.1),
        "handoff.queue": (0.1, 0.3),
        "handoff.read": (0.3, 0.6),
        "handoff.admit": (0.75, 1.0),
    }
    assert set(spans) == set(expected)
    for name, (start, end) in expected.items():
        assert spans[name] == (pytest.approx(start, abs=1e-6), pytest.approx(end, abs=1e-6))


def test_an_escalation_without_a_first_token_has_no_span() -> None:
    assert emitted({"ticket": 0.1}) == {}


def test_metrics_have_the_published_names_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {}

    class Fake:
        def __init__(self, name: str, **kwargs: Any) -> None:
            self.name, self.tag_keys = name, kwargs.get("tag_keys", ())

        def record(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) == set(self.tag_keys)
            seen.setdefault(self.name, []).append((value, *(tags or {}).values()))

        inc = observe = set = record

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(f"ray.util.metrics.{kind}", Fake)
    metrics = Metrics()
    metrics.observe_stages(dict.fromkeys(STAGES, 0.5), path="mapped", temperature="warm")
    metrics.count_bytes(read=10, written=0)
    metrics.count_handoff(outcome="mapped", reason=None)
    metrics.count_route(model="large", reason="low_margin")
    metrics.set_in_flight(3)
    metrics.set_fractions(realised=0.25, target=None)
    metrics.set_fractions(realised=None, target=0.5)
    metrics.count_log_dropped()
    metrics.count_shadow("failed")
    assert len(seen.pop("kvcascade_handoff_seconds")) == len(STAGES)
    assert seen == {
        "kvcascade_handoff_bytes_total": [(10, "read")],
        "kvcascade_handoff_total": [(1.0, "mapped", "none")],
        "kvcascade_route_total": [(1.0, "large", "low_margin")],
        "kvcascade_requests_in_flight": [(3,)],
        "kvcascade_realised_fraction": [(0.25,)],
        "kvcascade_target_fraction": [(0.5,)],
        "kvcascade_log_dropped_total": [(1.0,)],
        "kvcascade_shadow_total": [(1.0, "failed")],
    }
