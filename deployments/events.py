"""Server-sent events of one answer: vLLM's own, with the `cascade` object put in.

It knows vLLM's events by their text and nothing of how tokens come.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deployments.call import Call
from deployments.openai_errors import from_exception, from_vllm

_FINISHED = '"finish_reason":"'
_ERROR = 'data: {"error"'
_DONE = "data: [DONE]"


class EventStream:
    """Server-sent events of which the first is there already.

    A class, because closing a generator that was never started does not reach what it wraps.
    """

    def __init__(self, first: str, rest: AsyncGenerator[str, None]) -> None:
        self._first: str | None = first
        self._rest = rest

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> str:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._rest)

    async def aclose(self) -> None:
        """Stop the answer; returns when the engines were told."""
        await self._rest.aclose()


async def with_cascade(
    source: AsyncGenerator[str, None], call: Call, prompt_field: str
) -> AsyncGenerator[str, None]:
    """vLLM's events with the `cascade` object and our error envelope put in.

    After an error event comes nothing but the end, and `call.failed` says what it was. Raises
    ApiError instead of yielding an error as the very first event.
    """
    started = False
    async with aclosing(source):
        async for event in source:
            if event.startswith(_ERROR):
                found = call.error or from_vllm(data_of(event))
                error = from_exception(found, prompt_field=prompt_field)
                if not started:
                    raise error
                call.failed = error
                yield as_event(error.body())
                yield f"{_DONE}\n\n"
                return
            if _FINISHED in event:
                yield await _finish(event, call)
            elif call.options.explain and not event.startswith(_DONE):
                yield _explain(event, call)
            else:
                yield event
            started = True


async def add_cascade(answer: dict[str, Any], call: Call) -> None:
    """`cascade` on the body for one choice; on each choice when there are more."""
    choices = answer["choices"]
    for choice in choices:
        info = await call.cascades[choice["index"]].info()
        holder = answer if len(choices) == 1 else choice
        holder["cascade"] = info.model_dump(mode="json")


def data_of(event: str) -> dict[str, Any]:
    """The JSON object of an event."""
    data: dict[str, Any] = json.loads(event.removeprefix("data: "))
    return data


def as_event(data: dict[str, Any]) -> str:
    """A JSON object as an event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _finish(event: str, call: Call) -> str:
    """A choice's last chunk with its `cascade` object, and for `explain` the last scores."""
    chunk = data_of(event)
    choice = chunk["choices"][0]
    if choice.get("finish_reason") is None:
        return _explain(event, call) if call.options.explain else event
    cascade = call.cascades[choice["index"]]
    info = await cascade.info()
    progress = cascade.progress().model_dump(mode="json") if call.options.explain else {}
    chunk["cascade"] = progress | info.model_dump(mode="json")
    return as_event(chunk)


def _explain(event: str, call: Call) -> str:
    """A chunk that carries content, with what is known of its choice so far."""
    chunk = data_of(event)
    if not chunk.get("choices"):
        return event
    choice = chunk["choices"][0]
    delta = choice.get("delta", choice)
    if not any(delta.get(key) for key in ("content", "text", "reasoning", "tool_calls")):
        return event
    progress = call.cascades[choice["index"]].progress()
    chunk["cascade"] = progress.model_dump(mode="json")
    return as_event(chunk)
