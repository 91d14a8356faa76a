"""The large model's part: mapped handoffs, every way they fail, and clients that leave."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import EngineError, HandoffError, HandoffRefused
from router.ports import EngineRequest, TokenStep
from tests.fakes import FakeHandoffPort, Script, ScriptedEngine
from tests.router_bench import LARGE, PROMPT, SMALL, Bench, go_on


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
        (Bench(large=ScriptedEngine(failing_large_once())), "target_failed"),
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
