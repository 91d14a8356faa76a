"""Calls to the engine replica of a conversation, each a request of its own to Ray Serve.

Serve knows a call by an id that all calls made within one HTTP request share. Its consistent-hash
router (Ray 2.60) keeps waiting calls by that id and forgets all but one of those that wait at the
same moment, as the choices of one request do. So a call leaves the request's context.
"""

from __future__ import annotations

import contextvars
from typing import Any

from router.ports import affinity_of


def call_replica(handle: Any, method: str, request_id: str, *args: Any) -> Any:
    """The response of `method` on the replica that has, or will have, this engine request.

    `handle` carries all options but the session.
    """
    placed = handle.options(session_id=affinity_of(request_id))
    return contextvars.Context().run(getattr(placed, method).remote, *args)
