"""The routes over a service that echoes: access, limits, clients that leave, pages. No vLLM."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import httpx2
import pytest

from deployments.api_keys import load_api_keys
from deployments.caller import Caller
from deployments.events import EventStream
from deployments.openai_app import Service, build_http_app
from tests.deployments.raw import post_scope


class FakeChat:
    """Serves two names and echoes the request; hangs, streams or breaks when asked to."""

    models = {"cascade": 64, "org/big": 128}

    def __init__(self) -> None:
        self.working = 0
        self.closed = 0
        self.go = asyncio.Event()

    async def chat(self, body: Mapping[str, Any], caller: Caller) -> Any:
        if body.get("bug"):
            raise RuntimeError("secret detail")
        if body.get("stream"):
            return EventStream("data: 1\n\n", self._events())
        if body.get("hang"):
            self.working += 1
            try:
                await self.go.wait()
            finally:
                self.working -= 1
        return {"echo": dict(body), "tenant": caller.tenant, "headers": dict(caller.headers)}

    async def _events(self) -> AsyncGenerator[str, None]:
        try:
            await self.go.wait()
            yield "data: [DONE]\n\n"
        finally:
            self.closed += 1

    complete = chat

    async def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(body)

    detokenize = tokenize


def client(
    chat: FakeChat | None = None, health: dict[str, str | None] | None = None, **limits: Any
) -> httpx2.AsyncClient:
    async def parts() -> dict[str, str | None]:
        return health or {"small": None, "large": None, "mapper": None}

    async def metrics() -> str:
        return "ray_kvcascade_route_total 3\n"

    service = Service(chat=chat or FakeChat(), health=parts, metrics=metrics, **limits)
    transport = httpx2.ASGITransport(app=build_http_app(service), raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://test")


CHAT = "/v1/chat/completions"


async def test_models_are_listed_with_their_context() -> None:
    listed = (await client().get("/v1/models")).json()
    assert [(card["id"], card["max_model_len"]) for card in listed["data"]] == [
        ("cascade", 64),
        ("org/big", 128),
    ]
    assert {card["object"] for card in listed["data"]} == {"model"}


async def test_one_model_is_found_by_a_name_with_a_slash() -> None:
    assert (await client().get("/v1/models/org/big")).json()["id"] == "org/big"


async def test_an_unknown_model_or_route_has_the_error_envelope() -> None:
    missing = await client().get("/v1/models/nope")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert (await client().get("/nowhere")).json()["error"]["type"] == "invalid_request_error"
    wrong = await client().get(CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert set(wrong.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_unexpected_error_is_a_500_with_the_envelope() -> None:
    response = await client().post(CHAT, json={"bug": True})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in response.text


async def test_headers_reach_the_service_but_internal_ones_and_the_key() -> None:
    headers = {
        "traceparent": "00-1-2-01",
        "X-Cascade-Internal-Tenant": "admin",
        "Authorization": "Bearer s",
    }
    seen = (await client().post(CHAT, json={"a": 1}, headers=headers)).json()
    assert seen["echo"] == {"a": 1}
    assert seen["headers"]["traceparent"] == "00-1-2-01"
    assert not {"x-cascade-internal-tenant", "authorization"} & seen["headers"].keys()


async def test_health_is_200_when_every_part_answers() -> None:
    response = await client().get("/health")
    assert (response.status_code, response.json()["mapper"]) == (200, "ok")


async def test_health_is_503_and_names_the_part_that_does_not() -> None:
    parts = {"small": None, "large": "no answer within 10 s", "mapper": None}
    response = await client(health=parts).get("/health")
    assert response.status_code == 503
    assert response.json() == {"small": "ok", "large": "no answer within 10 s", "mapper": "ok"}


async def test_metrics_are_passed_on() -> None:
    assert (await client().get("/metrics")).text == "ray_kvcascade_route_total 3\n"


async def test_the_page_may_run_nothing_but_its_own_files() -> None:
    response = await client().get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy
    script = await client().get("/app.js")
    assert (script.status_code, script.headers["x-content-type-options"]) == (200, "nosniff")


async def test_statistics_are_served_where_they_are_kept() -> None:
    assert (await client().get("/v1/cascade/stats")).status_code == 404
    kept = client(stats=lambda: {"requests": 3})
    assert (await kept.get("/v1/cascade/stats")).json() == {"requests": 3}


async def test_without_keys_nobody_is_a_tenant() -> None:
    assert (await client().post(CHAT, json={})).json()["tenant"] is None


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> httpx2.AsyncClient:
    monkeypatch.setenv("KEYS", "acme:sk-1, sk-2")
    return client(keys=load_api_keys(None, "KEYS"))


@pytest.mark.parametrize("authorization", [None, "Bearer sk-3", "Bearer ", "Basic sk-1", "sk-1"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/cascade"),
        ("GET", "/v1/cascade/stats"),
        ("GET", "/openapi.json"),
    ],
)
async def test_without_a_valid_key_every_answer_is_401(
    locked: httpx2.AsyncClient, authorization: str | None, method: str, path: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    response = await locked.request(method, path, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"


async def test_a_valid_key_opens_and_names_its_tenant(locked: httpx2.AsyncClient) -> None:
    async def tenant(key: str) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        return (await locked.post(CHAT, json={}, headers=headers)).json()["tenant"]

    assert await tenant("sk-1") == "acme"
    assert len(await tenant("sk-2")) == 12


@pytest.mark.parametrize("path", ["/", "/app.js", "/health", "/metrics"])
async def test_page_health_and_metrics_need_no_key(locked: httpx2.AsyncClient, path: str) -> None:
    assert (await locked.get(path)).status_code == 200


async def test_one_request_too_many_is_told_to_come_back() -> None:
    chat = FakeChat()
    full = client(chat, max_requests=1)
    first = asyncio.create_task(full.post(CHAT, json={"hang": True}))
    while not chat.working:
        await asyncio.sleep(0)
    refused = await full.post("/v1/completions", json={})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    chat.go.set()
    assert (await first).status_code == 200
    assert (await full.post(CHAT, json={})).status_code == 200
    assert (await full.post(CHAT, json={"bug": 1})).status_code == 500
    assert (await full.post(CHAT, json={})).status_code == 200


async def test_a_stream_keeps_its_seat_until_it_ends() -> None:
    chat = FakeChat()
    full = client(chat, max_requests=1)
    streaming = asyncio.create_task(full.post(CHAT, json={"stream": True}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await full.post(CHAT, json={})).status_code == 429
    chat.go.set()
    assert (await streaming).text == "data: 1\n\ndata: [DONE]\n\n"
    assert (await full.post(CHAT, json={})).status_code == 200


async def in_parts(total: int) -> AsyncIterator[bytes]:
    yield b'{"a": "'
    for _ in range(total):
        yield b"x"
    yield b'"}'


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
async def test_a_long_body_is_a_413_by_its_header_and_by_its_length(path: str) -> None:
    small = client(max_body_bytes=20)
    assert (await small.post(path, json={"a": "x" * 5})).status_code == 200
    stated = await small.post(path, json={"a": "x" * 20})
    assert (stated.status_code, stated.json()["error"]["code"]) == (413, "request_too_large")
    assert (await small.post(path, content=in_parts(11))).status_code == 200
    assert (await small.post(path, content=in_parts(12))).status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"\xff\xfe{}",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'{"model": "\\ud83d"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"top_k": 9223372036854775808}',
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    response = await client().post(CHAT, content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (
        400,
        "invalid_request_error",
    )


async def test_nesting_that_tools_need_is_read() -> None:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"properties": schema}
    assert (await client().post(CHAT, json={"tools": schema})).status_code == 200


async def statuses_of(chat: FakeChat, body: bytes, *, whole: bool = True) -> list[int]:
    """The statuses of one request whose client leaves while it is worked on, and of the next."""
    messages = [{"type": "http.request", "body": body, "more_body": not whole}]
    found: list[int] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        while whole and not chat.working:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    scope = post_scope(CHAT)
    limited = client(chat, max_requests=1)
    app: Any = limited._transport
    await asyncio.wait_for(app.app(scope, receive, send), 10)
    found.append((await limited.post(CHAT, json={})).status_code)
    return found


async def test_a_client_that_leaves_before_its_answer_stops_the_work(caplog: Any) -> None:
    chat = FakeChat()
    assert await statuses_of(chat, json.dumps({"hang": True}).encode()) == [499, 200]
    assert chat.working == 0
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_a_client_that_leaves_within_its_body_is_no_error(caplog: Any) -> None:
    assert await statuses_of(FakeChat(), b'{"hang"', whole=False) == [499, 200]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
