"""The Serve deployment of the endpoint: HTTP in front, two engines and a mapper behind.

It holds handles and builds the HTTP application in its replica; no KV and no model weights come
here. Importing this module imports neither vLLM nor torch, so a builder may name it by path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.config import CascadeConfig, RoutingConfig, parse_cascade_config
from cluster.errors import EngineError
from cluster.sources import resolve_model
from cluster.telemetry import Metrics, make_tracer, make_tracer_provider
from deployments.api_keys import load_api_keys
from deployments.decision_log import DecisionLog
from deployments.observer import Observer
from deployments.openai_app import Service, build_http_app
from deployments.replica_call import call_replica
from deployments.sessions import SharedSessions
from deployments.status import cascade_status, silence_of
from router.calibration import read_calibration
from router.conversations import DriftLimits, LocalSessions
from router.job import Site
from router.policies import RoutingState
from router.ports import EngineChunk, EnginePort, EngineRequest
from router.running import Running
from router.shadow import Shadow

log = logging.getLogger("kvcascade.router")

METRICS_TIMEOUT_S = 5.0

CHUNK_TRANSPORT = {
    "_by_reference": False,
    "request_serialization": "pickle",
    "response_serialization": "pickle",
}
"""Options of a Serve handle (Ray 2.60, `DeploymentHandle.options`); the first is not public."""


class RayEnginePort:
    """`router.ports.EnginePort` over the handle of an engine deployment."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        # From replica to replica by gRPC: through Ray's objects a chunk costs twice the CPU time.
        self._stream = handle.options(stream=True, **CHUNK_TRANSPORT)
        self._name = name

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See `router.ports.EnginePort`."""
        stream = call_replica(self._stream, "generate", request.request_id, request)
        ended = False
        try:
            async for chunk in stream:
                ended = chunk.finish_reason is not None
                yield chunk
        except asyncio.CancelledError as error:
            # By gRPC comes also the engine's own, as when its replica is shut down.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise EngineError(f"{self._name}: the engine gave the request up") from error
        except Exception as error:
            raise _engine_error(self._name, error) from error
        finally:
            if not ended:
                stream.cancel()

    async def release(self, request_id: str) -> None:
        """See `router.ports.EnginePort`."""
        try:
            await call_replica(self._handle, "release", request_id, request_id)
        except (RayError, RayServeException) as error:
            # The engine's lease frees the blocks, or they died with the engine.
            log.warning("%s: release of %s failed: %s", self._name, request_id, error)


def _engine_error(name: str, error: Exception) -> EngineError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, EngineError):
        return EngineError(str(cause))
    return EngineError(f"{name}: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}")


@serve.ingress()
class Router:
    """One replica of the endpoint; named by path, `deployments.router.Router`.

    `config` is a dumped CascadeConfig; the others are handles of the deployments, of which
    `mapper_back` and `sessions` are there if the config asks for them.
    """

    def __init__(
        self,
        config: dict[str, Any],
        small: Any,
        large: Any,
        mapper: Any,
        mapper_back: Any = None,
        sessions: Any = None,
    ) -> None:
        from deployments.chat_service import ChatService
        from deployments.handoff import RayHandoffPort

        cascade = parse_cascade_config(config)
        self._handles = {cascade.small.name: small, cascade.large.name: large, "mapper": mapper}
        optional = {"mapper_back": mapper_back, "sessions": sessions}
        self._handles |= {name: handle for name, handle in optional.items() if handle is not None}
        self._traces = make_tracer_provider(cascade.telemetry, "router")
        metrics, routing = Metrics(), cascade.routing
        state, self._log = _routing(cascade, metrics.count_log_dropped)
        running = Running(
            large=cascade.large.name,
            policy=routing.policy,
            target_fraction=state.target_fraction(routing),
        )
        observer = self._observer = Observer(metrics, make_tracer(self._traces), running)
        large_port = RayEnginePort(large, cascade.large.name)
        deadline_s, kept = cascade.handoff.deadline_s, cascade.sessions
        local = LocalSessions(max_tokens=kept.max_tokens, ttl_s=kept.ttl_s)
        site = Site(
            small=RayEnginePort(small, cascade.small.name),
            large=large_port,
            handoffs=RayHandoffPort(small, mapper, deadline_s=deadline_s),
            handoffs_back=None
            if mapper_back is None
            else RayHandoffPort(large, mapper_back, deadline_s=deadline_s),
            names={"small": cascade.small.name, "large": cascade.large.name},
            small_context_tokens=cascade.small.max_model_len_tokens,
            min_handoff_tokens=cascade.handoff.min_handoff_tokens,
            hold_back_tokens=cascade.routing.hold_back_tokens,
            on_escalate=routing.on_escalate,
            sessions=local if sessions is None else SharedSessions(local, sessions),
            drift_limits=DriftLimits(
                handoffs=kept.max_mapped_handoffs, fraction=kept.max_mapped_fraction
            ),
            log=self._log,
            shadow=_shadow(routing, large_port, metrics),
        )
        chat = ChatService(cascade, site, resolve_model(cascade.large.source), observer, state)
        self._service = Service(
            chat=chat,
            health=self._health,
            metrics=node_metrics,
            stats=lambda: dict(running.snapshot()),
            status=self._status,
            keys=load_api_keys(cascade.router.api_keys_file, cascade.router.api_keys_env),
            max_requests=cascade.router.max_requests,
            max_body_bytes=cascade.router.max_body_bytes,
        )

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve calls this after the constructor."""
        return build_http_app(self._service)

    def __del__(self) -> None:
        if traces := getattr(self, "_traces", None):
            traces.shutdown()
        if log_ := getattr(self, "_log", None):
            log_.close()

    async def _health(self) -> dict[str, str | None]:
        names = list(self._handles)
        states = await asyncio.gather(*(silence_of(self._handles[name]) for name in names))
        return dict(zip(names, states, strict=True))

    async def check_health(self) -> None:
        """Called by Serve every ten seconds; renews the gauges."""
        self._observer.renew()

    async def _status(self) -> dict[str, Any]:
        return await cascade_status(serve.get_replica_context().app_name, self._handles)


def _shadow(routing: RoutingConfig, large: EnginePort, metrics: Metrics) -> Shadow | None:
    if routing.shadow_fraction is None:
        return None
    return Shadow(
        large,
        fraction=routing.shadow_fraction,
        min_agreement=routing.shadow_min_agreement,
        count=metrics.count_shadow,
    )


def _routing(
    cascade: CascadeConfig, on_drop: Callable[[], None] | None = None
) -> tuple[RoutingState, DecisionLog | None]:
    """What requests share, and the decision log; ConfigError for a stale calibration.

    Only a calibration or a log needs the files of both models on the router's node.
    """
    routing = cascade.routing
    if routing.calibration is None and routing.log_file is None:
        return RoutingState.of(routing, None), None
    from cluster.dependencies import running_dependencies

    depends = running_dependencies(cascade)
    calibration = None
    if routing.calibration is not None:
        calibration = read_calibration(Path(routing.calibration).expanduser())
        calibration.check_dependencies(depends)
    state = RoutingState.of(routing, calibration)
    if routing.log_file is None:
        return state, None
    path = Path(routing.log_file).expanduser()
    return state, DecisionLog(path, depends, margins=routing.log_margins, on_drop=on_drop)


async def node_metrics() -> str:
    """What this Ray node exports for Prometheus: the metrics of all its processes."""
    import httpx

    here = ray.get_runtime_context().get_node_id()
    nodes = await asyncio.to_thread(ray.nodes)
    node = next(node for node in nodes if node["NodeID"] == here)
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    async with httpx.AsyncClient(timeout=METRICS_TIMEOUT_S, trust_env=False) as client:
        response = await client.get(url)
        response.raise_for_status()
    return response.text
