"""The spans of engines and mappers, and that they reach a collector."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.config import TelemetryConfig
from cluster.errors import EngineError, HandoffRefused, TransportError
from cluster.telemetry import make_tracer, make_tracer_provider, traceparent_of
from deployments.messages import HandoffOrder
from deployments.observer import Observer
from deployments.spans import Conversion, Generation
from router.ports import EngineRequest, HandoffStep
from tests.collector import Collector
from tests.fakes import report
from tests.router_bench import Bench

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE_ID}-00f067aa0ba902b7-00"
REQUEST = EngineRequest(
    request_id="r1", prompt_token_ids=(1, 2, 3), max_tokens=8, traceparent=TRACEPARENT
)


class Memory:
    """A tracer whose ended spans can be looked at."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def only(self) -> ReadableSpan:
        (span,) = self.spans
        return span


@pytest.fixture
def memory() -> Memory:
    return Memory()


def delta(tokens: int, reason: str | None = None, cached: int | None = None) -> Any:
    """vLLM's RequestOutput of so many new tokens."""
    answer = SimpleNamespace(token_ids=[0] * tokens, finish_reason=reason)
    return SimpleNamespace(outputs=[answer], num_cached_tokens=cached)


def order(traceparent: str | None = TRACEPARENT) -> HandoffOrder:
    ticket: Any = None  # no span looks at it
    return HandoffOrder(handoff_id="h1", ticket=ticket, covered_tokens=64, traceparent=traceparent)


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return format(span.parent.span_id, "016x")


def test_a_call_of_an_engine_is_a_genai_span_below_its_caller(memory: Memory) -> None:
    with Generation(memory.tracer, "small", REQUEST) as span:
        span.saw(delta(0, cached=2))
        time.sleep(0.02)
        span.saw(delta(1, cached=2))
        span.saw(delta(2, "stop", cached=2))
    found = memory.only
    assert found.name == "text_completion small"
    assert parent_of(found) == TRACEPARENT.split("-")[2]
    attributes = dict(found.attributes or {})
    first_token_s = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert found.start_time is not None and found.end_time is not None
    assert isinstance(first_token_s, float)
    assert 0.02 <= first_token_s <= (found.end_time - found.start_time) / 1e9
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvcascade",
        "gen_ai.request.model": "small",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.response.id": "r1",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
    }


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_a_call_that_is_given_up_is_cancelled_and_no_error(
    memory: Memory, error: BaseException
) -> None:
    with pytest.raises(type(error)), Generation(memory.tracer, "small", REQUEST) as span:
        span.saw(delta(2))
        raise error
    found = memory.only
    assert found.attributes is not None
    assert found.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert found.attributes["gen_ai.usage.output_tokens"] == 2
    assert found.status.status_code is trace.StatusCode.UNSET


def test_an_abort_that_vllm_tells_first_is_cancelled_too(memory: Memory) -> None:
    with pytest.raises(EngineError), Generation(memory.tracer, "small", REQUEST) as span:
        span.saw(delta(0, "abort"))
        raise EngineError("vLLM ended the request with 'abort'")
    found = memory.only
    assert found.attributes is not None
    assert found.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert found.status.status_code is trace.StatusCode.UNSET


def test_a_reader_that_closes_after_the_last_token_changes_nothing(memory: Memory) -> None:
    with pytest.raises(GeneratorExit), Generation(memory.tracer, "small", REQUEST) as span:
        span.saw(delta(1, "length"))
        raise GeneratorExit
    assert memory.only.attributes is not None
    assert memory.only.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_a_failed_call_is_an_error_that_quotes_nothing(memory: Memory) -> None:
    with pytest.raises(EngineError), Generation(memory.tracer, "small", REQUEST):
        raise EngineError("cannot answer 'my secret'")
    found = memory.only
    assert found.status.status_code is trace.StatusCode.ERROR
    assert found.attributes is not None and found.attributes["error.type"] == "EngineError"
    assert "secret" not in found.to_json()


def test_a_conversion_is_a_span_with_the_mappers_own_account(memory: Memory) -> None:
    with Conversion(memory.tracer, "small_to_large", order()) as span:
        span.done(report(64, cold=True))
        time.sleep(0.05)
    found = memory.only
    assert found.name == "convert small_to_large"
    assert parent_of(found) == TRACEPARENT.split("-")[2]
    assert found.attributes == {
        "kvcascade.handoff.id": "h1",
        "kvcascade.handoff.outcome": "mapped",
        "kvcascade.handoff.temperature": "cold",
        "kvcascade.handoff.covered_tokens": 64,
        "kvcascade.handoff.bytes_read": 640,
        "kvcascade.handoff.bytes_written": 1280,
        "kvcascade.handoff.chunks": 1,
        "kvcascade.handoff.queue_s": 0.001,
        "kvcascade.handoff.read_s": 0.001,
        "kvcascade.handoff.map_s": 0.001,
        "kvcascade.handoff.write_s": 0.001,
        "kvcascade.handoff.wait_target_s": 0.001,
    }
    assert found.start_time is not None and found.end_time is not None
    assert found.end_time - found.start_time < 50_000_000


def test_every_chunks_way_through_a_mapper_is_told_by_events(memory: Memory) -> None:
    steps = (
        HandoffStep(stage="read", first_token=0, last_token=32, begin_s=0.001, end_s=0.004),
        HandoffStep(stage="map", first_token=0, last_token=32, begin_s=0.004, end_s=0.009),
    )
    with Conversion(memory.tracer, "small_to_large", order()) as span:
        span.done(replace(report(64), steps=steps))
    found = memory.only
    assert [event.name for event in found.events] == ["read", "map"]
    last = found.events[-1]
    assert found.start_time is not None
    assert last.timestamp - found.start_time == 9_000_000
    assert last.attributes == {
        "kvcascade.step.first_token": 0,
        "kvcascade.step.last_token": 32,
        "kvcascade.step.seconds": pytest.approx(0.005),
    }


@pytest.mark.parametrize(
    ("error", "outcome", "reason", "failed"),
    [
        (TransportError("read_failed", "x"), "failed", "read_failed", True),
        (ValueError("x"), "failed", "ValueError", True),
        (HandoffRefused("abandoned", "x"), "cancelled", "abandoned", False),
        (GeneratorExit(), "cancelled", "cancelled", False),
    ],
)
def test_a_conversion_that_ends_early_says_why(
    memory: Memory, error: BaseException, outcome: str, reason: str, failed: bool
) -> None:
    with pytest.raises(type(error)), Conversion(memory.tracer, "small_to_large", order()):
        raise error
    found = memory.only
    assert found.attributes is not None
    assert found.attributes["kvcascade.handoff.outcome"] == outcome
    assert found.attributes["kvcascade.handoff.reason"] == reason
    assert (found.status.status_code is trace.StatusCode.ERROR) is failed


def test_spans_ignore_what_else_is_traced_around_them(memory: Memory) -> None:
    with memory.tracer.start_as_current_span("of Ray"):
        with Conversion(memory.tracer, "small_to_large", order(None)):
            pass
        with Generation(memory.tracer, "small", REQUEST):
            pass
        watch = Observer(None, memory.tracer).begin("cascade", {})
        watch.end()
    found = {span.name: span for span in memory.spans}
    assert found["convert small_to_large"].parent is None
    assert found["chat cascade"].parent is None
    assert parent_of(found["text_completion small"]) == TRACEPARENT.split("-")[2]


def test_what_a_client_does_not_sample_is_recorded_nowhere(memory: Memory) -> None:
    watch = Observer(None, memory.tracer).begin("cascade", {"traceparent": UNSAMPLED})
    assert watch.traceparent is not None
    assert watch.traceparent.startswith(f"00-{TRACE_ID}-") and watch.traceparent.endswith("-00")
    assert watch.open_handoff(1.0) == watch.traceparent
    with Conversion(memory.tracer, "small_to_large", order(watch.traceparent)) as span:
        span.done(report(64))
    watch.end()
    assert memory.spans == []


def test_without_a_collector_the_clients_trace_is_carried_and_nothing_is_recorded() -> None:
    tracer = make_tracer(None)
    watch = Observer(None, tracer).begin("cascade", {"traceparent": TRACEPARENT})
    assert watch.traceparent == watch.open_handoff(1.0) == TRACEPARENT
    assert Observer(None, tracer).begin("cascade", {}).traceparent is None
    with Generation(tracer, "small", REQUEST) as span:
        span.saw(delta(1, "stop"))
    assert not span._span.is_recording()


async def test_both_engines_and_the_handoff_get_the_trace_context() -> None:
    bench = Bench()
    bench.recorder.traceparent = TRACEPARENT
    await bench.run(escalate_after_tokens=3)
    assert [one.traceparent for one in (*bench.small.requests, *bench.large.requests)] == [
        TRACEPARENT,
        TRACEPARENT,
    ]
    assert bench.port.traceparents == ["handoff-1"]
    (record,) = bench.recorder.handoffs
    assert record.traceparent == "handoff-1"
    assert bench.recorder.opened == [record.started_unix_s]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_what_waits_is_sent_when_a_replica_ends(collector: Collector) -> None:
    telemetry = TelemetryConfig(otlp_endpoint=f"{collector.url}/", service_name="front")
    provider = make_tracer_provider(telemetry, "small")
    assert provider is not None
    with Generation(make_tracer(provider), "small", REQUEST) as span:
        span.saw(delta(2, "stop", cached=0))
    provider.shutdown()
    (found,) = collector.trace(TRACE_ID)
    assert (found.part, found.parent_id, found.failed) == ("small", "00f067aa0ba902b7", False)
    assert found.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert found.attributes["gen_ai.usage.output_tokens"] == 2
    # Whoever traces the process otherwise is not redirected.
    assert trace.get_tracer_provider() is not provider


def test_a_span_names_itself_to_others(memory: Memory) -> None:
    span = memory.tracer.start_span("x")
    context = span.get_span_context()
    flags = f"{context.trace_flags:02x}"
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"
    assert traceparent_of(span) == expected
    assert context.trace_flags.sampled
    assert traceparent_of(trace.INVALID_SPAN) is None
