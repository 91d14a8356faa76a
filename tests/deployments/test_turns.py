"""Conversations through the endpoint: whose token ids count, and what each turn may reuse."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from router.conversations import common_prefix_tokens
from tests.deployments.conftest import ASK, EOS, Desk, cascade_of
from tests.fakes import steps

pytestmark = pytest.mark.vllm


def then(answer: Any, text: str) -> list[Any]:
    """The messages of the next turn, as a client sends them."""
    content = answer.choices[0].message.content
    return [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": text}]


async def two_turns(desk: Desk, ids: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(what the models read and wrote in turn one, the prompt of turn two)."""
    desk.small.script = steps([*ids, EOS])
    route = {"session_id": uuid.uuid4().hex, "force": "small"}
    first = await desk.ask(cascade=route)
    await desk.ask(messages=then(first, "And now?"), cascade=route)
    one, two = (request.prompt_token_ids for request in desk.small.requests[-2:])
    return (*one, *ids, EOS), two


async def test_a_word_that_was_written_in_pieces_is_not_read_as_one_token(desk: Desk) -> None:
    pieces = [*desk.encode("one thr"), *desk.encode("ee")]
    assert desk.encode("one three") != pieces
    history, prompt = await two_turns(desk, pieces)
    assert prompt[: len(history)] == history
    tokenizer = desk.chat._fronts["cascade"].client.renderer.get_tokenizer()
    assert tokenizer.decode(prompt).count("one three") == 1


async def test_a_text_that_a_client_changed_is_taken_as_it_says(desk: Desk) -> None:
    desk.answer(small="one two three")
    route = {"session_id": uuid.uuid4().hex, "force": "small"}
    first = await desk.ask(cascade=route)
    messages = then(first, "And now?")
    messages[1]["content"] = "one two four"
    await desk.ask(messages=messages, cascade=route)
    one, two = (request.prompt_token_ids for request in desk.small.requests[-2:])
    history = (*one, *desk.encode("one two three"), EOS)
    same = common_prefix_tokens(history, two)
    assert same == len(one) + len(desk.encode("one two"))
    assert desk.encode(" four")[0] == two[same]


async def test_only_the_common_prefix_of_a_history_that_was_rendered_differently_counts(
    desk: Desk,
) -> None:
    # As templates do that show a model's thinking in its last answer alone.
    desk.answer(large="<think>hmm</think>one two three")
    session_id = uuid.uuid4().hex
    first = await desk.ask(cascade={"session_id": session_id, "force": "large"})
    messages = then(first, "Please go on for a while, I have time. " * 3)
    messages[1]["content"] = messages[1]["content"].split("</think>")[-1]
    second = await desk.ask(
        messages=messages, cascade={"session_id": session_id, "escalate_after_tokens": 3}
    )
    prompt = desk.large.requests[0].prompt_token_ids
    assert desk.port.held_tokens == [len(prompt)]
    assert desk.port.calls[0][1][: len(prompt)] == prompt
    assert cascade_of(second)["session"]["turn"] == 2


async def test_a_turn_without_an_id_finds_its_conversation_by_its_opening(desk: Desk) -> None:
    opening = [{"role": "system", "content": uuid.uuid4().hex}, *ASK]
    first = await desk.ask(messages=opening, cascade={"force": "large"})
    more = [
        *opening,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    second = await desk.ask(messages=more, cascade={"force": "large"})
    again = await desk.ask(messages=opening, cascade={"force": "large"})
    turns = [cascade_of(answer)["session"]["turn"] for answer in (first, second, again)]
    assert turns == [1, 2, 1]
    salts = [request.cache_salt for request in desk.large.requests[-3:]]
    assert salts[0] == salts[1] != salts[2]


async def test_the_header_names_the_conversation_and_the_body_wins(desk: Desk) -> None:
    header, body = uuid.uuid4().hex, uuid.uuid4().hex
    client = desk.client.with_options(default_headers={"x-session-id": header})
    one = await client.chat.completions.create(model="cascade", messages=ASK)
    two = await client.chat.completions.create(
        model="cascade", messages=ASK, extra_body={"cascade": {"session_id": body}}
    )
    assert [cascade_of(answer)["session"]["id"] for answer in (one, two)] == [header, body]


async def test_a_named_model_shares_the_exact_cache_and_has_no_session(desk: Desk) -> None:
    answer = await desk.ask(model="big")
    assert cascade_of(answer)["session"] is None
    assert desk.large.requests[-1].cache_salt is None


async def test_only_the_first_of_several_choices_is_remembered(desk: Desk) -> None:
    route = {"session_id": uuid.uuid4().hex}
    await desk.ask(n=2, cascade=route)
    answer = await desk.ask(cascade=route)
    assert cascade_of(answer)["session"]["turn"] == 2
