"""A router's own memory of conversations, and the deployment behind it."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

from ray.serve.exceptions import RayServeException

from deployments.sessions import SharedSessions
from router.conversations import Conversation, LocalSessions, session_key

KEY = session_key(None, None, ("hello",), 2)


class Handle:
    """Stands for the handle of the deployment: `find` and `put` with `.remote`."""

    def __init__(self) -> None:
        self.kept = LocalSessions(max_tokens=1_000, ttl_s=60.0)
        self.asked = 0
        self.broken: Exception | None = None
        self.silent = False

    @property
    def find(self) -> Any:
        return self

    @property
    def put(self) -> Any:
        return _Put(self)

    async def remote(self, key: str) -> Conversation | None:
        self.asked += 1
        if self.broken is not None:
            raise self.broken
        if self.silent:
            await asyncio.Event().wait()
        return self.kept.find(key)


class _Put:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def remote(self, conversation: Conversation) -> None:
        self._handle.kept.put(conversation)


def state(turns: int) -> Conversation:
    return Conversation(key=KEY.key, token_ids=array("i", range(turns)), turns=turns)


def shared(handle: Handle) -> SharedSessions:
    return SharedSessions(LocalSessions(max_tokens=1_000, ttl_s=60.0), handle)


async def test_what_one_router_answered_another_one_knows() -> None:
    handle = Handle()
    shared(handle).put(state(2))
    found = await shared(handle).get(KEY)
    assert found is not None and found.turns == 2


async def test_a_router_that_is_as_far_as_the_request_does_not_ask() -> None:
    handle = Handle()
    router = shared(handle)
    router.put(state(2))
    assert await router.get(KEY) is not None
    await router.get(replace(KEY, answers=0))  # a conversation that begins
    assert handle.asked == 0


async def test_a_router_that_is_behind_asks_and_takes_the_later_state() -> None:
    handle = Handle()
    behind = shared(handle)
    behind.put(state(1))
    handle.kept.put(state(2))
    found = await behind.get(KEY)
    assert found is not None and found.turns == 2 and handle.asked == 1


async def test_a_broken_or_silent_server_costs_the_history_and_not_the_answer() -> None:
    for broken in (True, False):
        handle = Handle()
        handle.broken = RayServeException("gone") if broken else None
        handle.silent = True
        router = shared(handle)
        assert await router.get(KEY) is None
        router.put(state(1))
        found = await router.get(KEY)
        assert found is not None and found.turns == 1
