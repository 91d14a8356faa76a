"""Traces and metrics: their names and where they go.

Spans follow OpenTelemetry's GenAI conventions and leave over OTLP/HTTP when a collector is
configured; `deployments/spans.py` says which there are. Metrics go through Ray to the node's
Prometheus endpoint, which puts `ray_` before every name. It knows nothing of requests or policies:
callers bring plain numbers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PART = "kvcascade.part"
"""Of a resource: the deployment whose replica made the span."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_TOKEN_S = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
DECISION_REASON = "kvcascade.decision.reason"
HANDOFF_ID = "kvcascade.handoff.id"
HANDOFF_OUTCOME = "kvcascade.handoff.outcome"
HANDOFF_REASON = "kvcascade.handoff.reason"
HANDOFF_TEMPERATURE = "kvcascade.handoff.temperature"
HANDOFF_COVERED_TOKENS = "kvcascade.handoff.covered_tokens"
HANDOFF_BYTES_READ = "kvcascade.handoff.bytes_read"
HANDOFF_BYTES_WRITTEN = "kvcascade.handoff.bytes_written"
HANDOFF_CHUNKS = "kvcascade.handoff.chunks"
HANDOFF_STAGE_S = "kvcascade.handoff.{stage}_s"
STEP_FIRST_TOKEN = "kvcascade.step.first_token"
STEP_LAST_TOKEN = "kvcascade.step.last_token"
STEP_S = "kvcascade.step.seconds"

STAGES = ("ticket", "queue", "read", "map", "write", "wait_target", "admit", "total")
"""Values of the label `stage`. `total` is the router's clock from the decision to the large
model's first token, `admit` what is left of it after ticket and conversion."""

HANDOFF_BOUNDARIES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def make_tracer_provider(telemetry: TelemetryConfig, part: str) -> TracerProvider | None:
    """A provider that exports to the configured collector, or None when there is none.

    `part` names the deployment in what is exported, beside host and process id.

    The caller owns it: `shutdown()` sends what is still waiting. The process-wide provider is
    left alone, so Ray's and vLLM's own tracing are not redirected.
    """
    if telemetry.otlp_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource: dict[str, str | int] = {
        "service.name": telemetry.service_name,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        PART: part,
    }
    provider = TracerProvider(resource=Resource.create(resource))
    endpoint = telemetry.otlp_endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def make_tracer(provider: TracerProvider | None) -> trace.Tracer:
    """The project's tracer; without a provider its spans go nowhere and cost nothing."""
    return trace.NoOpTracer() if provider is None else provider.get_tracer("kvcascade")


def extract_context(headers: Mapping[str, str]) -> Context:
    """The caller's W3C trace context in `headers` (lower-case names); empty when there is none.

    Never the context of whatever Ray or vLLM may be tracing around the call.
    """
    return TraceContextTextMapPropagator().extract(headers, Context())


def context_of(traceparent: str | None) -> Context:
    """The context that a `traceparent` names; empty for None."""
    return Context() if traceparent is None else extract_context({"traceparent": traceparent})


def traceparent_of(span: trace.Span) -> str | None:
    """The W3C `traceparent` that makes others children of `span`; None when it is in no trace."""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent")


class Metrics:
    """The project's Prometheus metrics; needs a Ray process."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        self._handoff_seconds = Histogram(
            "kvcascade_handoff_seconds",
            description="Seconds of each stage of a handoff; stages overlap.",
            boundaries=list(HANDOFF_BOUNDARIES_S),
            tag_keys=("stage", "path", "temperature"),
        )
        self._handoff_bytes = Counter(
            "kvcascade_handoff_bytes_total",
            description="KV bytes that mappers read from small and wrote to large engines.",
            tag_keys=("direction",),
        )
        self._handoffs = Counter(
            "kvcascade_handoff_total",
            description="Escalations by outcome; the reason says why KV was not handed over.",
            tag_keys=("outcome", "reason"),
        )
        self._routes = Counter(
            "kvcascade_route_total",
            description="Answers by the model that finished them and the deciding reason.",
            tag_keys=("model", "reason"),
        )
        self._in_flight = Gauge(
            "kvcascade_requests_in_flight",
            description="Requests that this router works on.",
        )
        self._realised = Gauge(
            "kvcascade_realised_fraction",
            description="Part of the last answers that the large model ended, where a policy "
            "decided.",
        )
        self._target = Gauge(
            "kvcascade_target_fraction",
            description="Part of the answers that the router is to escalate.",
        )
        self._saved = Gauge(
            "kvcascade_saved_prefill_seconds",
            description="Seconds that the last mapped handoffs saved over reading again, by the "
            "router's own prediction.",
        )
        self._log_dropped = Counter(
            "kvcascade_log_dropped_total",
            description="Decisions that are not in the log because the disk was too slow.",
        )
        self._shadows = Counter(
            "kvcascade_shadow_total",
            description="Answers of the small model that the large one read afterwards.",
            tag_keys=("verdict",),
        )

    def observe_stages(
        self, stages_s: Mapping[str, float], *, path: str, temperature: str | None
    ) -> None:
        """Add one escalation's stage durations."""
        tags = {"path": path, "temperature": temperature or "none"}
        for stage, duration_s in stages_s.items():
            self._handoff_seconds.observe(duration_s, tags={**tags, "stage": stage})

    def count_bytes(self, *, read: int, written: int) -> None:
        """Add the bytes that one handoff moved."""
        for direction, number in (("read", read), ("written", written)):
            if number > 0:
                self._handoff_bytes.inc(number, tags={"direction": direction})

    def count_handoff(self, *, outcome: str, reason: str | None) -> None:
        """Count one escalation."""
        self._handoffs.inc(tags={"outcome": outcome, "reason": reason or "none"})

    def count_route(self, *, model: str, reason: str) -> None:
        """Count one settled answer."""
        self._routes.inc(tags={"model": model, "reason": reason})

    def set_in_flight(self, number: int) -> None:
        """State how many requests are being worked on."""
        self._in_flight.set(number)

    def count_shadow(self, verdict: str) -> None:
        """Count one answer that the large model was to read afterwards."""
        self._shadows.inc(tags={"verdict": verdict})

    def set_fractions(self, *, realised: float | None, target: float | None) -> None:
        """State what is escalated and what should be; None leaves a gauge as it is."""
        if realised is not None:
            self._realised.set(realised)
        if target is not None:
            self._target.set(target)

    def set_saved_prefill(self, seconds: float) -> None:
        """State what the handoffs of the window saved."""
        self._saved.set(seconds)

    def count_log_dropped(self) -> None:
        """Count one decision that is not in the log."""
        self._log_dropped.inc()


class EngineMetrics:
    """What an engine replica exports of its KV pool; needs a Ray process."""

    def __init__(self) -> None:
        from ray.util.metrics import Gauge

        self._blocks = Gauge(
            "kvcascade_pool_blocks",
            description="KV blocks of an engine by state; free ones may hold a prefix cache.",
            tag_keys=("model", "state"),
        )

    def set_pool(self, model: str, *, total: int, free: int, pinned: int, loading: int) -> None:
        """State what the pool is used for, in blocks. Pinned and loading ones are not free."""
        states = {"total": total, "free": free, "pinned": pinned, "loading": loading}
        for state, blocks in states.items():
            self._blocks.set(blocks, tags={"model": model, "state": state})


class MapperMetrics:
    """What a mapper replica exports of its work; needs a Ray process."""

    def __init__(self) -> None:
        from ray.util.metrics import Gauge

        self._running = Gauge(
            "kvcascade_mapper_running_handoffs",
            description="Handoffs that a mapper has accepted and not ended.",
            tag_keys=("direction",),
        )
        self._pool = Gauge(
            "kvcascade_mapper_pool_bytes",
            description="Bytes of a mapper's pool that handoffs hold.",
            tag_keys=("direction",),
        )

    def set_work(self, direction: str, *, running: int, pool_bytes: int) -> None:
        """State what a replica works on; `direction` is `small_to_large` or `large_to_small`."""
        self._running.set(running, tags={"direction": direction})
        self._pool.set(pool_bytes, tags={"direction": direction})
