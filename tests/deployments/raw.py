"""Calls an ASGI application by hand, for clients that leave in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any


def post_scope(path: str) -> dict[str, Any]:
    """The ASGI scope of a POST with a JSON body."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }


async def raw(
    app: Any, path: str, body: dict[str, Any], leave: Callable[[], bool]
) -> AsyncIterator[int]:
    """The status of each response; the client leaves as soon as `leave` says so."""
    out: list[int] = []
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        while not leave() or (body.get("stream") and not out):
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            out.append(message["status"])

    await asyncio.wait_for(app(post_scope(path), receive, send), 20)
    for status in out:
        yield status
