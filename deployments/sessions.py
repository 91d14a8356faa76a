"""Conversations that several routers share: a deployment that keeps them, and the routers' side.

A router asks only when the conversation that it remembers itself is not as far as the request, for
then another router answered in between. It holds token ids, no text and no KV.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.config import parse_cascade_config
from router.conversations import Conversation, LocalSessions, SessionKey

log = logging.getLogger("kvcascade.sessions")

ASK_TIMEOUT_S = 0.5
"""After this a turn begins without its history: everything is then read or mapped again."""


class SessionServer:
    """The one replica that all routers tell."""

    def __init__(self, config: dict[str, Any]) -> None:
        sessions = parse_cascade_config(config).sessions
        self._kept = LocalSessions(max_tokens=sessions.max_tokens, ttl_s=sessions.ttl_s)

    async def find(self, key: str) -> Conversation | None:
        """The conversation under a key."""
        return self._kept.find(key)

    async def put(self, conversation: Conversation) -> None:
        """Keep a conversation, in place of an earlier state of it."""
        self._kept.put(conversation)

    async def describe(self) -> dict[str, Any]:
        """How much is kept."""
        return {"conversations": len(self._kept), "tokens": self._kept.tokens}


class SharedSessions:
    """`router.conversations.Sessions` of one router, behind which `SessionServer` stands."""

    def __init__(self, local: LocalSessions, handle: Any) -> None:
        self._local = local
        self._handle = handle

    async def get(self, key: SessionKey) -> Conversation | None:
        """What this router knows, or the server when that is behind."""
        found = self._local.find(key.key)
        if key.begins:
            return found
        if found is not None and found.turns >= key.answers > 0:
            return found
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                shared: Conversation | None = await self._handle.find.remote(key.key)
        except (RayError, RayServeException, TimeoutError) as error:
            log.warning("a turn begins without its history: %s", type(error).__name__)
            return found
        if shared is None or (found is not None and found.turns >= shared.turns):
            return found
        return shared

    def put(self, conversation: Conversation) -> None:
        """Keep it here and there."""
        self._local.put(conversation)
        self._handle.put.remote(conversation)
