"""Text completions, `/tokenize` and `/detokenize` over scripted engines."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.deployments.conftest import ASK, LARGE_TEXT, SMALL_TEXT, Desk, cascade_of

pytestmark = pytest.mark.vllm

SPLICED = "one two three four" + LARGE_TEXT


async def test_a_completion_says_who_wrote_it(desk: Desk) -> None:
    answer = await desk.complete(cascade={"escalate_after_tokens": 4})
    assert (answer.object, answer.model) == ("text_completion", "cascade")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (SPLICED, "stop")
    assert [part["model"] for part in cascade_of(answer)["served_by"]] == ["little", "big"]
    assert answer.usage.completion_tokens == 4 + len(desk.encode(LARGE_TEXT)) + 1
    assert await desk.settled()


async def test_a_streamed_completion_has_the_same_text_and_ends_with_its_cascade(
    desk: Desk,
) -> None:
    chunks = await desk.complete(
        stream=True,
        stream_options={"include_usage": True},
        cascade={"escalate_after_tokens": 4},
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == SPLICED
    assert [chunk.choices for chunk in chunks if chunk.usage] == [[]]
    carrying = [chunk for chunk in chunks if "cascade" in (chunk.model_extra or {})]
    assert [chunk.choices[0].finish_reason for chunk in carrying] == ["stop"]


async def test_token_ids_reach_the_engine_unchanged(desk: Desk) -> None:
    ids = desk.encode("Count to ten, please.")
    answer = await desk.complete(prompt=ids)
    assert desk.small.requests[0].prompt_token_ids == tuple(ids)
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == (SMALL_TEXT, len(ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_prompt_has_n_choices_and_each_its_cascade(desk: Desk, stream: bool) -> None:
    prompts = ["Count to ten, please:", "Count once more, and take your time:"]
    got = await desk.complete(prompt=prompts, n=2, stream=stream)
    texts = dict.fromkeys(range(4), "")
    carrying = []
    for part in got if stream else [got]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            holder = part if stream else choice
            if cascade := (holder.model_extra or {}).get("cascade"):
                carrying.append((choice.index, cascade["served_by"][0]["model"]))
    assert texts == dict.fromkeys(range(4), SMALL_TEXT)
    assert sorted(carrying) == [(index, "little") for index in range(4)]
    asked = sorted(len(request.prompt_token_ids) for request in desk.small.requests)
    assert len(set(asked)) == 2 and asked[0] == asked[1] and asked[2] == asked[3]
    if not stream:
        assert got.usage.prompt_tokens == asked[0] + asked[2]
    assert await desk.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer(desk: Desk, stream: bool) -> None:
    got = await desk.complete(prompt="Say it:", echo=True, stream=stream)
    parts = got if stream else [got]
    assert "".join(c.text for part in parts for c in part.choices) == "Say it:" + SMALL_TEXT


async def test_echoed_token_ids_come_back_as_text(desk: Desk) -> None:
    answer = await desk.complete(prompt=desk.encode("Say it:"), echo=True)
    assert answer.choices[0].text == "Say it:" + SMALL_TEXT


async def test_logprobs_have_the_shape_of_completions(desk: Desk) -> None:
    logprobs = (await desk.complete(logprobs=1)).choices[0].logprobs
    assert logprobs.tokens[0] == "one"
    assert logprobs.text_offset[:2] == [0, 3]
    assert len(logprobs.top_logprobs) == len(logprobs.tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "the end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"n": 50, "prompt": ["a", "b", "c"]}, "n"),
        ({"extra_body": {"prompt_embeds": "AAAA"}}, "prompt_embeds"),
        ({"extra_body": {"cache_salt": "mine"}}, "cache_salt"),
        ({"cascade": {"treshold": 1}}, "cascade.treshold"),
    ],
)
async def test_a_wrong_completion_is_a_400_with_its_field(
    desk: Desk, kwargs: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.complete(stream=stream, **kwargs)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
    assert desk.small.requests == desk.large.requests == []


@pytest.mark.parametrize("kwargs", [{"max_tokens": 5}, {"max_tokens": 400}])
async def test_a_prompt_beyond_the_context_has_openais_code(
    desk: Desk, kwargs: dict[str, Any]
) -> None:
    words = 600 if kwargs["max_tokens"] == 5 else 300
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.complete(prompt="word " * words, **kwargs)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_a_token_outside_the_vocabulary_is_a_400(desk: Desk) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await desk.complete(prompt=[10**9])
    assert "vocabulary" in caught.value.message


async def test_a_dead_engine_in_one_of_several_prompts_ends_them_all(desk: Desk) -> None:
    desk.large.fail_after = 3
    with pytest.raises(openai.InternalServerError) as caught:
        await desk.complete(model="big", prompt=["one", "two"])
    assert caught.value.code == "engine_unavailable"
    assert await desk.settled()


async def test_tokenized_messages_are_what_the_engine_reads(desk: Desk) -> None:
    response = await desk.http.post("/tokenize", json={"model": "cascade", "messages": ASK})
    await desk.ask()
    assert tuple(response.json()["tokens"]) == desk.small.requests[0].prompt_token_ids
    assert response.json()["max_model_len"] == 512


async def test_text_comes_back_from_its_tokens(desk: Desk) -> None:
    text = "a 🦜 and then five"
    body = {"model": "little", "prompt": text, "add_special_tokens": False}
    tokenized = (await desk.http.post("/tokenize", json=body)).json()
    assert tokenized["tokens"] == desk.encode(text)
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), 256)
    body = {"model": "little", "tokens": tokenized["tokens"]}
    assert (await desk.http.post("/detokenize", json=body)).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "gpt-4", "prompt": "a"}, 404, "model"),
        ("/tokenize", {"prompt": "a"}, 404, "model"),
        ("/tokenize", {"model": "big"}, 400, "prompt"),
        ("/tokenize", {"model": "big", "messages": 1}, 400, "messages"),
        ("/detokenize", {"model": "big", "tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"model": "big", "tokens": [2**40]}, 400, "tokens"),
    ],
)
async def test_a_wrong_text_or_token_is_refused_with_its_field(
    desk: Desk, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = await desk.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
