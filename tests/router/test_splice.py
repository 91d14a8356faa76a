"""The splice of two token streams, with scripted engines and handoffs that fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.config import RoutingConfig
from cluster.errors import EngineError, HandoffError, HandoffRefused, RequestError
from router.api import CascadeInfo, CascadeOptions
from router.policy import make_policy
from router.ports import EngineRequest, TokenStep
from router.splice import Cascade, Job, Site
from tests.fakes import (
    FakeHandoffPort,
    ListRecorder,
    Script,
    ScriptedEngine,
    step,
    steps,
)

PROMPT = tuple(range(1000, 1100))
SMALL = list(range(1, 21))
LARGE = list(range(501, 521))
ROUTING = RoutingConfig(margin_window_tokens=2, margin_threshold=1.0)


def go_on(request: EngineRequest) -> list[TokenStep]:
    """The large model writes LARGE, but only what the conversation does not hold already."""
    return steps(LARGE[len(request.prompt_token_ids) - len(PROMPT) :])


@dataclass
class Bench:
    """A site with scripted engines; `run` writes one answer."""

    small: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(steps(SMALL)))
    large: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(go_on))
    port: FakeHandoffPort = field(default_factory=FakeHandoffPort)
    recorder: ListRecorder = field(default_factory=ListRecorder)
    hold_back: int = 0
    small_context: int = 4_096
    min_handoff: int = 8

    def site(self) -> Site:
        return Site(
            small=self.small,
            large=self.large,
            handoffs=self.port,
            names={"small": "s", "large": "l"},
            small_context_tokens=self.small_context,
            min_handoff_tokens=self.min_handoff,
            hold_back_tokens=self.hold_back,
            recorder=self.recorder,
        )

    def cascade(self, site: Site, *, max_tokens: int = 20, **options: Any) -> Cascade:
        wanted = CascadeOptions(**options)
        job = Job(prompt_token_ids=PROMPT, max_tokens=max_tokens, sampling=lambda *part: part)
        return Cascade(site, make_policy(ROUTING, wanted), wanted, job)

    async def run(self, **options: Any) -> tuple[list[int], str | None, CascadeInfo]:
        site = self.site()
        cascade = self.cascade(site, **options)
        tokens: list[int] = []
        reason = None
        async for piece in cascade.pieces():
            assert reason is None, "a piece came after the last one"
            tokens += [one.token_id for one in piece.chunk.steps]
            reason = piece.chunk.finish_reason
        info = await cascade.info()
        await site.background.drain()
        assert (self.small.open, self.large.open, self.port.open) == (0, 0, set())
        return tokens, reason, info


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


async def test_a_short_conversation_is_read_again_in_the_shared_prefix_cache() -> None:
    bench = Bench(min_handoff=len(PROMPT) + 100)
    _, _, info = await bench.run(escalate_after_tokens=3)
    assert info.handoff is not None
    assert (info.handoff.path, info.handoff.reason) == ("recompute", "short")
    assert bench.small.requests[0].keep == "never"
    assert (bench.port.calls, bench.large.requests[0].cache_salt) == ([], None)


async def test_a_requested_recompute_reads_again_without_a_ticket() -> None:
    bench = Bench()
    tokens, _, info = await bench.run(escalate_after_tokens=3, recompute=True)
    assert tokens == SMALL[:3] + LARGE[3:]
    assert info.handoff is not None
    assert (info.handoff.path, info.handoff.reason) == ("recompute", "requested")
    assert (bench.port.calls, bench.small.requests[0].keep) == ([], "never")
    assert bench.large.requests[0].cache_salt is not None


async def test_a_mapped_handoff_reports_stages_bytes_and_tokens() -> None:
    bench = Bench(large=ScriptedEngine(go_on, cached_tokens=96))
    _, _, info = await bench.run(escalate_after_tokens=3)
    handoff = info.handoff
    assert handoff is not None
    assert (handoff.path, handoff.reason, handoff.temperature) == ("mapped", None, "warm")
    assert (handoff.covered_tokens, handoff.reread_tokens) == (102, 103 - 96)
    assert (handoff.bytes_read, handoff.bytes_written) == (1020, 2040)
    assert list(handoff.stages_ms) == [
        "ticket", "queue", "read", "map", "write", "wait_target", "admit",
    ]  # fmt: skip
    (record,) = bench.recorder.handoffs
    assert (record.outcome, record.temperature) == ("mapped", "warm")
    assert record.stages_s["total"] * 1000 == pytest.approx(handoff.handoff_ms, abs=0.001)


async def test_every_mapped_request_has_its_own_salt() -> None:
    bench = Bench()
    await bench.run(escalate_after_tokens=3)
    await bench.run(escalate_after_tokens=3)
    salts = [request.cache_salt for request in bench.large.requests]
    assert None not in salts and len(set(salts)) == 2


def failing_large_once() -> Script:
    calls = []

    def script(request: EngineRequest) -> list[TokenStep]:
        calls.append(request)
        if len(calls) == 1:
            raise EngineError("lost")
        return go_on(request)

    return script


@pytest.mark.parametrize(
    ("bench", "reason"),
    [
        (Bench(port=FakeHandoffPort(begin_error=HandoffRefused("no_ticket"))), "no_ticket"),
        (Bench(port=FakeHandoffPort(begin_error=RuntimeError("bug"))), "error"),
        (Bench(port=FakeHandoffPort(fail_at_once=HandoffError("mapper_died"))), "mapper_died"),
        (Bench(large=ScriptedEngine(failing_large_once())), "large_failed"),
    ],
    ids=["begin-refused", "begin-bug", "mapper-died", "large-raised"],
)
async def test_every_failure_before_the_first_large_token_gives_the_cold_answer(
    bench: Bench, reason: str
) -> None:
    if reason == "mapper_died":
        mapped_hangs(bench)
    tokens, finish, info = await bench.run(escalate_after_tokens=5)
    assert (tokens, finish) == (SMALL[:5] + LARGE[5:], "stop")
    assert info.handoff is not None
    assert (info.handoff.path, info.handoff.reason) == ("recompute", reason)
    cold = bench.large.requests[-1]
    assert (cold.kv_transfer_params, cold.prompt_token_ids) == (None, (*PROMPT, *SMALL[:5]))
    salts = [request.cache_salt for request in bench.large.requests]
    assert cold.cache_salt is not None and len(set(salts)) == len(salts)
    ids = {request.request_id for request in bench.large.requests}
    assert len(ids) == len(bench.large.requests)
    assert [record.reason for record in bench.recorder.handoffs] == [reason]
    assert all(handoff.cancelled for handoff in bench.port.begun)
    if not bench.port.begun:
        assert bench.small.released == [bench.small.requests[0].request_id]


def mapped_hangs(bench: Bench) -> None:
    """A large request with mapped KV gets no token; a cold one does."""
    cold = bench.large

    class Engine(ScriptedEngine):
        async def generate(self, request: EngineRequest):  # type: ignore[no-untyped-def]
            self.hang_after = 0 if request.kv_transfer_params else None
            async for chunk in super().generate(request):
                yield chunk

    bench.large = Engine(cold.script)


async def test_a_handoff_that_dies_while_the_large_model_waits_aborts_that_request() -> None:
    bench = Bench()
    mapped_hangs(bench)
    site = bench.site()
    cascade = bench.cascade(site, escalate_after_tokens=2)

    async def die() -> None:
        while not bench.large.requests:
            await asyncio.sleep(0)
        bench.port.begun[0].failed.set_result(HandoffError("write_failed"))

    killer = asyncio.create_task(die())
    tokens = [s.token_id async for piece in cascade.pieces() for s in piece.chunk.steps]
    await killer
    await site.background.drain()
    assert tokens == SMALL[:2] + LARGE[2:]
    assert bench.large.aborted == [bench.large.requests[0].request_id]
    handoff = (await cascade.info()).handoff
    assert handoff is not None and handoff.reason == "write_failed"


async def test_a_target_that_recomputed_by_itself_is_not_called_mapped() -> None:
    bench = Bench(port=FakeHandoffPort(report_error=HandoffRefused("pool_full")))
    tokens, _, info = await bench.run(escalate_after_tokens=5)
    assert tokens == SMALL[:5] + LARGE[5:]
    assert info.handoff is not None
    assert (info.handoff.path, info.handoff.reason) == ("recompute", "pool_full")


async def test_a_missing_report_ends_the_wait_not_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.takeover.REPORT_WAIT_S", 0.01)
    bench = Bench(port=FakeHandoffPort(report_hangs=True))
    tokens, _, info = await bench.run(escalate_after_tokens=5)
    assert tokens == SMALL[:5] + LARGE[5:]
    assert info.handoff is not None and list(info.handoff.stages_ms) == ["ticket"]


async def test_a_dead_small_engine_lets_the_large_one_go_on() -> None:
    bench = Bench(small=ScriptedEngine(steps(SMALL), fail_after=4))
    tokens, _, info = await bench.run()
    assert tokens == SMALL[:4] + LARGE[4:]
    assert info.handoff is not None and info.handoff.reason == "small_failed"


async def test_a_dead_large_engine_is_an_error_once_its_tokens_were_sent() -> None:
    bench = Bench(large=ScriptedEngine(go_on, fail_after=3))
    with pytest.raises(EngineError):
        await bench.run(escalate_after_tokens=5)
    assert (bench.large.open, len(bench.large.requests)) == (0, 1)


async def test_a_dead_large_engine_is_an_error_when_the_cold_request_fails_too() -> None:
    bench = Bench(large=ScriptedEngine(go_on, fail_after=0))
    with pytest.raises(EngineError):
        await bench.run(escalate_after_tokens=5)
    assert len(bench.large.requests) == 2


@pytest.mark.parametrize("moment", ["small", "begin", "waiting", "large"])
@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_client_that_leaves_leaves_nothing_open(moment: str, how: str) -> None:
    bench = Bench()
    if moment == "small":
        bench.small.hang_after = 3
    elif moment == "begin":
        bench.port.begin_hangs = True
    elif moment == "waiting":
        bench.large.hang_after = 0
    else:
        bench.large.hang_after = 4
    site = bench.site()
    cascade = bench.cascade(site, escalate_after_tokens=5)
    pieces = cascade.pieces()
    got: list[int] = []

    async def read() -> None:
        async for piece in pieces:
            got.extend(one.token_id for one in piece.chunk.steps)

    if how == "cancel":
        reader = asyncio.create_task(read())
        for _ in range(50):
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    else:
        await anext(pieces)
        await pieces.aclose()
    await site.background.drain()
    assert (bench.small.open, bench.large.open, bench.port.open) == (0, 0, set())
    if not bench.port.begun:
        assert bench.small.released == [bench.small.requests[0].request_id]
    if how == "cancel" and moment == "waiting":
        assert [record.outcome for record in bench.recorder.handoffs] == ["cancelled"]


async def test_sampling_is_told_what_was_sent_and_what_is_left() -> None:
    bench = Bench()
    await bench.run(escalate_after_tokens=5, max_tokens=12)
    assert bench.small.requests[0].sampling == (0, 5)
    assert bench.large.requests[0].sampling == (5, 7)
