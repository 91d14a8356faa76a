"""Whether the large model would have written what the small one answered: checked afterwards.

For a part of the answers that the small model finished alone, the large model reads prompt and
answer once, in the background, and says which tokens it would have chosen itself. That is a
judgement for calibration (`failed` in the decision log), not for the client, who has the answer by
then. It does not know the log and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Literal

from cluster.errors import EngineError
from router.chance import uniform
from router.ports import EnginePort, EngineRequest, new_request_id
from router.record import AnswerRecord

logger = logging.getLogger(__name__)

MOST_IN_FLIGHT = 2
"""Answers that the large model reads for this at a time; more are dropped, never queued."""

JUDGE_TIMEOUT_S = 120.0

Verdict = Literal["agreed", "failed", "dropped"]
"""What became of an answer that was due: dropped are those that were too many at once, or that the
large engine could not read."""


class Shadow:
    """One per router.

    `fraction` of the prompts are judged, always the same ones. `min_agreement` is the share of
    tokens below which an answer counts as failed. At a temperature above 0 the small model chooses
    unlikely tokens on purpose, so agreement is lower there. `count` is told each verdict.
    """

    def __init__(
        self,
        large: EnginePort,
        *,
        fraction: float,
        min_agreement: float,
        count: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self._large = large
        self._fraction = fraction
        self._min_agreement = min_agreement
        self._count = count
        self._in_flight = 0

    def wants(self, record: AnswerRecord) -> bool:
        """Whether this answer is to be judged: one of the small model alone, drawn by its hash."""
        return (
            not record.escalated
            and record.large_tokens == 0
            and record.small_tokens > 0
            and uniform(record.request_hash, "shadow") < self._fraction
        )

    async def judge(
        self, prompt_token_ids: tuple[int, ...], answer_token_ids: tuple[int, ...]
    ) -> float | None:
        """Share of the answer's tokens that the large model finds likeliest, in [0, 1].

        None when it was dropped: MOST_IN_FLIGHT others run, or the large engine cannot.
        """
        assert prompt_token_ids and answer_token_ids
        if self._in_flight >= MOST_IN_FLIGHT:
            self._count("dropped")
            return None
        self._in_flight += 1
        try:
            async with asyncio.timeout(JUDGE_TIMEOUT_S):
                ranks = await self._ranks((*prompt_token_ids, *answer_token_ids))
        except (EngineError, TimeoutError) as error:
            logger.warning("an answer was not judged: %s", error or "no result in time")
            self._count("dropped")
            return None
        finally:
            self._in_flight -= 1
        # ranks[i] is that of the token with index i + 1.
        start = len(prompt_token_ids) - 1
        judged = ranks[start : start + len(answer_token_ids)]
        agreement = sum(rank == 1 for rank in judged) / len(judged)
        self._count("failed" if agreement < self._min_agreement else "agreed")
        return agreement

    async def judged(
        self,
        record: AnswerRecord,
        prompt_token_ids: tuple[int, ...],
        answer_token_ids: tuple[int, ...],
    ) -> AnswerRecord:
        """The record with `agreement` and `failed`, or as it was when the judgement was dropped."""
        agreement = await self.judge(prompt_token_ids, answer_token_ids)
        if agreement is None:
            return record
        failed = agreement < self._min_agreement
        return record.model_copy(update={"agreement": agreement, "failed": failed})

    async def _ranks(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks from 1 of all tokens from the second on."""
        request = EngineRequest(
            request_id=new_request_id(),
            prompt_token_ids=token_ids,
            max_tokens=1,
            cache_salt=uuid.uuid4().hex,
            prompt_logprobs=True,
        )
        stream = self._large.generate(request)
        try:
            async for chunk in stream:
                if chunk.prompt_ranks is not None:
                    return chunk.prompt_ranks
        finally:
            await stream.aclose()
        raise EngineError("the large engine gave no ranks of the prompt")
