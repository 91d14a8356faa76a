"""The HTTP surface: OpenAI's routes, health and metrics, as an ASGI application.

It maps bodies and status codes and nothing else; the work is behind `Service`. Tests call it
without a socket.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deployments.chat_service import EventStream
from deployments.openai_errors import INVALID_REQUEST, ApiError, from_exception, unknown_model


class Chat(Protocol):
    """What the routes need of `ChatService`."""

    @property
    def models(self) -> dict[str, int]:
        """Served names and their context lengths in tokens."""

    async def complete(
        self, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any] | EventStream:
        """See `ChatService.complete`."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """Everything behind the routes.

    `health` gives for each part None or what is wrong with it; `metrics` Prometheus text.
    """

    chat: Chat
    health: Callable[[], Awaitable[dict[str, str | None]]]
    metrics: Callable[[], Awaitable[str]]


class ClosingStream(StreamingResponse):
    """Closes its events however the response ends, so a client that left costs nothing."""

    def __init__(self, content: EventStream) -> None:
        super().__init__(content, media_type="text/event-stream")
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._content.aclose()


def build_http_app(service: Service) -> FastAPI:
    """The ASGI application over `service`."""
    app = FastAPI(title="kvcascade", docs_url=None, redoc_url=None, openapi_url=None)
    started_unix_s = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started_unix_s,
            "owned_by": "kvcascade",
            "max_model_len": service.chat.models[name],
        }

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _json_object(request)
        result = await service.chat.complete(body, dict(request.headers))
        return JSONResponse(result) if isinstance(result, dict) else ClosingStream(result)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.chat.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in service.chat.models:
            raise unknown_model(name, list(service.chat.models))
        return card(name)

    @app.get("/health")
    async def health() -> Response:
        parts = await service.health()
        failed = {part: reason for part, reason in parts.items() if reason is not None}
        content = {part: reason or "ok" for part, reason in parts.items()}
        return JSONResponse(content, status_code=503 if failed else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await service.metrics())

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), status_code=error.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        found = ApiError(error.status_code, str(error.detail), code=INVALID_REQUEST)
        return JSONResponse(found.body(), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def any_error(request: Request, error: Exception) -> Response:
        # Starlette logs it with its traceback after this answer.
        found = from_exception(error)
        return JSONResponse(found.body(), status_code=found.status)

    return app


async def _json_object(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code=INVALID_REQUEST) from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code=INVALID_REQUEST)
    return body
