"""Another routing is followed by answers that begin; nothing is restarted and nothing is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from bench.upgrade_runs import replicas
from tests.real.conftest import RealCascade
from tests.real.test_cascade import client, complete, conversation

pytestmark = pytest.mark.real


@pytest.fixture
def original(cascade: RealCascade) -> Iterator[dict[str, Any]]:
    document = cascade.document
    yield document
    cascade.deploy(document)


def routed(document: dict[str, Any], routing: dict[str, Any]) -> dict[str, Any]:
    """The document with a router that follows something else than its `args`."""
    changed = deepcopy(document)
    entry = {"name": "router", "user_config": {"routing": routing}}
    changed["applications"][0]["deployments"].append(entry)
    return changed


def stats(cascade: RealCascade) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{cascade.url}/v1/cascade/stats", timeout=30).json()
    return answer


async def test_routing_changes_while_answers_are_written(
    cascade: RealCascade, original: dict[str, Any]
) -> None:
    before = await asyncio.to_thread(replicas)
    names = {role: original["applications"][0]["args"][role]["name"] for role in ("small", "large")}
    await asyncio.to_thread(cascade.deploy, routed(original, {"policy": "small"}))
    async with client(cascade) as openai:
        begun = asyncio.create_task(
            openai.chat.completions.create(
                model="cascade",
                messages=conversation(200, 910),
                max_tokens=600,
                extra_body={"min_tokens": 600},
            )
        )
        await asyncio.sleep(1.0)
        await asyncio.to_thread(cascade.deploy, routed(original, {"policy": "large"}))
        assert not begun.done()
        answer = await complete(cascade, conversation(200, 911), max_tokens=8)
        writers = [
            [part["model"] for part in one.cascade["served_by"]] for one in (await begun, answer)
        ]
    assert writers == [[names["small"]], [names["large"]]]
    assert (await begun).usage.completion_tokens == 600
    assert await asyncio.to_thread(replicas) == before
    seen = await asyncio.to_thread(stats, cascade)
    assert (seen["policy"], seen["refused_routing"]) == ("large", None)


async def test_a_routing_that_cannot_be_followed_is_refused_and_said(
    cascade: RealCascade, original: dict[str, Any]
) -> None:
    policy = (await asyncio.to_thread(stats, cascade))["policy"]
    wrong = {"calibration": "/missing/calibration.json"}
    await asyncio.to_thread(cascade.deploy, routed(original, wrong))
    seen = await asyncio.to_thread(stats, cascade)
    assert seen["policy"] == policy and "/missing/calibration.json" in seen["refused_routing"]
    assert (await complete(cascade, conversation(200, 912), max_tokens=4)).choices
