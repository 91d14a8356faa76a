"""Token ids of record against what a client's text becomes when it is tokenised again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.history import adopt, session_of


def decode(ids: list[int]) -> str:
    """Every id is a letter; 1000 and above are two letters, as a merge would be."""
    return "".join(chr(i) if i < 1000 else chr(i - 1000) * 2 for i in ids)


NEWLINE, TWO = 10, 1010


def test_equal_ids_stay_as_they_are() -> None:
    assert adopt([65, 66], [65, 66, 67], decode) == (65, 66, 67)
    assert adopt([65, 66, 67], [65, 66], decode) == (65, 66)


def test_two_newlines_that_a_model_wrote_apart_stay_apart() -> None:
    history = [65, NEWLINE, NEWLINE, 66]
    rendered = [65, TWO, 66, 67, 68]
    assert adopt(history, rendered, decode) == (65, NEWLINE, NEWLINE, 66, 67, 68)
    assert adopt(rendered[:3], [*history, 67], decode) == (65, TWO, 66, 67)


def test_another_text_keeps_its_own_ids() -> None:
    history = [65, NEWLINE, NEWLINE, 66]
    rendered = [65, TWO, 69, 67]
    assert adopt(history, rendered, decode) == tuple(rendered)


def test_a_token_across_the_end_of_the_history_keeps_the_rendered_ids() -> None:
    history = [65, NEWLINE, NEWLINE, 66]
    rendered = [65, TWO, 1066, 67]
    assert adopt(history, rendered, decode) == tuple(rendered)


def test_a_long_history_is_replaced_only_up_to_its_end() -> None:
    history = [65] * 50 + [NEWLINE, NEWLINE] + [66] * 50
    rendered = [65] * 50 + [TWO] + [66] * 50 + [67] * 30
    assert adopt(history, rendered, decode) == (*history, *[67] * 30)


def chat(*messages: dict[str, Any], tools: Any = None) -> SimpleNamespace:
    return SimpleNamespace(messages=list(messages), tools=tools)


SYSTEM = {"role": "system", "content": "be brief"}
HELLO = {"role": "user", "content": "hello"}


def key(request: Any, tenant: str | None = None, session_id: str | None = None) -> str:
    found = session_of(request, tenant, session_id)
    assert found is not None
    return found.key


def test_later_turns_of_a_chat_have_the_key_of_its_first() -> None:
    more = ({"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"})
    assert key(chat(SYSTEM, HELLO)) == key(chat(SYSTEM, HELLO, *more))
    later = session_of(chat(SYSTEM, HELLO, *more), None, None)
    assert later is not None and later.answers == 1


@pytest.mark.parametrize(
    "other",
    [
        chat(HELLO),
        chat(SYSTEM, {"role": "user", "content": "hello!"}),
        chat(SYSTEM, HELLO, tools=[{"type": "function", "function": {"name": "f"}}]),
    ],
)
def test_another_opening_is_another_conversation(other: Any) -> None:
    assert key(chat(SYSTEM, HELLO)) != key(other)


def test_an_id_counts_more_than_the_opening_and_less_than_the_tenant() -> None:
    assert key(chat(HELLO), None, "a") == key(chat(SYSTEM), None, "a")
    assert key(chat(HELLO), None, "a") != key(chat(HELLO), "t", "a")


def test_a_text_completion_is_of_a_conversation_only_when_it_says_so() -> None:
    assert session_of(SimpleNamespace(prompt="once"), None, None) is None
    assert session_of(SimpleNamespace(prompt=["once", "twice"]), None, "a") is None
    assert session_of(SimpleNamespace(prompt=[5, 6, 7]), None, "a") is not None
