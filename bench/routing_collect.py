"""Asks a running endpoint and keeps every answer in a file, so that a stopped run goes on.

It turns answers of the API into records. It does not know what is measured with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.errors import EngineError
from router.api import CascadeInfo

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

MAX_TOKENS = 48
_TIMEOUT_S = 300.0


class Ask(BaseModel):
    """One request: what is asked (`key`), in which run, and of which served model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    run: str
    text: str
    model: str
    cascade: dict[str, Any] | None = None
    margins: bool = False


class Answer(BaseModel):
    """What came back. `margins` (nats) are those of all tokens, None where the API gave no second
    token, and unset when they were not asked for. `tokens` counts the whole answer."""

    model_config = ConfigDict(frozen=True)

    key: str
    run: str
    text: str
    prompt_tokens: int
    tokens: int
    finish_reason: str
    cascade: CascadeInfo
    margins: tuple[float | None, ...] | None = None

    @property
    def escalated(self) -> bool:
        """Whether the large model took part."""
        decision = self.cascade.decision
        return decision is not None and decision.action != "stay"

    def written(self, model: str) -> int:
        """Tokens of the answer that `model` wrote."""
        return sum(one.tokens for one in self.cascade.served_by if one.model == model)


class Client(Protocol):
    """Whoever answers."""

    async def answer(self, ask: Ask) -> Answer:
        """The answer to one request; raises when there is none."""


class Cache:
    """A JSONL file of answers, one line each; a line that was cut by a crash is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], Answer] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self._read()

    def _read(self) -> None:
        whole = []
        lines = self._path.read_text().splitlines()
        for number, line in enumerate(lines):
            try:
                answer = Answer.model_validate_json(line)
            except ValidationError:
                if number + 1 < len(lines):
                    raise
                continue
            whole.append(line)
            self._found[answer.key, answer.run] = answer
        if len(whole) < len(lines):
            self._path.write_text("".join(f"{line}\n" for line in whole))

    def get(self, key: str, run: str) -> Answer | None:
        """The answer, if it is there."""
        return self._found.get((key, run))

    def lacks(self, asks: Iterable[Ask]) -> list[Ask]:
        """Those of `asks` that have no answer yet."""
        return [ask for ask in asks if (ask.key, ask.run) not in self._found]

    def run(self, run: str, keys: Iterable[str]) -> list[Answer]:
        """The answers of one run, in the order of `keys`; KeyError when one is missing."""
        return [self._found[key, run] for key in keys]

    def add(self, answer: Answer) -> None:
        """Keep one more."""
        self._found[answer.key, answer.run] = answer
        with self._path.open("a") as file:
            file.write(answer.model_dump_json(exclude_none=True) + "\n")


async def collect(
    client: Client,
    asks: Sequence[Ask],
    cache: Cache,
    *,
    concurrency: int,
    advance: Callable[[], None],
) -> int:
    """Ask what the cache lacks, `concurrency` at a time; the number of requests sent.

    `advance` is called for every request, also those that were answered before. The first error
    ends it; what was answered by then is kept.
    """
    missing = cache.lacks(asks)
    for _ in range(len(asks) - len(missing)):
        advance()
    waiting = iter(missing)

    async def work() -> None:
        for ask in waiting:
            cache.add(await client.answer(ask))
            advance()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return len(missing)


class Endpoint:
    """The real endpoint, through the official client, past any proxy; for `async with`."""

    def __init__(self, url: str) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._client = AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="unused",
            timeout=_TIMEOUT_S,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def answer(self, ask: Ask) -> Answer:
        """Greedy, at most MAX_TOKENS tokens; EngineError when the endpoint refuses."""
        from openai import OpenAIError

        options: dict[str, Any] = {}
        if ask.cascade is not None:
            options["extra_body"] = {"cascade": ask.cascade}
        if ask.margins:
            options |= {"logprobs": True, "top_logprobs": 2}
        untyped: Any = [{"role": "user", "content": ask.text}]
        try:
            got = await self._client.chat.completions.create(
                model=ask.model, messages=untyped, max_tokens=MAX_TOKENS, temperature=0, **options
            )
        except OpenAIError as error:
            raise EngineError(f"no answer to {ask.text!r} ({ask.run}): {error}") from error
        return answer_of(ask, got)


def answer_of(ask: Ask, got: ChatCompletion) -> Answer:
    """The record of one response."""
    choice = got.choices[0]
    assert got.usage is not None and got.model_extra is not None
    margins = None
    if ask.margins:
        content = [] if choice.logprobs is None else choice.logprobs.content or []
        margins = tuple(_margin([one.logprob for one in token.top_logprobs]) for token in content)
    return Answer(
        key=ask.key,
        run=ask.run,
        text=choice.message.content or "",
        prompt_tokens=got.usage.prompt_tokens,
        tokens=got.usage.completion_tokens,
        finish_reason=choice.finish_reason,
        cascade=CascadeInfo.model_validate(got.model_extra["cascade"]),
        margins=margins,
    )


def _margin(logprobs: list[float]) -> float | None:
    # A server may list the sampled token beside the two likeliest ones; greedy it is one of them.
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else None
