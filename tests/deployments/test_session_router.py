"""Where calls about a session go, without Serve."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from deployments.session_router import SessionRouter

OLD, NEW = (ReplicaID(name, DeploymentID(name="small")) for name in ("old", "new"))


class Placed:
    """A router whose consistent hashing gives what `now` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def choose(_: Any, request: Any, *, is_retry: bool = False) -> Any:
            return self.now

        monkeypatch.setattr(ConsistentHashRouter, "_choose_replica_for_request", choose)
        self.now: Any = OLD
        self._router = SessionRouter.__new__(SessionRouter)

    async def of(self, method: str, session: str = "s", *, is_retry: bool = False) -> Any:
        metadata = RequestMetadata(
            request_id="r", internal_request_id="i", call_method=method, session_id=session
        )
        request = PendingRequest(args=[], kwargs={}, metadata=metadata)
        return await self._router._choose_replica_for_request(request, is_retry=is_retry)


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placed:
    return Placed(monkeypatch)


async def test_a_ticket_is_asked_of_the_replica_that_is_being_replaced(placed: Placed) -> None:
    assert await placed.of("generate") is OLD
    placed.now = NEW
    assert await placed.of("take_ticket") is OLD
    assert await placed.of("release") is OLD
    # Other sessions and new answers go where they hash to now.
    assert await placed.of("take_ticket", "another") is NEW
    assert await placed.of("generate") is NEW
    assert await placed.of("take_ticket") is NEW


async def test_a_second_try_goes_where_the_session_hashes_to(placed: Placed) -> None:
    await placed.of("generate")
    placed.now = NEW
    assert await placed.of("take_ticket", is_retry=True) is NEW


async def test_the_sessions_that_began_last_are_remembered(
    placed: Placed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionRouter, "remembered", 2)
    for session in ("a", "b", "a", "c"):
        await placed.of("generate", session)
    placed.now = NEW
    assert [await placed.of("take_ticket", session) for session in "abc"] == [OLD, NEW, OLD]
