"""The splice of two token streams, with scripted engines."""

from __future__ import annotations

import pytest

from cluster.errors import RequestError
from router.api import CascadeOptions
from router.policies import make_policy
from router.ports import TokenStep
from router.splice import Cascade, Job
from tests.fakes import ScriptedEngine, step, steps
from tests.router_bench import LARGE, PROMPT, ROUTING, SMALL, Bench


def doubtful_at(*positions: int) -> list[TokenStep]:
    return [step(token, 0.1 if index in positions else 8.0) for index, token in enumerate(SMALL)]


async def test_a_confident_small_model_answers_alone() -> None:
    bench = Bench()
    tokens, reason, info = await bench.run()
    assert (tokens, reason) == (SMALL, "stop")
    assert info.model_dump(include={"served_by", "handoff"}) == {
        "served_by": [{"model": "s", "tokens": 20}],
        "handoff": None,
    }
    assert bench.large.requests == []
    assert bench.recorder.routes == [("s", "confident")]
    assert bench.small.requests[0].keep == "on_abort"


async def test_doubt_hands_over_and_the_large_model_goes_on_after_the_sent_tokens() -> None:
    bench = Bench(small=ScriptedEngine(doubtful_at(5, 6)))
    tokens, reason, info = await bench.run()
    assert tokens == SMALL[:6] + LARGE[6:]
    assert reason == "stop"
    (request,) = bench.large.requests
    assert request.prompt_token_ids == (*PROMPT, *SMALL[:6])
    assert request.kv_transfer_params == {"handoff_id": bench.port.begun[0].handoff_id}
    assert bench.port.calls == [(bench.small.requests[0].request_id, request.prompt_token_ids)]
    assert bench.small.aborted == [bench.small.requests[0].request_id]
    assert info.decision is not None and info.decision.reason == "low_margin"
    assert info.decision.score == pytest.approx(0.1)


async def test_held_back_tokens_are_dropped_and_never_sent() -> None:
    bench = Bench(small=ScriptedEngine(doubtful_at(9, 10)), hold_back=4)
    tokens, _, info = await bench.run()
    # Tokens 0..9 were accepted; the last four of them were still waiting when doubt struck at 10.
    assert tokens == SMALL[:6] + LARGE[6:]
    assert [segment.tokens for segment in info.served_by] == [6, 14]


async def test_a_tool_call_or_split_character_delays_the_escalation() -> None:
    bench = Bench(small=ScriptedEngine(doubtful_at(3, 4, 9, 10)))
    wanted = CascadeOptions()
    site = bench.site()
    job = Job(
        prompt_token_ids=PROMPT,
        max_tokens=20,
        sampling=lambda *part: part,
        may_switch=lambda sent: len(sent) > 6,
    )
    cascade = Cascade(site, make_policy(ROUTING, wanted), wanted, job)
    tokens = [s.token_id async for piece in cascade.pieces() for s in piece.chunk.steps]
    assert tokens == SMALL[:10] + LARGE[10:]


@pytest.mark.parametrize("after", [1, 7, 19])
async def test_a_scheduled_escalation_keeps_exactly_n_tokens_of_the_small_model(
    after: int,
) -> None:
    bench = Bench(hold_back=4)
    tokens, _, info = await bench.run(escalate_after_tokens=after)
    assert tokens == SMALL[:after] + LARGE[after:]
    assert [segment.model_dump() for segment in info.served_by] == [
        {"model": "s", "tokens": after},
        {"model": "l", "tokens": 20 - after},
    ]
    assert bench.small.requests[0].max_tokens == after
    assert bench.small.requests[0].keep == "always"


async def test_after_zero_tokens_the_small_model_only_reads_the_prompt() -> None:
    bench = Bench()
    tokens, _, info = await bench.run(force="large", escalate_after_tokens=0)
    assert tokens == LARGE
    assert [segment.model for segment in info.served_by] == ["l"]
    assert bench.small.requests[0].max_tokens == 1
    assert bench.large.requests[0].prompt_token_ids == PROMPT


async def test_forced_large_never_asks_the_small_model() -> None:
    bench = Bench()
    tokens, _, info = await bench.run(force="large")
    assert (tokens, bench.small.requests, info.handoff) == (LARGE, [], None)
    assert bench.large.requests[0].cache_salt is None


async def test_forced_small_never_escalates_and_keeps_nothing() -> None:
    bench = Bench(small=ScriptedEngine(steps(SMALL, 0.0)), hold_back=4)
    tokens, _, _ = await bench.run(force="small")
    assert (tokens, bench.large.requests) == (SMALL, [])
    assert bench.small.requests[0].keep == "never"


async def test_an_answer_that_ends_before_its_escalation_is_complete_and_released() -> None:
    bench = Bench(small=ScriptedEngine(steps(SMALL[:4])))
    tokens, reason, info = await bench.run(escalate_after_tokens=10)
    assert (tokens, reason) == (SMALL[:4], "stop")
    assert info.decision is not None and info.decision.reason == "ended_early"
    assert bench.small.released == [bench.small.requests[0].request_id]


@pytest.mark.parametrize(("after", "max_tokens"), [(5, 12), (0, 7), (11, 12), (12, 12), (30, 12)])
async def test_max_tokens_is_exact_across_the_splice(after: int, max_tokens: int) -> None:
    bench = Bench()
    tokens, reason, _ = await bench.run(escalate_after_tokens=after, max_tokens=max_tokens)
    cut = min(after, max_tokens)
    assert tokens == (SMALL[:cut] + LARGE[cut:])[:max_tokens]
    assert reason == "length"


async def test_max_tokens_is_exact_when_the_doubt_came_from_a_big_chunk() -> None:
    bench = Bench(small=ScriptedEngine(doubtful_at(5, 6), chunk_tokens=5))
    tokens, reason, _ = await bench.run(max_tokens=12)
    assert (tokens, reason) == (SMALL[:5] + LARGE[5:12], "length")


async def test_a_full_small_context_goes_on_with_the_large_model() -> None:
    bench = Bench(small_context=len(PROMPT) + 6)
    tokens, _, info = await bench.run()
    assert tokens == SMALL[:6] + LARGE[6:]
    assert info.decision is not None and info.decision.reason == "small_context"


async def test_a_prompt_beyond_the_small_context_goes_to_the_large_model_at_once() -> None:
    bench = Bench(small_context=len(PROMPT))
    tokens, _, info = await bench.run()
    assert (tokens, bench.small.requests) == (LARGE, [])
    assert info.decision is not None and info.decision.reason == "small_context"


async def test_a_prompt_beyond_the_small_context_is_refused_when_small_is_forced() -> None:
    with pytest.raises(RequestError) as caught:
        await Bench(small_context=len(PROMPT)).run(force="small")
    assert caught.value.code == "context_length_exceeded"


async def test_a_dead_small_engine_lets_the_large_one_go_on() -> None:
    bench = Bench(small=ScriptedEngine(steps(SMALL), fail_after=4))
    tokens, _, info = await bench.run()
    assert tokens == SMALL[:4] + LARGE[4:]
    assert info.handoff is not None and info.handoff.reason == "small_failed"


async def test_a_reader_that_stops_early_settles_on_the_small_model() -> None:
    bench = Bench()
    site = bench.site()
    cascade = bench.cascade(site)
    pieces = cascade.pieces()
    for _ in range(3):
        await anext(pieces)
    await pieces.aclose()
    info = await cascade.info()
    assert info.decision is not None
    assert (info.decision.action, info.decision.reason) == ("stay", "confident")
    assert bench.recorder.routes == [("s", "confident")]
    assert bench.small.released == [bench.small.requests[0].request_id]


async def test_sampling_is_told_what_was_sent_and_what_is_left() -> None:
    bench = Bench()
    await bench.run(escalate_after_tokens=5, max_tokens=12)
    assert bench.small.requests[0].sampling == (0, 5)
    assert bench.large.requests[0].sampling == (5, 7)
