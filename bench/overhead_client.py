"""The clients of the overhead bench, in a process of their own.

Reads one JSON order per line from stdin and answers each with one JSON line of raw times: the same
code asks every endpoint, so what the client costs is the same for all. It knows no statistics.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

EVENT = b"\n\n"
END = b"data: [DONE]"


async def ask(session: aiohttp.ClientSession, order: dict[str, Any]) -> dict[str, Any]:
    """Send one request and note when events came.

    Times are seconds after the request. `skip_events` leading events carry no token. Raises
    RuntimeError when the stream breaks off or is not the whole answer.
    """
    started = time.perf_counter()
    times: list[float] = []
    seen, tail = 0, b""
    async with session.post(order["url"], json=order["body"]) as response:
        if response.status != 200:
            raise RuntimeError(f"{order['url']}: {response.status} {await response.text()}")
        async for part in response.content.iter_any():
            now = time.perf_counter() - started
            events = (tail[-1:] + part).count(EVENT)
            seen += events
            if events and seen > order["skip_events"]:
                times.append(now)
            tail = (tail + part)[-2048:]
    ended = time.perf_counter() - started
    if END not in tail or b"length" not in tail:
        raise RuntimeError(f"{order['url']}: the answer broke off: {tail[-300:]!r}")
    return {"arrivals_s": times, "total_s": ended}


async def stream_of(session: aiohttp.ClientSession, order: dict[str, Any]) -> list[dict[str, Any]]:
    """One stream: its requests, one after the other."""
    return [await ask(session, order) for _ in range(order["requests"])]


async def main() -> None:
    """Serve orders until stdin ends."""
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            started = time.perf_counter()
            streams = await asyncio.gather(
                *(stream_of(session, order) for _ in range(order["streams"]))
            )
            answer = {"wall_s": time.perf_counter() - started, "requests": sum(streams, [])}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
