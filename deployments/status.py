"""What Ray Serve and every replica say of a running cascade: `/v1/cascade/status`, `/health`.

It asks and repeats; it judges nothing and knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.errors import KvcascadeError

DESCRIBE_TIMEOUT_S = 10.0

_LATE = f"no answer within {DESCRIBE_TIMEOUT_S:.0f} s"


async def cascade_status(app_name: str, handles: Mapping[str, Any]) -> dict[str, Any]:
    """The application, its deployments and the nodes of the Ray cluster, as plain JSON.

    `handles` are the deployments whose replicas have a `describe`; each running replica's answer
    stands under `described`. A deployment that does not answer has its reason under `failed`.
    """
    asked = list(handles.values())
    states, nodes, *answers = await asyncio.gather(
        asyncio.to_thread(application_status, app_name),
        asyncio.to_thread(_nodes),
        *(_describe(handle) for handle in asked),
    )
    for handle, answer in zip(asked, answers, strict=True):
        states["deployments"].setdefault(handle.deployment_name, {}).update(answer)
    return {**states, "nodes": nodes}


def application_status(app_name: str) -> dict[str, Any]:
    """What Serve's controller says of an application; `NOT_STARTED` when it knows of none."""
    application = serve.status().applications.get(app_name)
    if application is None:
        return {"application": app_name, "status": "NOT_STARTED", "message": "", "deployments": {}}
    return {
        "application": app_name,
        "status": application.status.value,
        "message": application.message,
        "deployments": {
            name: {
                "status": deployment.status.value,
                "message": deployment.message,
                "replicas": {
                    getattr(state, "value", state): number
                    for state, number in deployment.replica_states.items()
                },
            }
            for name, deployment in application.deployments.items()
        },
    }


def _nodes() -> dict[str, str]:
    """Addresses of the living nodes by their ids."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


async def silence_of(handle: Any) -> str | None:
    """None when any replica of a deployment answers, else why not."""
    try:
        async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
            await handle.describe.remote()
    except TimeoutError:
        return _LATE
    except (RayError, RayServeException, KvcascadeError) as error:
        return _line(error)
    return None


async def _describe(handle: Any) -> dict[str, Any]:
    try:
        answers = await handle.broadcast("describe").results_async(
            timeout_s=DESCRIBE_TIMEOUT_S, return_exceptions=True
        )
    except TimeoutError:
        return {"described": [], "failed": _LATE}
    except (RayError, RayServeException) as error:
        return {"described": [], "failed": _line(error)}
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    described = [answer for answer in answers if not isinstance(answer, Exception)]
    return {"described": described, **({"failed": _line(errors[0])} if errors else {})}


def _line(error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
