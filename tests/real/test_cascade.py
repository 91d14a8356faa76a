"""The deployed cascade as its users and its operators meet it. Nothing here is faked."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

from tests.real.conftest import RealCascade

pytestmark = pytest.mark.real

ASK: list[Any] = [{"role": "user", "content": "What is bread made of?"}]


def client(cascade: RealCascade) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{cascade.url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=240,
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )


def conversation(tokens: int, seed: int) -> list[Any]:
    """About so many tokens of talk, different from its first word on for every seed."""
    from transformers import AutoTokenizer

    from cluster.quickstart.text import long_conversation_messages
    from cluster.sources import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("quickstart:large"))
    return list(long_conversation_messages(tokens, tokenizer, seed))


async def complete(cascade: RealCascade, messages: list[Any], **options: Any) -> Any:
    extra = options.pop("route", None)
    if extra is not None and "escalate_after_tokens" in extra:
        extra = {"recompute": False, **extra}  # never mind what would be quicker
    async with client(cascade) as openai:
        return await openai.chat.completions.create(
            model=options.pop("model", "cascade"),
            messages=messages,
            temperature=0,
            max_tokens=options.pop("max_tokens", 12),
            extra_body={"cascade": extra} if extra else None,
            **options,
        )


def wait_empty(cascade: RealCascade, *, timeout_s: float) -> None:
    """Both engines hold no block for a handoff and could give out their whole pool again."""
    deadline = time.monotonic() + timeout_s
    while True:
        engines = [cascade.describe(role) for role in ("small", "large")]
        mapper = cascade.describe("mapper")
        held = sum(one["pinned_blocks"] + one["loading_blocks"] for one in engines)
        # vLLM keeps one block for itself.
        used = sum(one["num_blocks"] - 1 - one["free_blocks"] for one in engines)
        if held == used == mapper["pool_in_use_bytes"] == mapper["running"] == 0:
            return
        assert time.monotonic() < deadline, f"still held: {engines} {mapper}"
        time.sleep(0.2)


def test_models_and_mapper_run_on_nodes_of_their_own(cascade: RealCascade) -> None:
    nodes = {cascade.describe(role)["node_id"] for role in ("small", "large", "mapper")}
    assert len(nodes) == 3


async def test_an_escalated_answer_continues_on_mapped_kv(cascade: RealCascade) -> None:
    answer = await complete(
        cascade, conversation(600, 1), route={"escalate_after_tokens": 5}, max_tokens=20
    )
    served = [(part["model"], part["tokens"]) for part in answer.cascade["served_by"]]
    handoff = answer.cascade["handoff"]
    assert served[0] == ("small", 5) and served[1][0] == "large"
    assert handoff["path"] == "mapped" and handoff["reason"] is None
    prompt_tokens = answer.usage.prompt_tokens
    assert 500 < prompt_tokens < 700
    # Everything but the last block of prompt and sent tokens came over the network.
    assert handoff["covered_tokens"] == (prompt_tokens + 5 - 1) // 32 * 32
    assert handoff["reread_tokens"] == prompt_tokens + 5 - handoff["covered_tokens"]
    # 30 layers, 3 KV heads, keys and values of 64 elements in bf16.
    assert handoff["bytes_written"] == handoff["covered_tokens"] * 30 * 3 * 2 * 64 * 2
    assert set(handoff["stages_ms"]) >= {"ticket", "queue", "read", "map", "write", "admit"}
    assert handoff["handoff_ms"] >= handoff["stages_ms"]["ticket"]


async def test_a_stream_shows_one_answer_and_ends_with_the_account(cascade: RealCascade) -> None:
    async with client(cascade) as openai:
        stream = await openai.chat.completions.create(
            model="cascade",
            messages=conversation(300, 2),
            temperature=0,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"cascade": {"escalate_after_tokens": 4}},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    last = next(chunk for chunk in reversed(chunks) if chunk.choices)
    assert text
    assert last.choices[0].finish_reason in ("length", "stop")
    assert last.cascade["handoff"]["path"] == "mapped"  # type: ignore[attr-defined]
    tokens = sum(part["tokens"] for part in last.cascade["served_by"])  # type: ignore[attr-defined]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == tokens


async def test_recomputing_twice_gives_the_same_cold_answer(cascade: RealCascade) -> None:
    messages = conversation(300, 3)
    answers = [
        await complete(cascade, messages, route={"escalate_after_tokens": 4, "recompute": True})
        for _ in range(2)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].cascade["handoff"]["path"] == "recompute"
    assert answers[0].cascade["handoff"]["reason"] == "requested"


async def test_mapped_blocks_never_serve_an_exact_request(cascade: RealCascade) -> None:
    messages = conversation(400, 4)
    cold = await complete(cascade, messages, model="large")
    await complete(cascade, messages, route={"escalate_after_tokens": 0})
    again = await complete(cascade, messages, model="large")
    assert again.choices[0].message.content == cold.choices[0].message.content


@pytest.mark.parametrize("model", ["small", "large"])
async def test_both_models_answer_by_their_own_names(cascade: RealCascade, model: str) -> None:
    answer = await complete(cascade, ASK, model=model)
    assert [part["model"] for part in answer.cascade["served_by"]] == [model]
    assert answer.cascade["handoff"] is None


async def test_a_clients_own_transfer_parameters_are_refused(cascade: RealCascade) -> None:
    async with client(cascade) as openai:
        with pytest.raises(BadRequestError) as caught:
            await openai.chat.completions.create(
                model="cascade",
                messages=ASK,
                extra_body={"kv_transfer_params": {"do_remote_prefill": True}},
            )
    assert caught.value.body["param"] == "kv_transfer_params"  # type: ignore[index]


def test_handoffs_are_counted_and_timed_by_stage(cascade: RealCascade) -> None:
    asyncio.run(complete(cascade, conversation(300, 5), route={"escalate_after_tokens": 2}))
    deadline = time.monotonic() + 60
    while True:
        # Ray collects metrics from its processes every few seconds.
        text = httpx.get(f"{cascade.url}/metrics", trust_env=False).text
        stages = set(re.findall(r'kvcascade_handoff_seconds_count{[^}]*stage="(\w+)"', text))
        if {"ticket", "read", "map", "write", "admit", "total"} <= stages:
            break
        assert time.monotonic() < deadline, f"only {stages}"
        time.sleep(2)
    assert re.search(r'kvcascade_handoff_total{[^}]*outcome="mapped"[^}]*} [1-9]', text)
    assert re.search(r'kvcascade_handoff_bytes_total{[^}]*direction="written"[^}]*} [1-9]', text)


def test_health_names_every_part(cascade: RealCascade) -> None:
    answer = httpx.get(f"{cascade.url}/health", trust_env=False, timeout=60)
    assert answer.status_code == 200
    assert answer.json() == dict.fromkeys(
        ("small", "large", "mapper", "mapper_back", "sessions"), "ok"
    )


async def test_twenty_clients_that_leave_during_their_handoff_leak_nothing(
    cascade: RealCascade,
) -> None:
    rng = random.Random(0)

    async def leave(seed: int) -> None:
        async with client(cascade) as openai:
            create = openai.chat.completions.create(
                model="cascade",
                messages=conversation(400, 100 + seed),
                max_tokens=64,
                stream=True,
                extra_body={"cascade": {"escalate_after_tokens": 1, "recompute": False}},
            )
            try:
                async with asyncio.timeout(rng.uniform(0.2, 6.0)):
                    async for _ in await create:
                        pass
            except TimeoutError:
                pass

    await asyncio.gather(*(leave(seed) for seed in range(20)))
    await asyncio.to_thread(wait_empty, cascade, timeout_s=60)
    answer = await complete(cascade, conversation(400, 99), route={"escalate_after_tokens": 1})
    assert answer.cascade["handoff"]["path"] == "mapped"


def test_a_mapper_killed_in_the_middle_costs_nothing_but_time(cascade: RealCascade) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        for attempt in range(3):
            victim = cascade.describe("mapper")["pid"]
            messages = conversation(4_000, 200 + attempt)
            asking = pool.submit(
                asyncio.run,
                complete(cascade, messages, route={"escalate_after_tokens": 1}),
            )
            while not asking.done():
                if cascade.describe("mapper")["running"]:
                    os.kill(victim, signal.SIGKILL)
                    break
                time.sleep(0.002)
            answer = asking.result()
            assert answer.choices[0].message.content
            handoff = answer.cascade["handoff"]
            if handoff["path"] == "recompute":
                break
    # The handoff was cut off, the answer came by reading again, and the reason says so.
    assert handoff["reason"] == "mapper_gone"
    deadline = time.monotonic() + 120
    while True:
        answer = asyncio.run(
            complete(cascade, conversation(300, 250), route={"escalate_after_tokens": 1})
        )
        if answer.cascade["handoff"]["path"] == "mapped":
            break
        assert time.monotonic() < deadline, answer.cascade
        time.sleep(1)
    wait_empty(cascade, timeout_s=60)


def test_mappers_scale_under_traffic_without_a_failed_request_or_a_touched_engine(
    cascade: RealCascade,
) -> None:
    engines = [cascade.describe(role)["pid"] for role in ("small", "large")]
    paths: list[str] = []
    failures: list[BaseException] = []
    stopping = threading.Event()

    def traffic(number: int) -> None:
        seed = 1_000 * (number + 1)
        while not stopping.is_set():
            seed += 1
            try:
                answer = asyncio.run(
                    complete(cascade, conversation(200, seed), route={"escalate_after_tokens": 1})
                )
                paths.append(answer.cascade["handoff"]["path"])
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=traffic, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    counts = []
    try:
        for replicas in (2, 1):
            cascade.deploy(cascade.with_mappers(replicas))
            counts.append(len(paths))
            time.sleep(4)
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(paths) > counts[0] > 0
    assert set(paths) == {"mapped"}
    assert [cascade.describe(role)["pid"] for role in ("small", "large")] == engines
    wait_empty(cascade, timeout_s=60)
