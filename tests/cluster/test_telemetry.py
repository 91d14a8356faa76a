"""Trace context, where spans go and the names of the metrics."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace

from cluster.config import TelemetryConfig
from cluster.telemetry import (
    STAGES,
    Metrics,
    extract_context,
    make_tracer,
    make_tracer_provider,
    traceparent_of,
)

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_without_a_collector_there_is_no_provider_and_spans_are_not_recorded() -> None:
    provider = make_tracer_provider(TelemetryConfig(), "router")
    assert provider is None
    assert not make_tracer(provider).start_span("x").is_recording()


def test_with_a_collector_spans_say_which_service_and_part_they_are_of() -> None:
    provider = make_tracer_provider(
        TelemetryConfig(otlp_endpoint="http://127.0.0.1:9", service_name="front"), "small"
    )
    assert provider is not None
    assert provider.resource.attributes["service.name"] == "front"
    assert provider.resource.attributes["kvcascade.part"] == "small"
    assert make_tracer(provider).start_span("x").is_recording()


def test_the_callers_trace_goes_on() -> None:
    span = trace.get_current_span(extract_context({"traceparent": TRACEPARENT}))
    assert format(span.get_span_context().trace_id, "032x") == TRACEPARENT.split("-")[1]
    assert traceparent_of(span) == TRACEPARENT


def test_a_broken_traceparent_starts_a_new_trace() -> None:
    context = extract_context({"traceparent": "nonsense"})
    assert traceparent_of(trace.get_current_span(context)) is None


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
