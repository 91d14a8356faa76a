"""The large model's opinion of answers that the small one wrote alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from cluster.errors import EngineError
from router.ports import EngineChunk, EngineRequest
from router.record import AnswerRecord
from router.shadow import Shadow
from tests.fakes import step
from tests.router.logs import record

PROMPT, ANSWER = (1, 2, 3), (10, 11, 12, 13)


class Reader:
    """Ranks every token 1 whose id is even, and 5 the others."""

    def __init__(self, error: Exception | None = None, gate: asyncio.Event | None = None) -> None:
        self.requests: list[EngineRequest] = []
        self.open = 0
        self._error = error
        self._gate = gate

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.requests.append(request)
        self.open += 1
        try:
            if self._gate is not None:
                await self._gate.wait()
            if self._error is not None:
                raise self._error
            ranks = tuple(5 if token % 2 else 1 for token in request.prompt_token_ids[1:])
            yield EngineChunk(steps=(step(0),), finish_reason="length", prompt_ranks=ranks)
        finally:
            self.open -= 1

    async def release(self, request_id: str) -> None:
        raise AssertionError("nothing was kept")


def shadow(
    reader: Reader, *, fraction: float = 1.0, least: float = 0.8, seen: list[str] | None = None
) -> Shadow:
    verdicts: list[str] = [] if seen is None else seen
    return Shadow(reader, fraction=fraction, min_agreement=least, count=verdicts.append)


async def test_agreement_is_the_share_of_the_answers_tokens_with_rank_one() -> None:
    reader = Reader()
    assert await shadow(reader).judge(PROMPT, ANSWER) == 0.5
    assert await shadow(reader).judge((1,), (2, 4, 5)) == pytest.approx(2 / 3)
    first, second = reader.requests
    assert first.prompt_token_ids == (*PROMPT, *ANSWER)
    assert (first.max_tokens, first.prompt_logprobs, first.keep) == (1, True, "never")
    assert first.cache_salt and first.cache_salt != second.cache_salt
    assert reader.open == 0


@pytest.mark.parametrize(("least", "failed"), [(0.5, False), (0.51, True)])
async def test_an_answer_fails_below_the_least_agreement(least: float, failed: bool) -> None:
    seen: list[str] = []
    made = shadow(Reader(), least=least, seen=seen)
    line = await made.judged(record(1, [1.0]), PROMPT, ANSWER)
    assert seen == ["failed" if failed else "agreed"]
    assert (line.agreement, line.failed) == (0.5, failed)
    assert AnswerRecord.model_validate_json(line.model_dump_json()) == line


async def test_a_third_one_at_a_time_is_dropped_and_counted() -> None:
    gate, seen = asyncio.Event(), list[str]()
    made = shadow(Reader(gate=gate), seen=seen)
    running = [asyncio.create_task(made.judge(PROMPT, ANSWER)) for _ in range(2)]
    await asyncio.sleep(0)
    line = record(1, [1.0])
    assert await made.judged(line, PROMPT, ANSWER) == line
    assert seen == ["dropped"]
    gate.set()
    assert await asyncio.gather(*running) == [0.5, 0.5]
    assert await made.judge(PROMPT, ANSWER) == 0.5


async def test_an_engine_that_fails_leaves_the_line_as_it_was() -> None:
    seen: list[str] = []
    made = shadow(Reader(error=EngineError("dead")), seen=seen)
    line = record(1, [1.0])
    assert await made.judged(line, PROMPT, ANSWER) == line
    assert seen == ["dropped"]


def test_only_answers_of_the_small_model_alone_are_drawn_and_always_the_same_ones() -> None:
    made = shadow(Reader(), fraction=0.3)
    lines = [record(number, [1.0]) for number in range(4_000)]
    drawn = [made.wants(line) for line in lines]
    assert sum(drawn) / len(drawn) == pytest.approx(0.3, abs=0.03)
    assert drawn == [made.wants(line) for line in lines]
    every = shadow(Reader())
    assert every.wants(record(1, [1.0]))
    assert not every.wants(record(1, [1.0], complete=False))
    assert not every.wants(record(1, []))
