"""One answer from two models: the small one starts, the large one may take over.

`Cascade` turns token ids into one stream of pieces, each from one model. What was sent is never
taken back: tokens wait in a short buffer, and those that wait when the large model takes over are
dropped unseen. It knows nothing of text, HTTP, vLLM or how KV travels.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.errors import EngineError, RequestError
from router.api import CascadeInfo, CascadeOptions, DecisionInfo, Segment
from router.background import Background
from router.chance import request_hash
from router.policy import Decision, Policy, Role
from router.ports import (
    EngineChunk,
    EnginePort,
    EngineRequest,
    HandoffPort,
    KeepRule,
    TokenStep,
)
from router.record import AnswerLog, Watch
from router.stats import NullRecorder, Recorder
from router.takeover import Takeover

SamplingFor = Callable[[int, int], Any]
"""(tokens already sent, max_tokens of this part) to the engine's sampling parameters."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The two engines and what moves KV between them: the same for every request.

    `names` are the models' names in the API. Conversations shorter than `min_handoff_tokens` are
    read again instead of handed over. A small model holds `small_context_tokens` of prompt and
    answer; `hold_back_tokens` of its tokens wait before they are sent. `log` gets each answer's
    decisions.
    """

    small: EnginePort
    large: EnginePort
    handoffs: HandoffPort
    names: Mapping[Role, str]
    small_context_tokens: int
    min_handoff_tokens: int
    hold_back_tokens: int
    recorder: Recorder = field(default_factory=NullRecorder)
    log: AnswerLog | None = None
    background: Background = field(default_factory=Background)


def always(sent_token_ids: tuple[int, ...]) -> bool:
    """The large model may take over anywhere."""
    return True


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to write.

    `may_switch` is asked with the tokens already sent whether an escalation may cut there (never
    in a tool call or a split character). It is not asked when the request itself set the place.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingFor
    may_switch: Callable[[tuple[int, ...]], bool] = always


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of one model, in the order of the answer; the last piece has a finish reason."""

    model: Role
    chunk: EngineChunk


class Cascade:
    """One answer. Iterate `pieces()` once; then, or after closing it, ask for `info()`."""

    def __init__(self, site: Site, policy: Policy, options: CascadeOptions, job: Job) -> None:
        assert job.max_tokens > 0
        self._site = site
        self._watch = None if site.log is None else Watch(policy)
        self._policy: Policy = self._watch or policy
        self._options = options
        self._job = job
        self._sent: list[int] = []
        self._by_model: dict[Role, int] = {"small": 0, "large": 0}
        self._decision: Decision | None = None
        self._takeover: Takeover | None = None
        self._small: AsyncGenerator[EngineChunk, None] | None = None
        self._small_id = uuid.uuid4().hex
        self._kept = False

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer, with exactly `max_tokens` tokens at most over both models.

        Raises EngineError when no model can go on and RequestError when the prompt does not fit.
        Closing it aborts whatever still runs.
        """
        try:
            decision = self._policy.on_request(request_hash(self._job.prompt_token_ids))
            room = self._site.small_context_tokens - len(self._job.prompt_token_ids)
            if decision.action == "stay" and room <= 0:
                if not self._policy.may_escalate:
                    raise RequestError(
                        f"{self._site.names['small']} holds {self._site.small_context_tokens} "
                        f"tokens, the prompt has {len(self._job.prompt_token_ids)}",
                        code="context_length_exceeded",
                        param="messages",
                    )
                decision = Decision("large", "small_context")
            if decision.action == "large":
                self._settle(decision)
                async with aclosing(self._answer_large()) as answer:
                    async for piece in answer:
                        yield piece
                return
            async with aclosing(self._answer_small(room)) as answer:
                async for piece in answer:
                    yield piece
            if self._takeover is not None:
                assert self._small is not None
                await self._small.aclose()
                async with aclosing(self._takeover.chunks()) as chunks:
                    async for chunk in chunks:
                        yield self._send("large", chunk)
        finally:
            await self._site.background.finish(self._close())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the conversation before the answer."""
        return len(self._job.prompt_token_ids)

    @property
    def sent_tokens(self) -> int:
        """Tokens of the answer so far, of both models."""
        return len(self._sent)

    async def info(self) -> CascadeInfo:
        """Who wrote what, and why; waits a moment for the costs of a handoff."""
        self._settle_stopped()
        decision = self._decision
        return CascadeInfo(
            served_by=[
                Segment(model=self._site.names[role], tokens=tokens)
                for role, tokens in self._by_model.items()
                if tokens
            ],
            decision=None if decision is None else DecisionInfo(**vars(decision)),
            handoff=None if self._takeover is None else await self._takeover.info(),
        )

    async def _answer_large(self) -> AsyncGenerator[Piece, None]:
        job = self._job
        request = EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=job.prompt_token_ids,
            max_tokens=job.max_tokens,
            sampling=job.sampling(0, job.max_tokens),
        )
        async with aclosing(self._site.large.generate(request)) as chunks:
            async for chunk in chunks:
                yield self._send("large", chunk)
                if chunk.finish_reason is not None:
                    return
        raise EngineError("the large engine ended a stream without a finish reason")

    async def _answer_small(self, room_tokens: int) -> AsyncGenerator[Piece, None]:
        """The small model's part; sets `_takeover` when the large one has to go on."""
        policy, site = self._policy, self._site
        held: deque[TokenStep] = deque()
        watched = policy.may_escalate and policy.small_tokens is None
        hold_back = site.hold_back_tokens if watched else 0
        cached_tokens: int | None = None
        request = self._small_request(room_tokens)
        self._small = site.small.generate(request)
        try:
            async for chunk in self._small:
                if cached_tokens is None:
                    cached_tokens = chunk.cached_tokens
                for step in chunk.steps:
                    held.append(step)
                    if chunk.finish_reason is not None:
                        continue
                    decision = policy.on_token(step)
                    if decision.action == "escalate" and self._job.may_switch(tuple(self._sent)):
                        self._escalate(decision)
                        return
                if chunk.finish_reason is not None:
                    self._kept = request.keep == "always"
                    last = replace(chunk, steps=tuple(held), cached_tokens=cached_tokens)
                    if piece := self._finish_small(last):
                        yield piece
                    return
                ready = max(0, len(held) - hold_back)
                if ready:
                    steps = tuple(held.popleft() for _ in range(ready))
                    yield self._send("small", EngineChunk(steps=steps, cached_tokens=cached_tokens))
            raise EngineError("the small engine ended a stream without a finish reason")
        except EngineError:
            if not policy.may_escalate:
                raise
            self._kept = False
            self._escalate(Decision("escalate", "small_failed"), skip="small_failed")

    def _small_request(self, room_tokens: int) -> EngineRequest:
        job, policy = self._job, self._policy
        limit = min(job.max_tokens, max(room_tokens, 1))
        if policy.small_tokens is not None:
            limit = min(limit, max(policy.small_tokens, 1))
        prompt = job.prompt_token_ids
        keep: KeepRule = "on_abort" if limit == job.max_tokens else "always"
        if policy.small_tokens == 0 or policy.at_end:
            keep = "always"
        longest = len(prompt) + limit
        if (
            not policy.may_escalate
            or self._options.recompute
            or longest < self._site.min_handoff_tokens
        ):
            keep = "never"
        self._kept = keep != "never"
        return EngineRequest(
            request_id=self._small_id,
            prompt_token_ids=prompt,
            max_tokens=limit,
            sampling=job.sampling(0, limit),
            keep=keep,
        )

    def _finish_small(self, last: EngineChunk) -> Piece | None:
        """Settle the small model's own end; what it still has to show, if anything."""
        assert last.finish_reason is not None
        decision = self._policy.on_complete(last.finish_reason)
        if self._policy.small_tokens == 0:
            self._escalate(decision)
            return None
        left = self._job.max_tokens - len(self._sent) - len(last.steps)
        if last.finish_reason == "length" and left > 0 and self._policy.may_escalate:
            if decision.action == "stay":
                decision = replace(decision, action="escalate", reason="small_context")
            piece = self._send("small", replace(last, finish_reason=None))
            self._escalate(decision)
            return piece
        if decision.action == "escalate":
            # What still waits is dropped, and the large model goes on after what was sent.
            if self._policy.at_end and last.steps and self._job.may_switch(tuple(self._sent)):
                self._escalate(decision)
                return None
            decision = replace(decision, action="stay", reason="ended_early")
        self._settle(decision)
        return self._send("small", last)

    def _escalate(self, decision: Decision, skip: str | None = None) -> None:
        """Hand the rest to the large model; `skip` is a reason not to try a handoff."""
        self._settle(decision)
        token_ids = (*self._job.prompt_token_ids, *self._sent)
        if skip is None and self._options.recompute:
            skip = "requested"
        if skip is None and len(token_ids) < self._site.min_handoff_tokens:
            skip = "short"
        max_tokens = self._job.max_tokens - len(self._sent)
        self._takeover = Takeover(
            engine=self._site.large,
            handoffs=self._site.handoffs,
            recorder=self._site.recorder,
            background=self._site.background,
            small_request_id=self._small_id,
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=self._job.sampling(len(self._sent), max_tokens),
            skip=skip,
            decided_s=time.monotonic(),
        )

    def _settle(self, decision: Decision) -> None:
        self._decision = decision
        role: Role = "small" if decision.action == "stay" else "large"
        self._site.recorder.route(model=self._site.names[role], reason=decision.reason)

    def _settle_stopped(self) -> None:
        """The reader stopped (at a stop string) while the small model still wrote."""
        if self._decision is None and self._sent:
            self._settle(replace(self._policy.on_complete("stop"), action="stay"))

    def _send(self, role: Role, chunk: EngineChunk) -> Piece:
        self._sent.extend(step.token_id for step in chunk.steps)
        self._by_model[role] += len(chunk.steps)
        return Piece(model=role, chunk=chunk)

    async def _close(self) -> None:
        if self._small is not None:
            await self._small.aclose()
        taken = False
        if self._takeover is not None:
            taken = self._takeover.took_ticket
            await self._takeover.close()
        if self._kept and not taken:
            await self._site.small.release(self._small_id)
        self._settle_stopped()
        self._write_log()

    def _write_log(self) -> None:
        if self._watch is None or self._decision is None or self._site.log is None:
            return
        self._site.log(
            self._watch.record(
                self._decision,
                small_tokens=self._by_model["small"],
                large_tokens=self._by_model["large"],
            )
        )
