"""The OpenAI surface over scripted engines, with the official client and no socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from cluster.config import CascadeConfig
from cluster.errors import HandoffError
from cluster.sources import resolve_model
from router.splice import Site
from tests.fakes import FakeHandoffPort, ScriptedEngine, step, steps

pytestmark = pytest.mark.vllm

SMALL_TEXT = "one two three four five six seven eight nine ten"
LARGE_TEXT = " ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE TEN"
ASK: list[Any] = [{"role": "user", "content": "Count to ten, please, and take your time."}]
EOS = 2
IM_END = "<|im_end|>"


@pytest.fixture(scope="session")
def model_folder() -> str:
    return resolve_model("quickstart:large")


@pytest.fixture(scope="session")
def encode(model_folder: str) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model_folder}/tokenizer.json")
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass
class Desk:
    """The endpoint with everything a test may script or look at."""

    encode: Callable[[str], list[int]]
    small: ScriptedEngine = field(default_factory=lambda: ScriptedEngine([]))
    large: ScriptedEngine = field(default_factory=lambda: ScriptedEngine([]))
    port: FakeHandoffPort = field(default_factory=FakeHandoffPort)
    app: Any = None
    site: Any = None

    def answer(self, small: str = SMALL_TEXT, large: str = LARGE_TEXT) -> None:
        """Script both models: the small one writes `small`, the large one `large`, then EOS."""
        self.small.script = steps([*self.encode(small), EOS])
        self.large.script = steps([*self.encode(large), EOS])

    def doubt(self, text: str, certain_tokens: int) -> None:
        """The small model writes `text` and doubts everything after `certain_tokens`."""
        ids = [*self.encode(text), EOS]
        self.small.script = [
            step(token, 8.0 if index < certain_tokens else 0.1) for index, token in enumerate(ids)
        ]

    @property
    def client(self) -> AsyncOpenAI:
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport)
        return AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
        )

    async def ask(self, model: str = "cascade", **kwargs: Any) -> Any:
        cascade = kwargs.pop("cascade", None)
        body = kwargs.pop("extra_body", {})
        if cascade is not None:
            body = {**body, "cascade": cascade}
        kwargs.setdefault("messages", ASK)
        return await self.client.chat.completions.create(model=model, extra_body=body, **kwargs)

    async def stream(self, **kwargs: Any) -> tuple[str, list[Any]]:
        """The streamed text of choice 0 and all chunks."""
        chunks = [chunk async for chunk in await self.ask(stream=True, **kwargs)]
        parts = [
            choice.delta.content or ""
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == 0
        ]
        return "".join(parts), chunks

    async def settled(self) -> bool:
        """Whether nothing is left open, once the background has ended."""
        await self.site.background.drain()
        return (self.small.open, self.large.open, self.port.open) == (0, 0, set())


@pytest.fixture(scope="session")
def endpoint(model_folder: str) -> tuple[Any, Any, dict[str, Any]]:
    """(service, config, switchboard): vLLM's front end is made once; engines change per test."""
    from cluster.telemetry import make_tracer
    from deployments.chat_service import ChatService
    from deployments.observer import Observer

    switchboard: dict[str, Any] = {}

    class Switched:
        def __init__(self, part: str) -> None:
            self._part = part

        def __getattr__(self, name: str) -> Any:
            return getattr(switchboard[self._part], name)

    model = {"accelerator": "cpu", "source": "quickstart:large", "dtype": "float32"}
    config = CascadeConfig.model_validate(
        {
            "small": {**model, "name": "little", "max_model_len_tokens": 256},
            "large": {
                **model,
                "name": "big",
                "max_model_len_tokens": 512,
                "tool_call_parser": "hermes",
            },
            "mapper": {"small_to_large": "identity"},
            "routing": {
                "margin_window_tokens": 2,
                "margin_threshold": 1.0,
                "hold_back_tokens": 2,
            },
            "router": {"request_timeout_s": 20},
        }
    )
    site = Site(
        small=Switched("small"),  # type: ignore[arg-type]
        large=Switched("large"),  # type: ignore[arg-type]
        handoffs=Switched("port"),  # type: ignore[arg-type]
        names={"small": "little", "large": "big"},
        small_context_tokens=256,
        min_handoff_tokens=8,
        hold_back_tokens=2,
    )
    observer = Observer(None, make_tracer(None))
    return ChatService(config, site, model_folder, observer), site, switchboard


@pytest.fixture
def desk(endpoint: tuple[Any, Any, dict[str, Any]], encode: Any) -> Iterator[Desk]:
    from deployments.openai_app import Service, build_http_app

    chat, site, switchboard = endpoint

    async def nothing() -> Any:
        return {}

    made = Desk(encode, site=site)
    made.app = build_http_app(Service(chat=chat, health=nothing, metrics=nothing))
    made.answer()
    switchboard |= {"small": made.small, "large": made.large, "port": made.port}
    yield made
    switchboard.clear()


def cascade_of(thing: Any) -> Any:
    return thing.model_extra["cascade"]


async def test_a_sure_small_model_answers_alone(desk: Desk) -> None:
    answer = await desk.ask()
    assert answer.choices[0].message.content == SMALL_TEXT
    assert (answer.model, answer.choices[0].finish_reason) == ("cascade", "stop")
    assert cascade_of(answer)["served_by"] == [
        {"model": "little", "tokens": len(desk.encode(SMALL_TEXT)) + 1}
    ]
    assert await desk.settled()


async def test_streaming_and_not_streaming_give_the_same_text(desk: Desk) -> None:
    whole = await desk.ask(cascade={"escalate_after_tokens": 4})
    text, chunks = await desk.stream(cascade={"escalate_after_tokens": 4})
    assert text == whole.choices[0].message.content == "one two three four" + LARGE_TEXT
    assert len([chunk for chunk in chunks if chunk.choices]) > 10


@pytest.mark.parametrize("stream", [False, True])
async def test_doubt_escalates_and_drops_what_was_held_back(desk: Desk, stream: bool) -> None:
    desk.doubt(SMALL_TEXT, certain_tokens=6)
    if stream:
        text, chunks = await desk.stream()
        info = next(c for c in chunks if c.choices and c.choices[0].finish_reason).model_extra[
            "cascade"
        ]
    else:
        answer = await desk.ask()
        text, info = answer.choices[0].message.content, cascade_of(answer)
    # Six sure tokens, doubt on the eighth: two wait in the buffer and two doubtful ones too.
    assert text == "one two three four five" + LARGE_TEXT
    assert info["decision"]["reason"] == "low_margin"
    assert info["handoff"]["path"] == "mapped"
    assert [segment["model"] for segment in info["served_by"]] == ["little", "big"]
    sent = desk.encode("one two three four five")
    assert desk.large.requests[0].prompt_token_ids[-len(sent) :] == tuple(sent)


async def test_the_cascade_object_is_on_the_last_chunk_alone(desk: Desk) -> None:
    _, chunks = await desk.stream(
        cascade={"escalate_after_tokens": 2}, stream_options={"include_usage": True}
    )
    carrying = [chunk for chunk in chunks if "cascade" in (chunk.model_extra or {})]
    assert [chunk.choices[0].finish_reason for chunk in carrying] == ["stop"]
    assert carrying[0] is [chunk for chunk in chunks if chunk.choices][-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_every_token_once(desk: Desk, stream: bool) -> None:
    desk.doubt(SMALL_TEXT, certain_tokens=6)
    if stream:
        _, chunks = await desk.stream(stream_options={"include_usage": True})
        usage = chunks[-1].usage
    else:
        usage = (await desk.ask()).usage
    assert usage.prompt_tokens == len(desk.small.requests[0].prompt_token_ids)
    assert usage.completion_tokens == 5 + len(desk.encode(LARGE_TEXT)) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_the_splice_ends_the_answer_unseen(
    desk: Desk, stream: bool
) -> None:
    kwargs: dict[str, Any] = {"stop": ["three four ONE T"], "cascade": {"escalate_after_tokens": 4}}
    if stream:
        text, chunks = await desk.stream(**kwargs)
        reason = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    else:
        choice = (await desk.ask(**kwargs)).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("one two ", "stop")
    assert desk.large.aborted == [desk.large.requests[0].request_id]
    assert desk.large.requests[0].sampling.stop == []
    assert await desk.settled()


@pytest.mark.parametrize(("after", "limit"), [(4, 9), (4, 4), (9, 5), (0, 3)])
async def test_max_tokens_is_exact_across_the_splice(desk: Desk, after: int, limit: int) -> None:
    answer = await desk.ask(max_tokens=limit, cascade={"escalate_after_tokens": after})
    assert answer.usage.completion_tokens == limit
    assert answer.choices[0].finish_reason == "length"


PARROT = "a 🦜 and then five six seven eight"


def inside_parrot(desk: Desk) -> int:
    """How many tokens of PARROT end within the bird: one less than those that complete it."""
    ids = desk.encode(PARROT)
    whole = desk.encode("a 🦜")
    assert ids[: len(whole)] == whole
    return len(whole) - 1


async def test_a_character_split_over_the_models_comes_out_whole(desk: Desk) -> None:
    ids, cut = desk.encode(PARROT), inside_parrot(desk)
    desk.small.script = steps([*ids, EOS])
    desk.large.script = steps([*ids[cut:], EOS])
    text, _ = await desk.stream(cascade={"escalate_after_tokens": cut})
    assert text == PARROT


async def test_doubt_in_a_split_character_waits_for_its_end(desk: Desk) -> None:
    ids, cut = [*desk.encode(PARROT), EOS], inside_parrot(desk)
    # Two tokens are held back: doubt at `cut + 2` comes when just `cut` tokens were sent.
    doubts = {cut + 1, cut + 2, len(ids) - 3, len(ids) - 2}
    desk.small.script = [step(t, 0.1 if i in doubts else 8.0) for i, t in enumerate(ids)]
    text, _ = await desk.stream()
    assert text == "a 🦜 and then five" + LARGE_TEXT


async def test_doubt_in_a_tool_call_waits_for_its_end(desk: Desk) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools: list[Any] = [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    ]
    ids = [*desk.encode(call), EOS]
    desk.small.script = steps(ids, 0.1)
    desk.small.script[:8] = steps(ids[:8], 8.0)
    answer = await desk.ask(tools=tools)
    choice = answer.choices[0]
    assert (choice.finish_reason, desk.large.requests) == ("tool_calls", [])
    assert choice.message.tool_calls[0].function.name == "add"


async def test_n_choices_are_n_cascades(desk: Desk) -> None:
    answer = await desk.ask(n=2, seed=7, temperature=1.0, cascade={"escalate_after_tokens": 3})
    texts = [choice.message.content for choice in answer.choices]
    assert texts == ["one two three" + LARGE_TEXT] * 2
    served = [choice.model_extra["cascade"]["served_by"][0] for choice in answer.choices]
    assert served == [{"model": "little", "tokens": 3}] * 2
    assert "cascade" not in (answer.model_extra or {})
    ids = [request.request_id for request in desk.small.requests + desk.large.requests]
    assert len(set(ids)) == 4
    assert sorted(request.sampling.seed for request in desk.small.requests) == [7, 8]
    salts = {request.cache_salt for request in desk.large.requests}
    assert len(salts) == 2


async def test_streamed_choices_each_end_with_their_cascade(desk: Desk) -> None:
    _, chunks = await desk.stream(n=2)
    carrying = [c.choices[0].index for c in chunks if "cascade" in (c.model_extra or {})]
    assert sorted(carrying) == [0, 1]


async def test_only_asked_logprobs_are_shown(desk: Desk) -> None:
    plain = await desk.ask()
    asked = await desk.ask(logprobs=True, top_logprobs=1)
    assert plain.choices[0].logprobs is None
    content = asked.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [1] * len(content)
    assert content[0].token == "one"
    assert {request.sampling.logprobs for request in desk.small.requests} == {2}


async def test_more_logprobs_reach_the_engine(desk: Desk) -> None:
    ids = [*desk.encode(SMALL_TEXT), EOS]
    desk.small.script = [step(token, top=5) for token in ids]
    answer = await desk.ask(logprobs=True, top_logprobs=5)
    assert desk.small.requests[0].sampling.logprobs == 5
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 5


async def test_min_tokens_counts_over_both_models(desk: Desk) -> None:
    await desk.ask(extra_body={"min_tokens": 6}, cascade={"escalate_after_tokens": 4})
    assert desk.small.requests[0].sampling.min_tokens == 4
    assert desk.large.requests[0].sampling.min_tokens == 2


async def test_every_handoff_failure_gives_the_cold_answer(desk: Desk) -> None:
    desk.port.begin_error = HandoffError("pool_full")
    answer = await desk.ask(cascade={"escalate_after_tokens": 4})
    assert answer.choices[0].message.content == "one two three four" + LARGE_TEXT
    handoff = cascade_of(answer)["handoff"]
    assert (handoff["path"], handoff["reason"]) == ("recompute", "pool_full")


@pytest.mark.parametrize(
    ("model", "engine", "text"), [("little", "small", SMALL_TEXT), ("big", "large", LARGE_TEXT)]
)
async def test_each_model_answers_under_its_own_name(
    desk: Desk, model: str, engine: str, text: str
) -> None:
    desk.doubt(SMALL_TEXT, certain_tokens=0)
    answer = await desk.ask(model=model)
    assert (answer.choices[0].message.content, answer.model) == (text, model)
    other = desk.large if engine == "small" else desk.small
    assert other.requests == []
    assert cascade_of(answer)["decision"]["reason"] == "named"


async def test_max_tokens_defaults_to_the_context_that_is_left(desk: Desk) -> None:
    await desk.ask(model="little")
    await desk.ask(model="big")
    small, large = desk.small.requests[0], desk.large.requests[0]
    assert small.max_tokens == 256 - len(small.prompt_token_ids)
    assert large.max_tokens == 512 - len(large.prompt_token_ids)


async def test_a_clients_request_id_is_no_internal_key(desk: Desk) -> None:
    await asyncio.gather(*(desk.ask(extra_body={"request_id": "mine"}) for _ in range(2)))
    assert "mine" not in "".join(request.request_id for request in desk.small.requests)
    assert await desk.settled()


@pytest.mark.parametrize(
    ("kwargs", "param", "code"),
    [
        ({"extra_body": {"kv_transfer_params": {"x": 1}}}, "kv_transfer_params", "invalid_value"),
        ({"extra_body": {"ec_transfer_params": {"x": 1}}}, "ec_transfer_params", "invalid_value"),
        ({"extra_body": {"cache_salt": "mine"}}, "cache_salt", "invalid_value"),
        ({"extra_body": {"vllm_xargs": {"a": 1}}}, "vllm_xargs", "invalid_value"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search", "invalid_value"),
        ({"cascade": {"treshold": 1}}, "cascade.treshold", "invalid_value"),
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

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
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


def test_engine_parameters_leave_text_to_the_front_end() -> None:
    from vllm import SamplingParams

    from deployments.frontend import engine_sampling

    asked = SamplingParams(
        n=3, stop=["x"], logprobs=0, min_tokens=5, max_tokens=50, temperature=0.5, seed=3
    )
    part = engine_sampling(asked, 2, 8)
    assert (part.n, part.stop, part.logprobs, part.detokenize) == (1, [], 2, False)
    assert (part.max_tokens, part.min_tokens, part.temperature, part.seed) == (8, 3, 0.5, 3)
    assert (asked.stop, asked.max_tokens) == (["x"], 50)
