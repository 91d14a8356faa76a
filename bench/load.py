"""Many conversations at once through the OpenAI endpoint, each handed over after one token.

A fixed number is in flight: as soon as one is answered the next is asked, each with a session of
its own. It runs beside whatever else its process does and records what became of each request. It
knows HTTP and the endpoint's account of an answer, neither Ray nor who works behind it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

Messages = list[dict[str, str]]
_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to ask. Conversations of `tokens` take turns, of each length `seeds` different ones."""

    in_flight: int
    tokens: tuple[int, ...]
    seeds: int = 4
    requests: int | None = None
    """How many; None: until it is stopped."""
    answer_tokens: int = 2
    watch_s: float | None = None
    """Ask the endpoint for its state so often, too."""

    def conversation(self, number: int) -> tuple[int, int]:
        """(length, seed) of the request of this number."""
        return self.tokens[number % len(self.tokens)], number // len(self.tokens) % self.seeds

    @property
    def conversations(self) -> list[tuple[int, int]]:
        """All of them, once."""
        return [self.conversation(number) for number in range(len(self.tokens) * self.seeds)]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One request. Times are the machine's monotonic clock, which all its processes share."""

    number: int
    tokens: int
    started_s: float
    ended_s: float
    error: str | None = None
    """Why there was no whole answer; then nothing below is known."""
    path: str | None = None
    reason: str | None = None
    temperature: str | None = None
    handoff_ms: float | None = None
    bytes_written: int = 0
    covered_tokens: int = 0

    @property
    def mapped(self) -> bool:
        """Whether the large model went on from a converted cache."""
        return self.error is None and self.path == "mapped"

    @property
    def complaint(self) -> str | None:
        """What went wrong, or why the large model read the conversation itself."""
        return self.error or (None if self.mapped else f"{self.path}: {self.reason}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The cascade at one moment, on the clock of `Record`; replicas by state, pids by deployment.

    `handoffs` are at work or waiting at mappers, `nodes` those on which mappers run.
    """

    at_s: float
    replicas: Mapping[str, int]
    nodes: Sequence[str]
    handoffs: int
    pids: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Outcome:
    """All requests in the order of their numbers, and what was seen meanwhile."""

    records: Sequence[Record]
    samples: Sequence[Sample] = ()

    def as_json(self) -> dict[str, Any]:
        """For a file or a pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        """What `as_json` made."""
        records = [Record(**one) for one in found["records"]]
        return cls(records, [Sample(**one) for one in found["samples"]])


class Generator:
    """Keeps a `Load` in flight from a thread of its own."""

    def __init__(
        self, url: str, model: str, load: Load, messages: Callable[[int, int], Messages]
    ) -> None:
        # Before the clock starts: making a long text takes longer than handing it over.
        self._messages = {one: messages(*one) for one in load.conversations}
        self._url, self._model, self._load = url, model, load
        self._next = 0
        self._stopped = False
        self.records: list[Record] = []
        self._samples: list[Sample] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether anything is in flight."""
        return self._thread.is_alive()

    def finish(self, *, stop: bool) -> Outcome:
        """Wait for the end, with `stop` for that of what is in flight."""
        self._stopped |= stop
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        records = sorted(self.records, key=lambda record: record.number)
        return Outcome(records, self._samples)

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:
            self._failure = error

    async def _all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            watch = group.create_task(self._watch(client))
            async with asyncio.TaskGroup() as asking:
                for _ in range(self._load.in_flight):
                    asking.create_task(self._one_after_the_other(client))
            watch.cancel()

    async def _watch(self, client: httpx.AsyncClient) -> None:
        while self._load.watch_s is not None:
            answer = await client.get(f"{self._url}/v1/cascade/status")
            if answer.status_code == 200:
                self._samples.append(read_status(time.monotonic(), answer.json()))
            await asyncio.sleep(self._load.watch_s)

    async def _one_after_the_other(self, client: httpx.AsyncClient) -> None:
        load = self._load
        while not self._stopped and (load.requests is None or self._next < load.requests):
            number, self._next = self._next, self._next + 1
            tokens, seed = load.conversation(number)
            started_s = time.monotonic()
            found = await self._ask(client, self._messages[tokens, seed])
            self.records.append(
                Record(
                    number=number,
                    tokens=tokens,
                    started_s=started_s,
                    ended_s=time.monotonic(),
                    **found,
                )
            )

    async def _ask(self, client: httpx.AsyncClient, messages: Messages) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._load.answer_tokens,
            # Neither model may end the answer before the handoff is over.
            "min_tokens": self._load.answer_tokens,
            "temperature": 0,
            "cascade": {
                "session_id": uuid.uuid4().hex,
                "escalate_after_tokens": 1,
                # Also where the router expects reading to be quicker: it is to move caches.
                "recompute": False,
            },
        }
        try:
            answer = await client.post(f"{self._url}/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return read_answer(answer.status_code, answer.text)


def read_answer(status: int, text: str) -> dict[str, Any]:
    """What a `Record` keeps of an answer."""
    if status != 200:
        return {"error": f"{status}: {text[:200]}"}
    content = json.loads(text)
    handoff = content["cascade"].get("handoff")
    if handoff is None:
        return {"error": "the large model never took over"}
    kept = ("path", "reason", "temperature", "handoff_ms", "bytes_written", "covered_tokens")
    return {key: handoff.get(key) for key in kept}


def read_status(at_s: float, status: Mapping[str, Any]) -> Sample:
    """What a `Sample` keeps of the answer of `/v1/cascade/status`."""
    deployments = status["deployments"]
    mappers = deployments["mapper"]["described"]
    return Sample(
        at_s=at_s,
        replicas=deployments["mapper"]["replicas"],
        nodes=sorted(status["nodes"].get(one["node_id"], "gone") for one in mappers),
        handoffs=sum(one["running"] for one in mappers),
        pids={
            name: sorted(one["pid"] for one in deployments[name]["described"])
            for name in ("small", "large", "mapper")
        },
    )
