"""What is known of a running cascade at one moment, and whether it is healthy.

`overview` asks the endpoint, and Ray when an address is given; `cluster.status_view` shows the
result. It does not know how anything is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import EngineError
from cluster.local import root_cause
from cluster.status_endpoint import Endpoint

_BROKEN = ("NOT_STARTED", "DEPLOY_FAILED", "UNHEALTHY", "DELETING")
"""States of Ray Serve that no waiting mends. While one scales or updates, requests are served."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What the sources said; None: not asked, or the endpoint has no such route.

    `locked`: it has, but not without a key. `health` maps parts to `ok` or what is wrong; `serve`
    is the answer of `/v1/cascade/status`, or the part of it that Ray alone knows; `stats` that of
    `/v1/cascade/stats`.
    """

    url: str
    health: Mapping[str, str] | None
    serve: Mapping[str, Any] | None
    stats: Mapping[str, Any] | None
    locked: bool = False

    @property
    def problems(self) -> list[str]:
        """One line for everything that is wrong, in no need of waiting; empty when healthy."""
        found = []
        if self.health is None:
            found.append(f"nothing answers at {self.url}")
        else:
            found += [f"{part}: {text}" for part, text in self.health.items() if text != "ok"]
        if self.serve is None:
            return found
        if self.serve["status"] in _BROKEN:
            found.append(_line("application", self.serve["status"], self.serve["message"]))
        for name, deployment in self.serve["deployments"].items():
            state = deployment.get("status", "unknown")
            running = deployment.get("replicas", {}).get("RUNNING", 0)
            if state in _BROKEN:
                found.append(_line(name, state, deployment["message"]))
            elif not running:
                found.append(_line(name, "no running replica", deployment.get("message", "")))
            if "failed" in deployment:
                found.append(f"{name}: {deployment['failed']}")
        return found

    def as_json(self) -> dict[str, Any]:
        """The whole as plain JSON."""
        return {
            "url": self.url,
            "healthy": not self.problems,
            "problems": self.problems,
            "locked": self.locked,
            "health": self.health,
            "serve": self.serve,
            "stats": self.stats,
        }


def _line(name: str, state: str, message: str) -> str:
    cause = root_cause(message)
    return f"{name}: {state}" + (f", {cause}" if cause else "")


def overview(
    url: str, *, api_key: str | None = None, ray_address: str | None = None, app: str = "cascade"
) -> Overview:
    """Ask everything once.

    Raises EngineError when nothing answers at `url` and no Ray address is given, RequestError when
    the endpoint refuses the key, ConfigError when no Ray cluster is at `ray_address`.
    """
    health = stats = serve = None
    with Endpoint(url, api_key=api_key) as endpoint:
        try:
            health = endpoint.health()
            serve = endpoint.optional_json("/v1/cascade/status")
            stats = endpoint.optional_json("/v1/cascade/stats")
        except EngineError:
            if ray_address is None:
                raise
    if ray_address is not None and serve is None:
        from cluster.local import start_local_ray
        from deployments.status import application_status

        start_local_ray(address=ray_address)
        serve = application_status(app)
    return Overview(url=url, health=health, serve=serve, stats=stats, locked=endpoint.locked)
