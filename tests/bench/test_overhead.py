"""The overhead bench without Ray: its statistics, its engine and its barest ingress."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bench.overhead_engine import MARGIN_NATS, ScriptedEngine, bare_app
from bench.overhead_stats import Answer, added_ms, latency, percentile, share
from router.ports import EngineChunk, EngineRequest
from router.signals import margin


def wanted(max_tokens: int) -> EngineRequest:
    return EngineRequest(request_id="r", prompt_token_ids=(1, 2), max_tokens=max_tokens)


async def chunks_of(engine: ScriptedEngine, max_tokens: int) -> list[EngineChunk]:
    return [chunk async for chunk in engine.generate(wanted(max_tokens))]


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0], 99) == pytest.approx(2.98)
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 5.0], 0) == 1.0 and percentile([1.0, 5.0], 100) == 5.0


def test_latency_is_in_milliseconds_and_gaps_are_those_of_all_answers() -> None:
    found = latency([Answer([0.010, 0.020, 0.040], 0.041), Answer([0.030], 0.031)])
    assert found.requests == 2
    assert found.ttft_p50_ms == pytest.approx(20.0)
    assert found.gap_p50_ms == pytest.approx(15.0)
    assert found.total_p50_ms == pytest.approx(36.0)


def test_what_is_added_is_the_median_of_pairs_not_the_difference_of_medians() -> None:
    assert added_ms([0.1, 0.2, 0.9], [0.101, 0.203, 0.902]) == pytest.approx(2.0)
    # The medians are equal here, two of three pairs are 100 ms apart.
    assert added_ms([0.1, 0.2, 0.3], [0.2, 0.3, 0.1]) == pytest.approx(100.0)


def test_a_share_is_the_median_of_the_rounds() -> None:
    assert share([100.0, 50.0, 200.0], [90.0, 50.0, 190.0]) == pytest.approx(0.95)


async def test_the_engine_writes_its_script_over_and_over_to_the_length_asked_for() -> None:
    found = await chunks_of(ScriptedEngine([5, 6, 7], 1e-4, 1e9), 8)
    ids = [step.token_id for chunk in found for step in chunk.steps]
    assert ids == [5, 6, 7, 5, 6, 7, 5, 6]
    assert [chunk.finish_reason for chunk in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1].finish_reason == "length"
    assert margin(found[0].steps[0]) == pytest.approx(MARGIN_NATS)


async def test_tokens_that_are_due_together_leave_together() -> None:
    # One chunk per 50 ms while a token takes 5 ms: about ten in each after the first.
    found = await chunks_of(ScriptedEngine([5], 0.005, 20), 21)
    assert len(found[0].steps) >= 1
    assert len(found) <= 4
    assert sum(len(chunk.steps) for chunk in found) == 21


async def test_the_bare_ingress_sends_each_chunk_as_one_event() -> None:
    engine = ScriptedEngine([5, 6], 0.01, 1e9)
    transport = httpx.ASGITransport(app=bare_app(engine.generate))
    body: dict[str, Any] = {"request_id": "r", "prompt_token_ids": [1], "max_tokens": 3}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/generate", json=body)
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    data = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert sum((one["t"] for one in data), []) == [5, 6, 5]
    assert data[-1]["finish_reason"] == "length"
