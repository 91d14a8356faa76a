"""The Serve deployment of the endpoint: HTTP in front, two engines and a mapper behind.

It holds handles and builds the HTTP application in its replica; no KV and no model weights come
here. Importing this module imports neither vLLM nor torch, so a builder may name it by path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.config import CascadeConfig, parse_cascade_config
from cluster.errors import EngineError, KvcascadeError
from cluster.sources import resolve_model
from cluster.telemetry import Metrics, make_tracer, make_tracer_provider
from deployments.decision_log import DecisionLog
from deployments.observer import Observer
from deployments.openai_app import Service, build_http_app
from router.calibration import read_calibration
from router.policies import RoutingState
from router.ports import EngineChunk, EngineRequest
from router.splice import Site

log = logging.getLogger("kvcascade.router")

HEALTH_TIMEOUT_S = 10.0
METRICS_TIMEOUT_S = 5.0


class RayEnginePort:
    """`router.ports.EnginePort` over the handle of an engine deployment."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True)
        self._name = name

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """See `router.ports.EnginePort`."""
        stream = self._stream.generate.remote(request)
        ended = False
        try:
            async for chunk in stream:
                ended = chunk.finish_reason is not None
                yield chunk
        except (RayError, RayServeException, KvcascadeError) as error:
            raise _engine_error(self._name, error) from error
        finally:
            if not ended:
                stream.cancel()

    async def release(self, request_id: str) -> None:
        """See `router.ports.EnginePort`."""
        try:
            await self._handle.release.remote(request_id)
        except (RayError, RayServeException) as error:
            # The engine's lease frees the blocks, or they died with the engine.
            log.warning("%s: release of %s failed: %s", self._name, request_id, error)


def _engine_error(name: str, error: Exception) -> EngineError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, EngineError):
        return EngineError(str(cause))
    return EngineError(f"{name}: {type(cause).__name__}: {str(cause).splitlines()[0]}")


@serve.ingress()
class Router:
    """One replica of the endpoint; named by path, `deployments.router.Router`.

    `config` is a dumped CascadeConfig; the others are handles of the deployments.
    """

    def __init__(self, config: dict[str, Any], small: Any, large: Any, mapper: Any) -> None:
        from deployments.chat_service import ChatService
        from deployments.handoff import RayHandoffPort

        cascade = parse_cascade_config(config)
        self._handles = {cascade.small.name: small, cascade.large.name: large, "mapper": mapper}
        self._traces = make_tracer_provider(cascade.telemetry)
        observer = Observer(Metrics(), make_tracer(self._traces))
        state, self._log = _routing(cascade)
        site = Site(
            small=RayEnginePort(small, cascade.small.name),
            large=RayEnginePort(large, cascade.large.name),
            handoffs=RayHandoffPort(small, mapper, deadline_s=cascade.handoff.deadline_s),
            names={"small": cascade.small.name, "large": cascade.large.name},
            small_context_tokens=cascade.small.max_model_len_tokens,
            min_handoff_tokens=cascade.handoff.min_handoff_tokens,
            hold_back_tokens=cascade.routing.hold_back_tokens,
            log=self._log,
        )
        chat = ChatService(cascade, site, resolve_model(cascade.large.source), observer, state)
        self._service = Service(chat=chat, health=self._health, metrics=node_metrics)

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
        states = await asyncio.gather(*(_state(self._handles[name]) for name in names))
        return dict(zip(names, states, strict=True))


def _routing(cascade: CascadeConfig) -> tuple[RoutingState, DecisionLog | None]:
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
    return state, DecisionLog(path, depends, margins=routing.log_margins)


async def _state(handle: Any) -> str | None:
    """None when a replica answers, else why not."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await handle.describe.remote()
    except TimeoutError:
        return f"no answer within {HEALTH_TIMEOUT_S:.0f} s"
    except (RayError, RayServeException, KvcascadeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


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
