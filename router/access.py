"""How one answer reaches the engines: in which prefix cache, and with KV from the other model.

It applies what is known of the conversation to each request and notes afterwards what the engines
were left with. It does not decide who answers and sees no tokens but the prompt's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from cluster.errors import EngineError
from router.conversations import ConversationTurn
from router.job import Job, Site
from router.policy import Role
from router.ports import EngineChunk, EngineRequest, KeepRule, new_request_id
from router.takeover import Takeover

logger = logging.getLogger(__name__)

OTHER: dict[Role, Role] = {"small": "large", "large": "small"}


class Access:
    """The engines as one answer may use them.

    `recompute`: true never asks for a handoff, false asks for one also where reading is expected to
    be quicker, None leaves it to the forecast.
    """

    def __init__(self, site: Site, job: Job, *, recompute: bool | None) -> None:
        self._site = site
        self._job = job
        self._recompute = recompute
        self.borrowed: Takeover | None = None
        self._opened: tuple[Role, EngineRequest] | None = None

    @property
    def request_id(self) -> str:
        """The request that writes, or wrote, in the engine that the answer was opened at."""
        assert self._opened is not None, "open an answer first"
        borrowed = None if self.borrowed is None else self.borrowed.request_id
        return borrowed or self._opened[1].request_id

    def unread_tokens(self, role: Role) -> int:
        """Tokens of the prompt of which a model's engine should have no KV."""
        turn = self._job.turn
        if turn is None:
            return len(self._job.prompt_token_ids)
        return turn.unread_tokens(role)

    def request(
        self, role: Role, max_tokens: int, keep: KeepRule, *, prompt_logprobs: bool = False
    ) -> EngineRequest:
        """A request for the whole answer by one model."""
        request = self._request(self._job.prompt_token_ids, max_tokens, role)
        return replace(request, keep=keep, prompt_logprobs=prompt_logprobs)

    def continuation(self, sent_token_ids: list[int], max_tokens: int) -> EngineRequest:
        """A request that goes on after what was sent; a takeover chooses its cache."""
        tokens = (*self._job.prompt_token_ids, *sent_token_ids)
        return self._request(tokens, max_tokens, None, sent_tokens=len(sent_token_ids))

    def _request(
        self,
        token_ids: tuple[int, ...],
        max_tokens: int,
        role: Role | None,
        *,
        sent_tokens: int = 0,
    ) -> EngineRequest:
        """A request in the conversation's cache at `role`, or in the tenant's."""
        lineage = None if role is None else self._lineage(role)
        affinity = None if self._job.turn is None else self._job.turn.affinity
        return EngineRequest(
            request_id=new_request_id(affinity),
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=self._job.sampling(sent_tokens, max_tokens),
            cache_salt=lineage or self._job.salt,
            traceparent=self._site.recorder.traceparent,
        )

    def takeover(
        self, role: Role, source_request_id: str, request: EngineRequest, skip: str | None
    ) -> Takeover:
        """The handoff to a model that goes on with `request`; `skip`: why not to try one."""
        port = self._site.handoffs_to(role)
        assert port is not None
        held_tokens = len(self._job.prompt_token_ids) - self.unread_tokens(role)
        if skip is None:
            skip = self._skip(role, len(request.prompt_token_ids) - held_tokens)
        return Takeover(
            engine=self._site.engine(role),
            handoffs=port,
            recorder=self._site.recorder,
            background=self._site.background,
            forecast=self._site.forecasts[role],
            source_request_id=source_request_id,
            request=request,
            skip=skip,
            decided_s=time.monotonic(),
            lineage=self._lineage(role),
            held_tokens=held_tokens,
        )

    async def open(self, role: Role, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """The answer to `request`, with KV of what only the other model has of earlier turns."""
        self._opened = role, request
        self.borrowed = await self._borrow(role, request)
        return self._timed(role, request) if self.borrowed is None else self.borrowed.chunks()

    async def close(self) -> None:
        """Settle what was borrowed."""
        if self.borrowed is not None:
            await self.borrowed.close()

    async def _timed(self, role: Role, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """The engine's answer; the forecast learns from its first token."""
        started_s: float | None = time.monotonic()
        async with aclosing(self._site.engine(role).generate(request)) as chunks:
            async for chunk in chunks:
                if started_s is not None and chunk.steps:
                    read_tokens = len(request.prompt_token_ids) - (chunk.cached_tokens or 0)
                    forecast = self._site.forecasts[role]
                    forecast.observe_recompute(read_tokens, time.monotonic() - started_s)
                    started_s = None
                yield chunk

    async def _borrow(self, role: Role, request: EngineRequest) -> Takeover | None:
        """A handoff of what only the other model has of earlier turns; None: not worth it.

        The other engine is asked for the promise with a request that reads nothing new.
        """
        source, turn = OTHER[role], self._job.turn
        if turn is None or self._recompute or self._site.handoffs_to(role) is None:
            return None
        if request.prompt_logprobs:
            return None  # the engine has them only of what it reads itself
        known = min(turn.held(source).tokens, len(request.prompt_token_ids) - 1)
        gain = known - turn.held(role).tokens
        if gain <= 0 or self._skip(role, gain) is not None:
            return None
        ask = replace(self._request(request.prompt_token_ids[:known], 1, source), keep="always")
        try:
            async for _ in self._site.engine(source).generate(ask):
                pass
        except EngineError as error:
            logger.warning("%s reads everything itself: %s", role, error)
            return None
        return self.takeover(role, ask.request_id, request, None)

    def remember(
        self, answer_token_ids: list[int], written_tokens: Mapping[Role, int], last: Takeover | None
    ) -> None:
        """Note what the engines hold of the conversation now, for its next turn.

        `written_tokens` counts each model's part of the answer; `last` is a closed escalation.
        """
        turn = self._job.turn
        if turn is None or self._opened is None:
            return
        role, request = self._opened
        if self.borrowed is not None:
            self._took_over(turn, role, self.borrowed, written_tokens[role])
        else:
            tokens = with_kv(len(request.prompt_token_ids), written_tokens[role])
            turn.read(role, request.cache_salt or "", tokens)
        if last is not None:
            self._took_over(turn, "large", last, written_tokens["large"])
        if self._job.remember and self._site.sessions is not None:
            wrote_last: Role = "large" if written_tokens["large"] else "small"
            self._site.sessions.put(turn.after(answer_token_ids, wrote_last))

    def _took_over(
        self, turn: ConversationTurn, role: Role, takeover: Takeover, written_tokens: int
    ) -> None:
        if takeover.salt is None:
            return
        tokens = with_kv(len(takeover.request.prompt_token_ids), written_tokens)
        turn.read(role, takeover.salt, tokens, mapped_tokens=takeover.covered_tokens)

    def _lineage(self, role: Role) -> str | None:
        """The cache of this conversation alone; None where KV is exact and may be anybody's."""
        if self._job.turn is None or self._site.handoffs_to(role) is None:
            return None
        return self._job.turn.held(role).salt

    def _skip(self, role: Role, missing_tokens: int) -> str | None:
        """Why a model should rather read `missing_tokens` than have them mapped; None: map."""
        if self._recompute:
            return "requested"
        if missing_tokens < self._site.min_handoff_tokens:
            return "short"
        if self._job.turn is not None and self._job.turn.drifted(role):
            return "drift"
        forecast = self._site.forecasts[role]
        if (
            self._recompute is None
            and forecast.cheaper(missing_tokens, missing_tokens) == "recompute"
        ):
            return "cheaper"
        return None


def with_kv(prompt_tokens: int, written_tokens: int) -> int:
    """Tokens whose KV exists: the last one written was never read."""
    return prompt_tokens + max(0, written_tokens - 1)
