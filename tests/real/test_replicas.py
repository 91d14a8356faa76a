"""Two replicas of each engine: any to any, and a conversation stays where its caches are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.real.conftest import RealCascade
from tests.real.test_cascade import conversation
from tests.real.test_conversation import BLOCK, Talk

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def doubled(cascade: RealCascade) -> Iterator[RealCascade]:
    original = cascade.document
    changed = deepcopy(original)
    changed["applications"][0]["deployments"] += [
        {"name": role, "num_replicas": 2} for role in ("small", "large")
    ]
    cascade.deploy(changed)
    yield cascade
    cascade.deploy(original)


def census(cascade: RealCascade, role: str) -> dict[int, dict[str, Any]]:
    """What every replica of an engine says of itself, by process."""
    from ray import serve

    handle = serve.get_deployment_handle(role, "cascade")
    answers = handle.broadcast("describe").results(timeout_s=60)
    return {answer["pid"]: answer for answer in answers}


async def test_conversations_spread_over_replicas_and_stay_there(doubled: RealCascade) -> None:
    async def talk(seed: int) -> list[dict[str, Any]]:
        one = Talk(doubled, conversation(200, seed))
        return [
            await one.say(escalate_after_tokens=8),
            await one.say("Tell me more of it. " * 16, escalate_after_tokens=8),
        ]

    before = await asyncio.to_thread(census, doubled, "small")
    assert len(before) == 2
    for seed in range(60, 66):
        first, second = await talk(seed)
        for answer in (first, second):
            handoff = answer["cascade"]["handoff"]
            assert (handoff["path"], handoff["reason"]) == ("mapped", None)
        held = second["cascade"]["handoff"]["held_tokens"]
        assert held >= first["usage"]["total_tokens"] - 1 - BLOCK
        # The small engine found its own part of the first turn again, too.
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    others = (Talk(doubled, conversation(130, seed)) for seed in range(80, 90))
    await asyncio.gather(*(one.say(escalate_after_tokens=0) for one in others))
    for role in ("small", "large"):
        replicas = await asyncio.to_thread(census, doubled, role)
        assert len(replicas) == 2
        assert all(one["requests"] > 0 for one in replicas.values())
        assert all(one["pinned_blocks"] == 0 for one in replicas.values())


async def test_no_first_handoff_is_cold(doubled: RealCascade) -> None:
    """Mappers shook hands with the new replicas before anybody needed them."""
    await asyncio.sleep(16)
    temperatures = [
        (await Talk(doubled, conversation(200, seed)).say(escalate_after_tokens=8))["cascade"][
            "handoff"
        ]["temperature"]
        for seed in range(70, 74)
    ]
    assert temperatures == ["warm"] * 4
