"""The deployments of the overhead bench: an engine that sleeps, and the barest ingress before it.

The engine speaks `router.ports.EngineRequest` -> `EngineChunk` like `deployments/engine.py`, but
its tokens come from a list at fixed times. It knows no model; nothing here measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from deployments.pacing import Pace
from router.ports import EngineChunk, EngineRequest, TokenStep

MARGIN_NATS = 8.0
"""How sure the engine is of every token: no policy escalates."""


class ScriptedEngine:
    """Writes `token_ids` over and over, one token each `step_s` and request.

    As in vLLM, tokens that are due when the reader comes back leave as one chunk: an engine does
    not fall behind because nobody reads. `max_chunks_per_s` is the engines' own limit.
    """

    def __init__(self, token_ids: list[int], step_s: float, max_chunks_per_s: float) -> None:
        self._steps = [
            TokenStep(token_id=one, logprobs=((one, -0.01, 1), (one + 1, -0.01 - MARGIN_NATS, 2)))
            for one in token_ids
        ]
        self._step_s = step_s
        self._pace = Pace(max_chunks_per_s)

    def configure(self, step_s: float) -> None:
        """The time per token of requests that begin later."""
        self._step_s = step_s

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineChunk]:
        """Exactly `max_tokens` tokens; the last chunk ends with `length`."""
        started, step_s, sent = time.perf_counter(), self._step_s, 0
        with self._pace.stream() as pause:
            while sent < request.max_tokens:
                await asyncio.sleep(started + (sent + 1) * step_s - time.perf_counter())
                due = int((time.perf_counter() - started) / step_s) if step_s else sent + 1
                until = min(max(due, sent + 1), request.max_tokens)
                yield EngineChunk(
                    steps=tuple(self._steps[i % len(self._steps)] for i in range(sent, until)),
                    finish_reason="length" if until == request.max_tokens else None,
                    cached_tokens=0,
                )
                sent = until
                if sent < request.max_tokens:
                    await pause()

    async def release(self, request_id: str) -> None:
        """Nothing is kept."""

    async def describe(self) -> dict[str, Any]:
        """Alive."""
        return {}


class ScriptedMapper:
    """A mapper that is there; no request of the bench is handed over."""

    async def describe(self) -> dict[str, Any]:
        """Alive."""
        return {}


def bare_app(engine: Any) -> FastAPI:
    """An ingress that forwards the engine's chunks as events: what Ray Serve itself costs.

    It neither renders nor detokenises; an event holds the token ids. `engine` has a method
    `generate` that gives an async iterator of chunks.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def events(request: EngineRequest) -> AsyncIterator[str]:
        async for chunk in engine(request):
            ids = [step.token_id for step in chunk.steps]
            yield f"data: {json.dumps({'t': ids, 'finish_reason': chunk.finish_reason})}\n\n"
        yield "data: [DONE]\n\n"

    @app.post("/generate")
    async def generate(request: Request) -> StreamingResponse:
        body = await request.json()
        wanted = EngineRequest(
            request_id=body["request_id"],
            prompt_token_ids=tuple(body["prompt_token_ids"]),
            max_tokens=body["max_tokens"],
        )
        return StreamingResponse(events(wanted), media_type="text/event-stream")

    return app


def make_bare() -> Any:
    """The bare ingress as a class for `serve.deployment`; it takes the engine's handle."""
    from ray import serve

    @serve.ingress()
    class Bare:
        def __init__(self, engine: Any, transport: dict[str, Any]) -> None:
            self._stream = engine.options(stream=True, **transport)

        async def __serve_build_asgi_app__(self) -> FastAPI:
            return bare_app(lambda request: self._stream.generate.remote(request))

    return Bare
