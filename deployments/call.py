"""One HTTP request on its way through the front end. It knows neither vLLM nor HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.live_routing import Routing
from router.api import CascadeOptions
from router.conversations import SessionKey
from router.policy import Policy
from router.splice import Cascade
from router.stats import Recorder


@dataclass(kw_only=True)
class Call:
    """How one request wants to be routed, and its answers by choice index.

    `routing` is what the deployment followed when it came.
    `tenant` is whose API key it came with, None without keys. `session` is the
    conversation that it is a turn of, if it is of one. Every prompt has `n` answers.
    """

    options: CascadeOptions
    routing: Routing
    new_policy: Callable[[], Policy]
    recorder: Recorder
    tenant: str | None = None
    session: SessionKey | None = None
    n: int = 1
    has_tools: bool = False
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    cascades: dict[int, Cascade] = field(default_factory=dict)
    error: Exception | None = None
    """What an answer's cascade raised; vLLM flattens it on the way."""
    failed: Exception | None = None
    """What the client was told in mid-stream."""
    feeds: list[asyncio.Task[None]] = field(default_factory=list)

    async def close(self) -> None:
        """Stop what still writes; returns when the engines were told."""
        for feed in self.feeds:
            feed.cancel()
        await asyncio.gather(*self.feeds, return_exceptions=True)
