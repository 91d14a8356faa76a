"""Shapes of OpenAI's API that clients really send: content parts, tools, formats, options, ends."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.observer import Observer
from tests.deployments.conftest import ASK, EOS, SMALL_TEXT, Desk
from tests.deployments.raw import raw
from tests.fakes import steps

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}


async def test_text_parts_are_read_as_their_text(desk: Desk) -> None:
    question = ASK[0]["content"]
    await desk.ask(messages=[{"role": "user", "content": [{"type": "text", "text": question}]}])
    await desk.ask()
    parts, plain = desk.small.requests
    assert parts.prompt_token_ids == plain.prompt_token_ids


@pytest.mark.parametrize("content", [None, "", []])
async def test_an_assistant_that_only_called_a_tool_may_have_no_content(
    desk: Desk, content: Any
) -> None:
    messages = [
        *ASK,
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    answer = await desk.ask(messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == SMALL_TEXT


async def test_an_empty_user_message_is_answered(desk: Desk) -> None:
    answer = await desk.ask(messages=[{"role": "user", "content": ""}])
    assert answer.choices[0].message.content == SMALL_TEXT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user", "content": "a"}}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": {"text": "a"}}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": 1}]}]},
            "messages",
        ),
        ({}, "messages"),
        ({"messages": ASK, "stop": [""]}, "stop"),
        ({"messages": ASK, "top_k": -5}, "top_k"),
        ({"messages": ASK, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"messages": ASK, "tools": []}, "tools"),
        ({"messages": ASK, "n": "many"}, "n"),
        ({"messages": ASK, "n": 0}, "n"),
        ({"messages": ASK, "n": 1000}, "n"),
        ({"messages": ASK, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": ASK, "stream_options": {}}, "stream_options"),
        ({"messages": ASK, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": ASK, "cascade": {"session_id": "a b"}}, "cascade.session_id"),
        ({"messages": ASK, "cascade": {"session_id": ""}}, "cascade.session_id"),
        ({"messages": ASK, "cascade": {"session_id": "x" * 257}}, "cascade.session_id"),
    ],
)
async def test_a_fault_is_named_by_its_field_and_not_echoed(
    desk: Desk, body: dict[str, Any], param: str
) -> None:
    response = await desk.http.post(CHAT, json={"model": "cascade", **body})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "ChatCompletion" not in error["message"] and ASK[0]["content"] not in error["message"]
    assert desk.small.requests == []


@pytest.mark.parametrize("body", [{}, {"messages": ASK}, {"messages": ASK, "model": None}])
async def test_a_request_without_a_model_is_told_which_there_are(
    desk: Desk, body: dict[str, Any]
) -> None:
    response = await desk.http.post(CHAT, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
    assert "`cascade`, `little`, `big`" in response.json()["error"]["message"]


async def test_an_image_is_refused_by_a_text_model(desk: Desk) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError):
        await desk.ask(messages=[{"role": "user", "content": [image]}])


async def events_of(desk: Desk, path: str = CHAT, **body: Any) -> list[str]:
    prompt = {"messages": ASK} if path == CHAT else {"prompt": "Count:"}
    response = await desk.http.post(
        path, json={"model": "cascade", "stream": True, "max_tokens": 30, **prompt, **body}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    return [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_comes_once_at_the_end_and_only_when_asked_for(
    desk: Desk, path: str, options: Any
) -> None:
    *events, done = await events_of(
        desk, path, stream_options=options, cascade={"escalate_after_tokens": 4}
    )
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    wanted = bool(options and options.get("include_usage"))
    assert [chunk["choices"] for chunk in chunks if chunk.get("usage")] == [[]] * wanted
    assert [chunk for chunk in chunks if not chunk["choices"]] == chunks[len(chunks) - wanted :]
    if wanted:
        sent = sum(part["tokens"] for part in chunks[-2]["cascade"]["served_by"])
        assert chunks[-1]["usage"]["completion_tokens"] == sent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_over_several_tokens_leaks_nothing(desk: Desk, stream: bool) -> None:
    kwargs: dict[str, Any] = {"stop": ["ee fo"]}
    if stream:
        text, _ = await desk.stream(**kwargs)
    else:
        text = (await desk.ask(**kwargs)).choices[0].message.content
    assert text == "one two thr"
    assert await desk.settled()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_stop_string_over_the_escalation_leaks_nothing(desk: Desk, path: str) -> None:
    options = {"stop": ["four ONE"], "cascade": {"escalate_after_tokens": 4}}
    *events, _ = await events_of(desk, path, **options)
    choices = [c for event in events for c in json.loads(event)["choices"]]
    text = "".join((c.get("delta") or {}).get("content") or c.get("text") or "" for c in choices)
    assert (text, choices[-1]["finish_reason"]) == ("one two three ", "stop")
    assert await desk.settled()


@pytest.fixture
def spans(
    endpoint: tuple[Any, Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(endpoint[0], "_observer", Observer(None, provider.get_tracer("test")))
    return exporter


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_large_model_that_dies_on_the_way_is_one_error_event_and_a_failure(
    desk: Desk, spans: InMemorySpanExporter, path: str
) -> None:
    desk.large.fail_after = 10
    *events, done = await events_of(desk, path, cascade={"escalate_after_tokens": 4})
    errors = [json.loads(event)["error"] for event in events if event.startswith('{"error"')]
    assert [error["code"] for error in errors] == ["engine_unavailable"]
    assert (done, events[-1].startswith('{"error"')) == ("[DONE]", True)
    name = "chat cascade" if path == CHAT else "text_completion cascade"
    (span,) = (span for span in spans.get_finished_spans() if span.name == name)
    assert (span.status.is_ok, span.status.description) == (False, "ApiError")
    assert await desk.settled()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("moment", ["small", "handoff", "large"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_both_models_and_the_mapper(
    desk: Desk, spans: InMemorySpanExporter, path: str, moment: str, stream: bool
) -> None:
    if moment == "small":
        desk.small.hang_after = 2
    elif moment == "handoff":
        desk.port.begin_hangs = True
    else:
        desk.large.hang_after = 0
    prompt = {"messages": ASK} if path == CHAT else {"prompt": ASK[0]["content"]}
    body = {
        "model": "cascade",
        "stream": stream,
        "cascade": {"escalate_after_tokens": 3},
        "max_tokens": 30,
        **prompt,
    }

    def reached() -> bool:
        return bool(
            {"small": desk.small.requests, "handoff": desk.port.calls}.get(
                moment, desk.large.requests
            )
        )

    statuses = [status async for status in raw(desk.app, path, body, reached)]
    assert statuses == [200 if stream else 499]
    assert await desk.settled()
    name = "chat cascade" if path == CHAT else "text_completion cascade"
    (span,) = (span for span in spans.get_finished_spans() if span.name == name)
    assert span.status.description == "ClientClosed"


ADD: Any = {"type": "function", "function": {"name": "add"}}
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "bound", "reason"),
    [("auto", False, "tool_calls"), ("required", True, "tool_calls"), (ADD, True, "stop")],
)
async def test_a_tool_call_has_openais_shape(
    desk: Desk, choice: Any, bound: bool, reason: str
) -> None:
    desk.small.script = steps([*desk.encode(WRITTEN), EOS])
    answer = await desk.ask(tools=TOOLS, tool_choice=choice)
    (made,) = answer.choices[0].message.tool_calls
    assert (made.type, made.function.name) == ("function", "add")
    assert json.loads(made.function.arguments) == {"a": 1}
    assert made.id and answer.choices[0].finish_reason == reason
    assert (desk.small.requests[0].sampling.structured_outputs is not None) == bound


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_tool_call_cannot_change_models_in_the_middle(
    desk: Desk, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.ask(
            tools=TOOLS,
            tool_choice="required",
            stream=stream,
            cascade={"escalate_after_tokens": 3},
        )
    assert caught.value.param == "cascade.escalate_after_tokens"
    assert desk.small.requests == []


async def test_a_streamed_tool_call_adds_up(desk: Desk) -> None:
    desk.small.script = steps([*desk.encode(WRITTEN), EOS])
    text, chunks = await desk.stream(tools=TOOLS)
    pieces = [p for c in chunks for choice in c.choices for p in choice.delta.tool_calls or []]
    assert "".join(piece.function.name or "" for piece in pieces) == "add"
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == {"a": 1}
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert (text, reasons[-1]) == ("", "tool_calls")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "text"},
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
        },
    ],
)
async def test_a_response_format_reaches_the_engine(desk: Desk, response_format: Any) -> None:
    desk.small.script = steps([*desk.encode('{"a": 1}'), EOS])
    answer = await desk.ask(response_format=response_format)
    assert answer.choices[0].message.content == '{"a": 1}'
    bound = desk.small.requests[0].sampling.structured_outputs is not None
    assert bound == (response_format["type"] != "text")


async def test_a_session_comes_from_the_body_or_the_header(desk: Desk, monkeypatch: Any) -> None:
    seen: list[Any] = []
    front = desk.chat._fronts["cascade"].client
    opened = front.open
    monkeypatch.setattr(front, "open", lambda call: (seen.append(call), opened(call)))
    headers = {"x-session-id": "from-header"}
    body = {"model": "cascade", "messages": ASK}
    await desk.http.post(CHAT, json=body, headers=headers)
    body["cascade"] = {"session_id": "from-body"}
    await desk.http.post(CHAT, json=body, headers=headers)
    await desk.http.post(CHAT, json={"model": "cascade", "messages": ASK})
    names = [call.session.session_id for call in seen]
    assert names[:2] == ["from-header", "from-body"] and names[2].startswith("opening-")
    assert [call.tenant for call in seen] == [None] * 3
    refused = await desk.http.post(
        CHAT, json=body | {"cascade": None}, headers={"x-session-id": "a b"}
    )
    assert refused.json()["error"]["param"] == "x-session-id"


async def test_a_named_model_may_have_a_session(desk: Desk) -> None:
    body = {"model": "big", "messages": ASK}
    response = await desk.http.post(CHAT, json=body, headers={"x-session-id": "s"})
    assert response.json()["cascade"]["served_by"][0]["model"] == "big"
