"""What the engine deployment makes of vLLM's outputs, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deployments.engine import _chunk, _handed_over


def entry(logprob: float, rank: int) -> Any:
    return SimpleNamespace(logprob=logprob, rank=rank)


def output(prompt_logprobs: Any) -> Any:
    """One delta of one token after the prompt 7, 8, 9."""
    answer = SimpleNamespace(
        token_ids=[5], logprobs=[{5: entry(-0.5, 1)}], finish_reason=None, stop_reason=None
    )
    return SimpleNamespace(
        outputs=[answer],
        prompt_token_ids=[7, 8, 9],
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=0,
    )


def test_the_first_delta_says_what_the_model_thought_of_the_prompt() -> None:
    found = [None, {8: entry(-1.5, 3)}, {9: entry(-0.25, 1), 4: entry(-0.25, 1)}]
    chunk = _chunk(output(found))
    assert chunk.prompt_logprobs == (-1.5, -0.25)
    assert chunk.prompt_ranks == (3, 1)


def test_later_deltas_and_other_requests_say_nothing_of_it() -> None:
    for found in (None, []):
        chunk = _chunk(output(found))
        assert (chunk.prompt_logprobs, chunk.prompt_ranks) == (None, None)


class Desk:
    """A desk whose engine has so many pinned blocks, one look after the other."""

    def __init__(self, *pinned: int | type[TimeoutError]) -> None:
        self.looks = list(pinned)

    async def census(self) -> Any:
        look = self.looks.pop(0)
        if look is TimeoutError:
            raise TimeoutError
        return SimpleNamespace(pinned_blocks=look)


async def test_an_engine_ends_when_its_last_ticket_has_been_read_or_its_core_is_silent() -> None:
    for desk in (Desk(0), Desk(7, 7, 0), Desk(7, TimeoutError)):
        untyped: Any = desk
        await _handed_over(untyped)
        assert desk.looks == []
