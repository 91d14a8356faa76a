"""`explain: true`: every streamed event with content says what is known of its choice so far."""

from __future__ import annotations

import pytest

from tests.deployments.conftest import LARGE_TEXT, SMALL_TEXT, Desk

pytestmark = pytest.mark.vllm


async def test_every_content_event_says_who_wrote_so_far(desk: Desk) -> None:
    _, chunks = await desk.stream(cascade={"escalate_after_tokens": 4, "explain": True})
    content = [c for c in chunks if c.choices and c.choices[0].delta.content]
    infos = [chunk.model_extra["cascade"] for chunk in content]
    sent = [sum(part["tokens"] for part in info["served_by"]) for info in infos]
    assert sent == sorted(sent) and 1 <= sent[0] <= 4
    assert [part["model"] for part in infos[0]["served_by"]] == ["little"]
    assert [part["model"] for part in infos[-1]["served_by"]] == ["little", "big"]
    assert "cascade" not in (chunks[0].model_extra or {})


async def test_scores_come_once_each_also_those_of_dropped_tokens(desk: Desk) -> None:
    desk.doubt(SMALL_TEXT, certain_tokens=6)
    text, chunks = await desk.stream(cascade={"explain": True})
    assert text == "one two three four five" + LARGE_TEXT
    infos = [c.model_extra["cascade"] for c in chunks if "cascade" in (c.model_extra or {})]
    scores = [tuple(score) for info in infos for score in info["scores"]]
    assert [number for number, _ in scores] == list(range(1, 9))
    assert scores[-1][1] == pytest.approx(0.1)
    assert infos[0]["threshold"] == 1.0
    last = infos[-1]
    assert last["decision"]["reason"] == "low_margin" and last["handoff"]["path"] == "mapped"


async def test_each_choice_explains_itself(desk: Desk) -> None:
    _, chunks = await desk.stream(n=2, cascade={"explain": True})
    numbers: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk.choices:
            info = (chunk.model_extra or {}).get("cascade")
            numbers[choice.index] += [number for number, _ in info["scores"]] if info else []
    tokens = len(desk.encode(SMALL_TEXT))
    assert numbers == {0: list(range(1, tokens + 1)), 1: list(range(1, tokens + 1))}


async def test_completions_explain_themselves_too(desk: Desk) -> None:
    chunks = await desk.complete(stream=True, cascade={"explain": True})
    carrying = [chunk for chunk in chunks if "cascade" in (chunk.model_extra or {})]
    assert len(carrying) == len([c for c in chunks if c.choices])
    assert carrying[0].model_extra["cascade"]["scores"][0][0] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_explained_unasked(desk: Desk, stream: bool) -> None:
    if stream:
        _, chunks = await desk.stream()
        infos = [c.model_extra["cascade"] for c in chunks if "cascade" in (c.model_extra or {})]
    else:
        infos = [(await desk.ask()).model_extra["cascade"]]
    assert len(infos) == 1 and "scores" not in infos[0]
