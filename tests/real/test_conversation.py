"""Conversations on the deployed cascade: what a turn moves, both ways, over two routers."""

from __future__ import annotations

import asyncio
import uuid
from copy import deepcopy
from typing import Any

import httpx
import pytest

from tests.real.conftest import RealCascade
from tests.real.test_cascade import conversation, wait_empty

pytestmark = pytest.mark.real

BLOCK = 32
ANSWER_TOKENS = 40


class Talk:
    """One conversation with the endpoint, which is told only texts."""

    def __init__(self, cascade: RealCascade, messages: list[Any]) -> None:
        self._cascade = cascade
        self._id = uuid.uuid4().hex
        self._messages = messages

    async def say(self, text: str | None = None, **route: Any) -> dict[str, Any]:
        """The response body of the next turn."""
        if text is not None:
            self._messages.append({"role": "user", "content": text})
        async with httpx.AsyncClient(trust_env=False, timeout=240) as client:
            response = await client.post(
                f"{self._cascade.url}/v1/chat/completions",
                json={
                    "model": "cascade",
                    "messages": self._messages,
                    "temperature": 0,
                    "max_tokens": ANSWER_TOKENS,
                    "cascade": {"session_id": self._id, "recompute": False, **route},
                },
            )
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        self._messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        return answer


async def test_every_turn_moves_no_more_than_itself(cascade: RealCascade) -> None:
    talk = Talk(cascade, conversation(600, seed=41))
    first = await talk.say(escalate_after_tokens=20)
    before = first["usage"]["total_tokens"]
    per_token = (
        first["cascade"]["handoff"]["bytes_read"] / first["cascade"]["handoff"]["covered_tokens"]
    )
    for turn in range(2, 5):
        answer = await talk.say(f"And what of the number {turn}? " * 12, escalate_after_tokens=20)
        info, prompt = answer["cascade"]["handoff"], answer["usage"]["prompt_tokens"]
        assert answer["cascade"]["session"]["turn"] == turn
        assert (info["path"], info["reason"]) == ("mapped", None)
        new_tokens = prompt + 20 - before
        assert info["held_tokens"] >= before - 1 - BLOCK
        assert info["covered_tokens"] <= new_tokens + BLOCK
        assert info["bytes_read"] <= (new_tokens + 2 * BLOCK) * per_token
        before = answer["usage"]["total_tokens"]
    await asyncio.to_thread(wait_empty, cascade, timeout_s=20)


async def test_the_small_model_gets_what_the_large_one_wrote(cascade: RealCascade) -> None:
    talk = Talk(cascade, conversation(300, seed=42))
    large = await talk.say(force="large")
    assert [one["model"] for one in large["cascade"]["served_by"]] == ["large"]
    small = await talk.say("And then?", policy="small")
    borrowed = small["cascade"]["borrowed"]
    assert [one["model"] for one in small["cascade"]["served_by"]] == ["small"]
    assert (borrowed["path"], borrowed["reason"]) == ("mapped", None)
    assert borrowed["covered_tokens"] >= large["usage"]["prompt_tokens"] - BLOCK
    back = await talk.say("Please go on. " * 30, escalate_after_tokens=20)
    assert back["cascade"]["handoff"]["path"] == "mapped"
    assert back["cascade"]["handoff"]["held_tokens"] >= large["usage"]["total_tokens"] - 1 - BLOCK
    await asyncio.to_thread(wait_empty, cascade, timeout_s=20)


async def test_a_conversation_keeps_its_caches_on_another_router(cascade: RealCascade) -> None:
    original = cascade.document
    changed = deepcopy(original)
    changed["applications"][0]["deployments"].append({"name": "router", "num_replicas": 2})
    await asyncio.to_thread(cascade.deploy, changed)
    try:
        talk = Talk(cascade, conversation(300, seed=43))
        before = (await talk.say(escalate_after_tokens=20))["usage"]["total_tokens"]
        for turn in range(2, 8):
            answer = await talk.say("Tell me more of it. " * 12, escalate_after_tokens=20)
            assert answer["cascade"]["session"]["turn"] == turn
            assert answer["cascade"]["handoff"]["held_tokens"] >= before - 1 - BLOCK
            before = answer["usage"]["total_tokens"]
    finally:
        await asyncio.to_thread(cascade.deploy, original)
