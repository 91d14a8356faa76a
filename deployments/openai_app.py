"""The HTTP surface: OpenAI's routes, health, metrics and the web page, as an ASGI application.

It maps bodies and status codes and nothing else; the work is behind `Service`. Tests call it
without a socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deployments.admission import Admission, Seat
from deployments.api_keys import ApiKeys
from deployments.caller import Caller
from deployments.events import EventStream
from deployments.openai_errors import (
    INVALID_REQUEST,
    ApiError,
    ClientClosed,
    from_exception,
    unknown_model,
)
from deployments.page import CONTENT_SECURITY_POLICY, page_files
from deployments.request_body import read_json_object

INTERNAL_HEADERS = "x-cascade-internal-"
"""Headers under this prefix are ours between our own parts; a client's are dropped."""

PAGE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Answer = dict[str, Any] | EventStream


class Chat(Protocol):
    """What the routes need of `ChatService`; see there."""

    @property
    def models(self) -> dict[str, int]:
        """Served names and their context lengths in tokens."""

    async def chat(self, body: Mapping[str, Any], caller: Caller) -> Answer:
        """`/v1/chat/completions`."""

    async def complete(self, body: Mapping[str, Any], caller: Caller) -> Answer:
        """`/v1/completions`."""

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`/tokenize`."""

    async def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`/detokenize`."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """Everything behind the routes, and what limits access to it; None: no limit, not served.

    `health` gives for each part None or what is wrong with it; `metrics` Prometheus text; `stats`
    what the router did lately; `status` what Serve and every replica say of themselves.
    """

    chat: Chat
    health: Callable[[], Awaitable[dict[str, str | None]]]
    metrics: Callable[[], Awaitable[str]]
    stats: Callable[[], dict[str, Any]] | None = None
    status: Callable[[], Awaitable[dict[str, Any]]] | None = None
    keys: ApiKeys | None = None
    max_requests: int | None = None
    max_body_bytes: int | None = None


class ClosingStream(StreamingResponse):
    """Closes its events however the response ends, so a client that left costs nothing."""

    def __init__(self, content: EventStream, seat: Seat) -> None:
        super().__init__(content, media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # proxies pass every event on at once
        self._content = content
        self._seat = seat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._content.aclose()
            finally:
                self._seat.leave()


def build_http_app(service: Service) -> FastAPI:
    """The ASGI application over `service`."""
    app = FastAPI(title="kvcascade", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_open_routes(service))
    app.include_router(_keyed_routes(service))

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        return _error_response(
            ApiError(error.status_code, detail, code=INVALID_REQUEST, headers=error.headers)
        )

    @app.exception_handler(Exception)
    async def any_error(request: Request, error: Exception) -> Response:
        # Starlette logs it with its traceback after this answer.
        return _error_response(from_exception(error))

    return app


async def _file(content: bytes, headers: dict[str, str]) -> Response:
    return Response(content, headers=headers)


def _error_response(error: ApiError) -> Response:
    headers = None if error.headers is None else dict(error.headers)
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _open_routes(service: Service) -> APIRouter:
    """What needs no key."""
    routes = APIRouter()

    for path, (content_type, content) in page_files().items():
        headers = {**PAGE_HEADERS, "content-type": content_type}
        routes.get(path)(partial(_file, content, headers))

    @routes.get("/health")
    async def health() -> Response:
        parts = await service.health()
        failed = {part: reason for part, reason in parts.items() if reason is not None}
        content = {part: reason or "ok" for part, reason in parts.items()}
        return JSONResponse(content, status_code=503 if failed else 200)

    @routes.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await service.metrics())

    return routes


def _keyed_routes(service: Service) -> APIRouter:
    """What a client needs a key for, where there are keys."""
    chat = service.chat
    admission = Admission(service.max_requests)
    started_unix_s = int(time.time())

    async def authorize(request: Request) -> None:
        tenant = None
        if service.keys is not None:
            tenant = service.keys.tenant_of(request.headers.get("authorization"))
        request.state.tenant = tenant

    routes = APIRouter(dependencies=[Depends(authorize)])

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started_unix_s,
            "owned_by": "kvcascade",
            "max_model_len": chat.models[name],
        }

    async def answer(
        request: Request,
        work: Callable[[Mapping[str, Any], Caller], Coroutine[Any, Any, Answer]],
    ) -> Response:
        body = await read_json_object(request, service.max_body_bytes)
        seat = admission.enter()
        response: Response | None = None
        try:
            result = await _while_connected(request, work(body, _caller(request)))
            if isinstance(result, dict):
                return JSONResponse(result)
            response = ClosingStream(result, seat)
            return response
        finally:
            if response is None:
                seat.leave()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat.chat)

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, chat.complete)

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_json_object(request, service.max_body_bytes)
        return JSONResponse(await chat.tokenize(body))

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_json_object(request, service.max_body_bytes)
        return JSONResponse(await chat.detokenize(body))

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in chat.models]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in chat.models:
            raise unknown_model(name, list(chat.models))
        return card(name)

    @routes.get("/v1/cascade/stats")
    async def stats() -> dict[str, Any]:
        if service.stats is None:
            raise ApiError(404, "this endpoint keeps no statistics", code=INVALID_REQUEST)
        return service.stats()

    @routes.get("/v1/cascade/status")
    async def status() -> dict[str, Any]:
        if service.status is None:
            raise ApiError(404, "this endpoint gives no status", code=INVALID_REQUEST)
        return await service.status()

    @routes.get("/openapi.json")
    async def openapi() -> dict[str, Any]:
        from deployments.openapi import openapi_document

        return openapi_document(list(chat.models), keyed=service.keys is not None)

    return routes


def _caller(request: Request) -> Caller:
    headers = {
        name: value
        for name, value in request.headers.items()
        if not name.startswith(INTERNAL_HEADERS) and name != "authorization"
    }
    return Caller(headers=headers, tenant=request.state.tenant)


async def _while_connected(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`, which is cancelled when the client leaves: then ClientClosed."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        done, _ = await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        leaving.result()
        raise ClientClosed
    except BaseException:
        working.cancel()
        (result,) = await asyncio.gather(working, return_exceptions=True)
        if isinstance(result, EventStream):
            await result.aclose()
        raise
    finally:
        leaving.cancel()


async def _left(request: Request) -> None:
    """Returns when the client is gone; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
