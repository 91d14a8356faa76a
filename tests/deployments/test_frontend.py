"""Answers of the OpenAI surface: spliced text, usage, logprobs, tools, choices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.errors import HandoffError
from tests.deployments.conftest import EOS, LARGE_TEXT, SMALL_TEXT, Desk, cascade_of
from tests.fakes import step, steps

pytestmark = pytest.mark.vllm


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


def test_engine_parameters_leave_text_to_the_front_end() -> None:
    from vllm import SamplingParams

    from deployments.engine_format import engine_sampling

    asked = SamplingParams(
        n=3, stop=["x"], logprobs=0, min_tokens=5, max_tokens=50, temperature=0.5, seed=3
    )
    part = engine_sampling(asked, 2, 8)
    assert (part.n, part.stop, part.logprobs, part.detokenize) == (1, [], 2, False)
    assert (part.max_tokens, part.min_tokens, part.temperature, part.seed) == (8, 3, 0.5, 3)
    assert (asked.stop, asked.max_tokens) == (["x"], 50)


async def test_a_request_chooses_its_own_policy(desk: Desk) -> None:
    answer = await desk.ask(cascade={"policy": "random", "target_fraction": 1.0})
    decision = (answer.model_extra or {})["cascade"]["decision"]
    assert (decision["action"], decision["reason"]) == ("large", "random")
    assert desk.small.requests == []
