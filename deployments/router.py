"""The Serve deployment of the endpoint: HTTP in front, two engines and a mapper behind.

It holds handles and builds the HTTP application in its replica; no KV and no model weights come
here. Importing this module imports neither vLLM nor torch, so a builder may name it by path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.config import parse_cascade_config
from cluster.errors import EngineError
from cluster.sources import resolve_model
from cluster.telemetry import Metrics, make_tracer, make_tracer_provider
from deployments.api_keys import load_api_keys
from deployments.live_routing import LiveRouting, Routing
from deployments.observer import Observer
from deployments.openai_app import Service, build_http_app
from deployments.replica_call import call_replica
from deployments.sessions import SharedSessions
from deployments.status import cascade_status, silence_of
from router.conversations import DriftLimits, LocalSessions
from router.job import Site
from router.ports import EngineChunk, EngineRequest
from router.running import Running

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
        metrics = Metrics()
        large_port = RayEnginePort(large, cascade.large.name)
        live = self._routing = LiveRouting(
            cascade,
            large_port,
            count_shadow=metrics.count_shadow,
            count_dropped=metrics.count_log_dropped,
            changed=self._follow,
        )
        running = self._running = Running(
            large=cascade.large.name,
            policy=live.now.config.policy,
            target_fraction=live.now.target_fraction,
        )
        self._serves = False
        observer = self._observer = Observer(metrics, make_tracer(self._traces), running)
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
            sessions=local if sessions is None else SharedSessions(local, sessions),
            drift_limits=DriftLimits(
                handoffs=kept.max_mapped_handoffs, fraction=kept.max_mapped_fraction
            ),
        )
        chat = ChatService(cascade, site, resolve_model(cascade.large.source), observer, live)
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
        if routing := getattr(self, "_routing", None):
            routing.close()

    async def reconfigure(self, user_config: Any, rank: Any) -> None:
        """Serve calls it once when the replica begins, and when `user_config` or `rank` changes.

        Only with `rank` among the parameters it also calls when there is no `user_config` (Ray
        2.60, `UserCallableWrapper.call_reconfigure`). Raises ConfigError only at the beginning.
        """
        change = self._routing.offer if self._serves else self._routing.apply
        self._running.refused_routing = await asyncio.to_thread(change, user_config)
        self._serves = True

    def _follow(self, routing: Routing) -> None:
        self._running.follow(policy=routing.config.policy, target_fraction=routing.target_fraction)

    async def _health(self) -> dict[str, str | None]:
        names = list(self._handles)
        states = await asyncio.gather(*(silence_of(self._handles[name]) for name in names))
        return dict(zip(names, states, strict=True))

    async def check_health(self) -> None:
        """Called by Serve every ten seconds; renews the gauges."""
        self._observer.renew()

    async def _status(self) -> dict[str, Any]:
        return await cascade_status(serve.get_replica_context().app_name, self._handles)


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
