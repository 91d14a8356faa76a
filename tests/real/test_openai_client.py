"""The deployed cascade as OpenAI's own client and `curl` meet it. Nothing here is faked."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from openai import (
    BadRequestError,
    DefaultHttpxClient,
    NotFoundError,
    OpenAI,
)

from tests.real.conftest import RealCascade
from tests.real.test_cascade import client, wait_empty

pytestmark = pytest.mark.real

ASK: list[Any] = [{"role": "user", "content": "What is bread made of?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def openai(cascade: RealCascade) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{cascade.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=240,
        http_client=DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


def route(**options: Any) -> dict[str, Any]:
    return {"cascade": options}


def test_a_chat_streamed_and_whole_is_the_same_chat(openai: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "cascade",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 16,
        "extra_body": route(force="small"),
    }
    whole = openai.chat.completions.create(**asked)
    chunks = list(
        openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 16
    (part,) = (whole.model_extra or {})["cascade"]["served_by"]
    assert part == {"model": "small", "tokens": 16}


def test_an_explained_stream_says_at_every_token_who_writes(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model="cascade",
        messages=ASK,
        max_tokens=12,
        stream=True,
        extra_body=route(escalate_after_tokens=5, explain=True),
    )
    content = [c for c in stream if c.choices and c.choices[0].delta.content]
    infos = [(chunk.model_extra or {})["cascade"] for chunk in content]
    assert [part["model"] for part in infos[0]["served_by"]] == ["small"]
    assert [part["model"] for part in infos[-1]["served_by"]] == ["small", "large"]
    assert infos[-1]["served_by"][0]["tokens"] == 5


def test_a_forced_tool_call_is_valid(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model="large",
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[TOOL],
        tool_choice="required",
        max_tokens=60,
        temperature=0,
    )
    calls = answer.choices[0].message.tool_calls or []
    assert calls and answer.choices[0].finish_reason == "tool_calls"
    for call in calls:
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def test_a_completion_continues_tokens_over_both_models(
    openai: OpenAI, cascade: RealCascade
) -> None:
    prompt = "Bread is made of flour, water and"
    ids = curl_json(cascade, "/tokenize", {"model": "cascade", "prompt": prompt})["tokens"]
    asked: dict[str, Any] = {
        "model": "cascade",
        "max_tokens": 10,
        "temperature": 0,
        "extra_body": route(escalate_after_tokens=4),
    }
    answer = openai.completions.create(prompt=ids, **asked)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 10)
    served = (answer.model_extra or {})["cascade"]["served_by"]
    assert [(part["model"], part["tokens"]) for part in served] == [("small", 4), ("large", 6)]
    assert not answer.choices[0].text.startswith(prompt)
    echoed = openai.completions.create(prompt=prompt, echo=True, **asked)
    assert echoed.choices[0].text.startswith(prompt)
    parts = openai.completions.create(prompt=[prompt, "Water is"], stream=True, **asked)
    assert {choice.index for part in parts for choice in part.choices} == {0, 1}


async def test_many_at_once_and_several_choices(cascade: RealCascade) -> None:
    async with client(cascade) as openai:
        answers = await asyncio.gather(
            *(
                openai.chat.completions.create(
                    model="cascade", messages=ASK, max_tokens=6, n=2, temperature=1, seed=seed
                )
                for seed in range(4)
            )
        )
    assert [len(answer.choices) for answer in answers] == [2] * 4
    infos = [(choice.model_extra or {}) for answer in answers for choice in answer.choices]
    assert all(info["cascade"]["served_by"] for info in infos)


def test_refusals_are_the_clients_own_errors(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError) as missing:
        openai.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as long:
        openai.completions.create(model="large", prompt="word " * 9000, max_tokens=5)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert "small" in {model.id for model in openai.models.list()}


def curl(cascade: RealCascade, path: str, *options: str, body: Any = None) -> str:
    data = [] if body is None else ["-H", "content-type: application/json", "-d", json.dumps(body)]
    command = ["curl", "-sS", "--noproxy", "*", *options, *data, f"{cascade.url}{path}"]
    # Not as text: Python would turn the line ends of HTTP into its own.
    return subprocess.run(command, capture_output=True, timeout=240, check=True).stdout.decode()


def curl_json(cascade: RealCascade, path: str, body: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(curl(cascade, path, body=body))
    return found


def test_a_stream_by_curl_is_events_and_then_done(cascade: RealCascade) -> None:
    body = {"model": "cascade", "messages": ASK, "max_tokens": 8, "stream": True}
    head, _, rest = curl(cascade, "/v1/chat/completions", "-i", "-N", body=body).partition(
        "\r\n\r\n"
    )
    assert " 200 " in head.splitlines()[0] and "text/event-stream" in head
    *events, done, end = rest.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(part["tokens"] for part in chunks[-1]["cascade"]["served_by"]) == 8


@pytest.mark.parametrize(
    ("path", "data", "status", "code"),
    [
        ("/v1/chat/completions", "{", 400, "invalid_request_error"),
        ("/v1/chat/completions", '{"model": "cascade", "messages": []}', 400, "invalid_value"),
        (
            "/v1/chat/completions",
            '{"model": "cascade", "messages": [], "stream": true}',
            400,
            "invalid_value",
        ),
        ("/v1/completions", '{"model": "none", "prompt": "a"}', 404, "model_not_found"),
        ("/nowhere", "{}", 404, "invalid_request_error"),
    ],
)
def test_errors_by_curl_come_before_the_answer_in_openais_envelope(
    cascade: RealCascade, path: str, data: str, status: int, code: str
) -> None:
    out = curl(cascade, path, "-i", "-d", data)
    head, _, body = out.partition("\r\n\r\n")
    assert f" {status} " in head.splitlines()[0] + " "
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == code


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [4, 40])
def test_a_curl_that_is_stopped_leaves_nothing_in_the_engines(
    cascade: RealCascade, stream: bool, after: int
) -> None:
    body = {
        "model": "cascade",
        "messages": ASK,
        "max_tokens": 4000,
        "stream": stream,
        "ignore_eos": True,
        **route(escalate_after_tokens=after),
    }
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        curl(cascade, "/v1/chat/completions", "--max-time", "2", body=body)
    assert stopped.value.returncode == 28  # curl's timeout
    wait_empty(cascade, timeout_s=30)


def test_page_document_and_statistics_are_there(cascade: RealCascade) -> None:
    page = curl(cascade, "/", "-i")
    assert "content-security-policy: default-src 'self'" in page.lower()
    assert "<title>kvcascade</title>" in page
    document = curl_json(cascade, "/openapi.json")
    assert "/v1/completions" in document["paths"]
    curl_json(cascade, "/v1/completions", {"model": "small", "prompt": "a", "max_tokens": 1})
    assert curl_json(cascade, "/v1/cascade/stats")["requests"] >= 1


@pytest.mark.parametrize(
    "extreme",
    [
        {"top_k": 2**62},
        {"repetition_penalty": 1e300},
        {"seed": -(2**63)},
        {"logit_bias": {"0": 1e300}},
        {"min_p": 1},
        {"logprobs": 20, "temperature": 2},
    ],
)
def test_extreme_numbers_harm_no_engine(cascade: RealCascade, extreme: dict[str, Any]) -> None:
    for model in ("small", "large"):
        body = {"model": model, "prompt": "Bread", "max_tokens": 3, **extreme}
        found = curl_json(cascade, "/v1/completions", body)
        assert "choices" in found or found["error"]["type"] == "invalid_request_error", found
        plain = curl_json(
            cascade, "/v1/completions", {**body, "top_k": 1, **dict.fromkeys(extreme)}
        )
        assert plain["choices"], plain
