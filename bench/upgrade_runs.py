"""Streams and arriving requests around one `serve deploy`, and what Serve replaced meanwhile.

It judges each answer by itself: whole, or why not. It knows the endpoint's HTTP and Serve's own
account of its replicas; it does not know what a change of the configuration means.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cluster import local
from cluster.errors import EngineError

APPLICATION = "cascade"
_HEAD_START_S = 5.0
_ARRIVAL_EVERY_S = 2.0
_ARRIVAL_TOKENS = 6
_WATCH_EVERY_S = 0.5
_TIMEOUT_S = 600.0
_TOPICS = ("bread", "rain", "glass", "boats", "bees", "chess", "salt", "wool", "maps", "bells")


@dataclass(frozen=True)
class Wish:
    """One answer to ask for, of exactly `tokens` tokens."""

    model: str
    tokens: int
    escalate_after_tokens: int | None = None

    @property
    def kind(self) -> str:
        """`small`, `large`, or `escalating`."""
        return self.model if self.escalate_after_tokens is None else "escalating"


@dataclass
class Heard:
    """What came of a wish. `fault` is None when the answer came whole."""

    kind: str
    fault: str | None = "it never began"
    tokens: int = 0
    seconds: float = 0.0
    longest_pause_s: float = 0.0
    path: str | None = None
    reason: str | None = None


@dataclass
class Upgrade:
    """Everything about one deployment of a changed file."""

    change: str
    streams: list[Heard] = field(default_factory=list)
    arrivals: list[Heard] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    new_s: float | None = None
    """Until the new version of every deployment runs; None when it did not in time."""
    gone_s: float | None = None
    """Until the last replica of the old version has ended, for which Serve waits too."""
    stuck: str | None = None
    """What Serve said when the new version did not run in time."""
    most_replicas: int = 0
    least_free_bytes: int = 0


def upgrade(
    change: str,
    document: Mapping[str, Any],
    url: str,
    wishes: Sequence[Wish],
    seed: int,
    *,
    patience_s: float = _TIMEOUT_S,
) -> Upgrade:
    """Begin `wishes`, deploy `document` while they stream, and see all of it to its end."""
    return asyncio.run(_upgrade(Upgrade(change), dict(document), url, wishes, seed, patience_s))


def hear_all(url: str, wishes: Sequence[Wish], seed: int) -> list[Heard]:
    """The answers to `wishes`, asked at once."""

    async def ask() -> list[Heard]:
        async with _client(url) as client:
            asked = (hear(client, wish, seed + n) for n, wish in enumerate(wishes))
            return await asyncio.gather(*asked)

    return asyncio.run(ask())


def replicas(*states: str) -> dict[str, set[int]]:
    """The processes of every deployment's replicas in some states of Serve's; in all by default."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "the caller has deployed"
    deployments = client.get_serve_details()["applications"][APPLICATION]["deployments"]
    return {
        name: {
            replica["pid"]
            for replica in one["replicas"]
            if replica.get("pid") and (not states or replica["state"] in states)
        }
        for name, one in deployments.items()
    }


async def _upgrade(
    found: Upgrade,
    document: dict[str, Any],
    url: str,
    wishes: Sequence[Wish],
    seed: int,
    patience_s: float,
) -> Upgrade:
    before = await asyncio.to_thread(replicas)
    async with _client(url) as client:
        streams = [
            asyncio.create_task(hear(client, wish, seed + n)) for n, wish in enumerate(wishes)
        ]
        arriving = asyncio.create_task(_arrive(client, found, seed + 100))
        await asyncio.sleep(_HEAD_START_S)
        started = time.monotonic()
        watching = asyncio.create_task(_watch(found, before, started))
        try:
            await asyncio.to_thread(local.deploy, document, timeout_s=patience_s)
            found.gone_s = time.monotonic() - started
        except EngineError as error:
            found.stuck = str(error)
        found.streams = list(await asyncio.gather(*streams))
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)
        await watching
    after = await asyncio.to_thread(replicas)
    found.replaced = sorted(name for name, pids in before.items() if not pids & after[name])
    return found


async def _watch(found: Upgrade, before: Mapping[str, set[int]], started: float) -> None:
    """Look on until Serve has ended, or given up, the upgrade."""
    found.least_free_bytes = _free_bytes()
    while found.stuck is None and found.gone_s is None:
        now = await asyncio.to_thread(replicas)
        running = await asyncio.to_thread(replicas, "RUNNING")
        found.most_replicas = max(found.most_replicas, sum(map(len, now.values())))
        found.least_free_bytes = min(found.least_free_bytes, _free_bytes())
        # Serve forgets its deployments for a moment while it builds the application anew.
        if found.new_s is None and all(running.get(name, set()) - before[name] for name in before):
            found.new_s = time.monotonic() - started
        await asyncio.sleep(_WATCH_EVERY_S)


async def _arrive(client: httpx.AsyncClient, found: Upgrade, seed: int) -> None:
    """Short requests of all kinds at a steady pace, until cancelled; then the last ones end."""
    wishes = (
        Wish("small", _ARRIVAL_TOKENS),
        Wish("large", _ARRIVAL_TOKENS),
        Wish("cascade", _ARRIVAL_TOKENS, escalate_after_tokens=2),
    )
    asked: list[asyncio.Task[Heard]] = []
    try:
        while True:
            number = len(asked)
            wish = wishes[number % len(wishes)]
            asked.append(asyncio.create_task(hear(client, wish, seed + number)))
            await asyncio.sleep(_ARRIVAL_EVERY_S)
    finally:
        found.arrivals = list(await asyncio.gather(*asked))


async def hear(client: httpx.AsyncClient, wish: Wish, seed: int) -> Heard:
    """Ask, and follow the stream to its end however that comes."""
    heard = Heard(wish.kind)
    started = latest = time.monotonic()
    finish = None
    done = False
    try:
        async with client.stream("POST", "/v1/chat/completions", json=_body(wish, seed)) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                heard.fault = f"status {answer.status_code}: {text[:200]}"
                return heard
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                heard.longest_pause_s = max(heard.longest_pause_s, now - latest)
                latest = now
                if line == "data: [DONE]":
                    done = True
                    break
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    heard.fault = f"after {heard.tokens} tokens: {event['error']}"
                    return heard
                if event.get("usage"):
                    heard.tokens = event["usage"]["completion_tokens"]
                for choice in event.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
                if handoff := (event.get("cascade") or {}).get("handoff"):
                    heard.path, heard.reason = handoff["path"], handoff["reason"]
    except httpx.HTTPError as error:
        heard.fault = f"after {heard.tokens} tokens: {type(error).__name__}: {error}"
        return heard
    finally:
        heard.seconds = time.monotonic() - started
    if done and finish == "length" and heard.tokens == wish.tokens:
        heard.fault = None
    else:
        heard.fault = f"{heard.tokens} of {wish.tokens} tokens, finish {finish}, end seen: {done}"
    return heard


def _body(wish: Wish, seed: int) -> dict[str, Any]:
    topic = _TOPICS[seed % len(_TOPICS)]
    question = f"Number {seed}: tell me everything that you know about {topic}. " * 6
    body: dict[str, Any] = {
        "model": wish.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": wish.tokens,
        "min_tokens": wish.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if wish.escalate_after_tokens is not None:
        # A handoff even where reading again would be quicker, as with so short a prompt.
        after = wish.escalate_after_tokens
        body["cascade"] = {"escalate_after_tokens": after, "recompute": False}
    return body


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False)


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (line,) = [one for one in lines if one.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024


def changed(document: Mapping[str, Any], **args: Mapping[str, Any]) -> dict[str, Any]:
    """The document with other values in some sections of `args`."""
    copy: dict[str, Any] = deepcopy(dict(document))
    sections = copy["applications"][0]["args"]
    for name, values in args.items():
        sections[name] = {**sections.get(name, {}), **values}
    return copy
