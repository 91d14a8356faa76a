"""Refusals, failures and clients that leave, over the OpenAI surface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from tests.deployments.conftest import ASK, LARGE_TEXT, Desk, cascade_of
from tests.deployments.raw import post_scope

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("kwargs", "param", "code"),
    [
        ({"extra_body": {"kv_transfer_params": {"x": 1}}}, "kv_transfer_params", "invalid_value"),
        ({"extra_body": {"ec_transfer_params": {"x": 1}}}, "ec_transfer_params", "invalid_value"),
        ({"extra_body": {"cache_salt": "mine"}}, "cache_salt", "invalid_value"),
        ({"extra_body": {"vllm_xargs": {"a": 1}}}, "vllm_xargs", "invalid_value"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search", "invalid_value"),
        ({"cascade": {"treshold": 1}}, "cascade.treshold", "invalid_value"),
        ({"cascade": {"target_fraction": 0.3}}, "cascade.target_fraction", "invalid_value"),
        ({"cascade": {"policy": "random"}}, "cascade.target_fraction", "invalid_value"),
        ({"model": "big", "cascade": {"force": "small"}}, "cascade", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"messages": "hello"}, "messages", "invalid_value"),
        ({"max_tokens": 100_000}, "max_tokens", "invalid_value"),
        ({"top_p": 3.0}, "top_p", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs", "invalid_value"),
        (
            {
                "cascade": {"escalate_after_tokens": 3},
                "response_format": {"type": "json_object"},
            },
            "cascade.escalate_after_tokens",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_request_is_a_400_with_its_field(
    desk: Desk, kwargs: dict[str, Any], param: str, code: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.ask(stream=stream, **kwargs)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert desk.small.requests == desk.large.requests == []


async def test_a_long_prompt_is_refused_with_openais_code(desk: Desk) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 600}]
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.ask(messages=long)
    assert caught.value.code == "context_length_exceeded"


async def test_a_prompt_that_leaves_no_room_for_max_tokens_is_refused(desk: Desk) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 300}]
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.ask(messages=long, max_tokens=400)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_a_prompt_beyond_the_small_context_goes_to_the_large_model(desk: Desk) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 300}]
    answer = await desk.ask(messages=long)
    assert answer.choices[0].message.content == LARGE_TEXT
    assert cascade_of(answer)["decision"]["reason"] == "small_context"
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.ask(messages=long, cascade={"force": "small"})
    assert caught.value.code == "context_length_exceeded"


async def test_an_unknown_model_is_a_404(desk: Desk) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await desk.ask(model="gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engine_before_the_first_byte_is_a_503(desk: Desk, stream: bool) -> None:
    desk.large.fail_after = 0
    with pytest.raises(openai.InternalServerError) as caught:
        await desk.ask(stream=stream, model="big")
    assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
    assert await desk.settled()


async def test_a_dead_engine_after_the_first_byte_is_an_error_event(desk: Desk) -> None:
    desk.large.fail_after = 3
    got: list[str] = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in await desk.ask(stream=True, model="big"):
            got += [choice.delta.content or "" for choice in chunk.choices]
    assert len(desk.encode("".join(got))) == 3
    assert caught.value.code == "engine_unavailable"
    assert await desk.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_takes_too_long_is_a_504(
    desk: Desk, endpoint: tuple[Any, Any, dict[str, Any]], monkeypatch: Any, stream: bool
) -> None:
    monkeypatch.setattr(endpoint[0]._fronts["cascade"].client, "_timeout_s", 0.05)
    desk.small.hang_after = 0
    with pytest.raises(openai.InternalServerError) as caught:
        await desk.ask(stream=stream)
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")
    assert await desk.settled()


async def raw(desk: Desk, body: dict[str, Any], leave: asyncio.Event) -> AsyncIterator[bytes]:
    """Call the ASGI app by hand; the client leaves when `leave` is set."""
    out: asyncio.Queue[bytes | None] = asyncio.Queue()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await out.put(message["body"])

    scope = post_scope("/v1/chat/completions")
    task = asyncio.create_task(desk.app(scope, receive, send))
    task.add_done_callback(lambda _: out.put_nowait(None))
    try:
        while (part := await out.get()) is not None:
            yield part
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("moment", ["small", "handoff", "large"])
async def test_a_client_that_leaves_a_stream_leaves_nothing_open(desk: Desk, moment: str) -> None:
    if moment == "small":
        desk.small.hang_after = 2
    elif moment == "handoff":
        desk.port.begin_hangs = True
    else:
        desk.large.hang_after = 2
    body = {
        "model": "cascade",
        "messages": ASK,
        "stream": True,
        "cascade": {"escalate_after_tokens": 3},
    }
    leave = asyncio.Event()
    parts = 0
    async for _ in raw(desk, body, leave):
        parts += 1
        if parts == 2:
            leave.set()
    assert await desk.settled()


@pytest.mark.parametrize("moment", ["small", "handoff", "large"])
async def test_a_client_that_leaves_before_its_answer_leaves_nothing_open(
    desk: Desk, moment: str
) -> None:
    if moment == "small":
        desk.small.hang_after = 2
    elif moment == "handoff":
        desk.port.begin_hangs = True
    else:
        desk.large.hang_after = 2
    asking = asyncio.create_task(desk.ask(cascade={"escalate_after_tokens": 3}))
    while not (desk.small.requests if moment == "small" else desk.port.calls):
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert await desk.settled()
    if moment == "small":
        assert desk.small.released == [desk.small.requests[0].request_id]


async def test_a_body_that_is_no_json_is_a_400(desk: Desk) -> None:
    transport = httpx2.ASGITransport(app=desk.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v1/chat/completions", content=b"{")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request_error"
