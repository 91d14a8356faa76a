"""The answer of `/v1/cascade/status`, with Serve's controller and the handles faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus, DeploymentStatus

from deployments.status import application_status, cascade_status


class Handle:
    """Its replicas answer `answers`, or the whole broadcast raises `error`."""

    def __init__(self, name: str, *answers: Any, error: Exception | None = None) -> None:
        self.deployment_name = name
        self._answers = list(answers)
        self._error = error

    def broadcast(self, method: str) -> Handle:
        assert method == "describe"
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0 and return_exceptions
        if self._error is not None:
            raise self._error
        return self._answers


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def deployment(**replicas: int) -> Any:
        return SimpleNamespace(
            status=DeploymentStatus.HEALTHY, message="", replica_states=dict(replicas)
        )

    application = SimpleNamespace(
        status=ApplicationStatus.RUNNING,
        message="",
        deployments={"router": deployment(RUNNING=1), "mapper": deployment(RUNNING=2, STARTING=1)},
    )
    state = SimpleNamespace(applications={"cascade": application})
    monkeypatch.setattr(serve, "status", lambda: state)
    nodes = [("n1", "10.0.0.1", True), ("n2", "10.0.0.2", False)]
    monkeypatch.setattr(
        ray,
        "nodes",
        lambda: [{"NodeID": i, "NodeManagerAddress": a, "Alive": alive} for i, a, alive in nodes],
    )


async def test_every_replica_is_described_beside_what_serve_says() -> None:
    found = await cascade_status("cascade", {"m": Handle("mapper", {"running": 1}, {"running": 0})})
    assert found["status"] == "RUNNING"
    assert found["nodes"] == {"n1": "10.0.0.1"}
    assert found["deployments"]["mapper"] == {
        "status": "HEALTHY",
        "message": "",
        "replicas": {"RUNNING": 2, "STARTING": 1},
        "described": [{"running": 1}, {"running": 0}],
    }
    assert "described" not in found["deployments"]["router"]


async def test_a_dead_replica_does_not_hide_the_others() -> None:
    handle = Handle("mapper", {"running": 1}, RayActorError())
    found = (await cascade_status("cascade", {"m": handle}))["deployments"]["mapper"]
    assert found["described"] == [{"running": 1}]
    assert found["failed"].startswith("RayActorError: ")


async def test_a_silent_deployment_has_a_reason() -> None:
    handle = Handle("mapper", error=TimeoutError())
    found = (await cascade_status("cascade", {"m": handle}))["deployments"]["mapper"]
    assert found["described"] == [] and found["failed"] == "no answer within 10 s"


def test_an_application_that_serve_does_not_know_has_not_started() -> None:
    assert application_status("other")["status"] == "NOT_STARTED"
