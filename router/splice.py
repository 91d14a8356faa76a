"""One answer from two models: the small one starts, the large one may take over.

`Cascade` turns token ids into one stream of pieces, each from one model. What was sent is never
taken back: tokens wait in a short buffer, and those that wait when the large model takes over are
dropped unseen. It knows nothing of text, HTTP, vLLM or how KV travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from cluster.errors import EngineError, RequestError
from router.access import Access
from router.api import (
    CascadeInfo,
    CascadeOptions,
    CascadeProgress,
    DecisionInfo,
    Segment,
    SessionInfo,
)
from router.chance import request_hash
from router.job import Job, Piece, Site
from router.policy import Decision, Policy, RequestView, Role
from router.ports import EngineChunk, EngineRequest, KeepRule, TokenStep
from router.record import AnswerRecord, Watch
from router.shadow import Shadow
from router.takeover import Takeover


class Cascade:
    """One answer. Iterate `pieces()` once; then, or after closing it, ask for `info()`."""

    def __init__(self, site: Site, policy: Policy, options: CascadeOptions, job: Job) -> None:
        assert job.max_tokens > 0
        self._site = site
        self._watch = None if site.log is None else Watch(policy)
        self._policy: Policy = self._watch or policy
        self._options = options
        self._job = job
        # Who names a model and nothing else wants its own answer, not one on mapped KV.
        named = options.force is not None and options.escalate_after_tokens is None
        recompute = True if named else options.recompute
        self._access = Access(site, job, recompute=recompute)
        self._drift_handoffs = 0 if job.turn is None else job.turn.held("large").handoffs
        self._sent: list[int] = []
        self._by_model: dict[Role, int] = {"small": 0, "large": 0}
        self._decision: Decision | None = None
        self._takeover: Takeover | None = None
        self._engine: AsyncGenerator[EngineChunk, None] | None = None
        self._kept = False
        self._complete = False
        self._small_seen = 0
        self._scores: list[tuple[int, float | None]] = []
        self._threshold: float | None = None

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer, with exactly `max_tokens` tokens at most over both models.

        Raises EngineError when no model can go on and RequestError when the prompt does not fit.
        Closing it aborts whatever still runs.
        """
        try:
            decision = self._policy.on_request(self._view())
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
                answer = self._answer_large()
            else:
                answer = self._answer_small(room)
            async with aclosing(answer):
                async for piece in answer:
                    yield piece
            if self._takeover is not None:
                assert self._engine is not None
                await self._engine.aclose()
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

    def progress(self) -> CascadeProgress:
        """Who wrote what so far, and the scores since the last call."""
        scores, self._scores = self._scores, []
        return CascadeProgress(served_by=self._segments(), scores=scores, threshold=self._threshold)

    async def info(self) -> CascadeInfo:
        """Who wrote what, and why; waits a moment for the costs of a handoff."""
        self._settle_stopped()
        decision, turn = self._decision, self._job.turn
        takeovers = (self._takeover, self._access.borrowed)
        session = None
        if turn is not None:
            session = SessionInfo(
                id=turn.session_id, turn=turn.number, drift_handoffs=self._drift_handoffs
            )
        infos = [None if one is None else await one.info() for one in takeovers]
        return CascadeInfo(
            served_by=self._segments(),
            decision=None if decision is None else DecisionInfo(**vars(decision)),
            handoff=infos[0],
            borrowed=infos[1],
            session=session,
        )

    def _segments(self) -> list[Segment]:
        return [
            Segment(model=self._site.names[role], tokens=tokens)
            for role, tokens in self._by_model.items()
            if tokens
        ]

    def _view(self) -> RequestView:
        turn = self._job.turn
        return RequestView(
            request_hash=request_hash(self._job.prompt_token_ids),
            prompt_tokens=self.prompt_tokens,
            last_model=None if turn is None else turn.last_model,
            unread_tokens={
                "small": self._access.unread_tokens("small"),
                "large": self._access.unread_tokens("large"),
            },
        )

    async def _answer_large(self) -> AsyncGenerator[Piece, None]:
        request = self._access.request("large", self._job.max_tokens, "never")
        self._engine = await self._access.open("large", request)
        async for chunk in self._engine:
            yield self._send("large", chunk)
            if chunk.finish_reason is not None:
                self._complete = True
                return
        raise EngineError("the large engine ended a stream without a finish reason")

    async def _answer_small(self, room_tokens: int) -> AsyncGenerator[Piece, None]:
        """The small model's part; sets `_takeover` when the large one has to go on."""
        policy = self._policy
        held: deque[TokenStep] = deque()
        watched = policy.may_escalate and policy.small_tokens is None
        hold_back = self._site.hold_back_tokens if watched else 0
        cached_tokens: int | None = None
        request = self._small_request(room_tokens)
        try:
            self._engine = await self._access.open("small", request)
            async for chunk in self._engine:
                if cached_tokens is None:
                    cached_tokens = chunk.cached_tokens
                if chunk.prompt_logprobs is not None and policy.reads_prompt:
                    decision = policy.on_prompt(chunk.prompt_logprobs)
                    self._note_score(decision)
                    if self._may_escalate(decision):
                        self._escalate(decision)
                        return
                for step in chunk.steps:
                    held.append(step)
                    if chunk.finish_reason is not None:
                        continue
                    decision = policy.on_token(step)
                    self._small_seen += 1
                    self._note_score(decision)
                    if self._may_escalate(decision):
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
        keep: KeepRule = "on_abort" if limit == job.max_tokens else "always"
        if policy.small_tokens == 0 or policy.at_end:
            keep = "always"
        longest = len(job.prompt_token_ids) + limit
        if (
            not policy.may_escalate
            or self._options.recompute
            or longest < self._site.min_handoff_tokens
        ):
            keep = "never"
        self._kept = keep != "never"
        return self._access.request("small", limit, keep, prompt_logprobs=policy.reads_prompt)

    def _may_escalate(self, decision: Decision) -> bool:
        """Whether an escalation is wanted, and allowed after what was sent."""
        if decision.action != "escalate":
            return False
        restarts = (self._options.on_escalate or self._site.on_escalate) == "restart"
        if (not restarts or not self._sent) and self._job.may_switch(tuple(self._sent)):
            return True
        if self._watch is not None:
            self._watch.note_forbidden()
        return False

    def _note_score(self, decision: Decision) -> None:
        self._threshold = decision.threshold
        if self._options.explain:
            self._scores.append((self._small_seen, decision.score))

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
            if self._policy.at_end and last.steps and self._may_escalate(decision):
                self._escalate(decision)
                return None
            decision = replace(decision, action="stay", reason="ended_early")
        self._settle(decision)
        self._complete = True
        return self._send("small", last)

    def _escalate(self, decision: Decision, skip: str | None = None) -> None:
        """Hand the rest to the large model; `skip` is a reason not to try a handoff."""
        self._settle(decision)
        if self._options.recompute:
            skip = skip or "requested"
        request = self._access.continuation(self._sent, self._job.max_tokens - len(self._sent))
        self._takeover = self._access.takeover("large", self._access.request_id, request, skip)

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
        if self._engine is not None:
            await self._engine.aclose()
        await self._access.close()
        taken = False
        if self._takeover is not None:
            taken = self._takeover.took_ticket
            await self._takeover.close()
        if self._kept and not taken:
            await self._site.small.release(self._access.request_id)
        self._settle_stopped()
        self._policy.on_end(self._by_model["large"])
        if self._sent:
            self._access.remember(self._sent, self._by_model, self._takeover)
        self._write_log()

    def _write_log(self) -> None:
        if self._watch is None or self._decision is None or self._site.log is None:
            return
        record = self._watch.record(
            self._decision,
            small_tokens=self._by_model["small"],
            large_tokens=self._by_model["large"],
        )
        shadow = self._site.shadow
        if shadow is not None and self._complete and shadow.wants(record):
            self._site.background.spawn(self._judge(shadow, record))
        else:
            self._site.log(record)

    async def _judge(self, shadow: Shadow, record: AnswerRecord) -> None:
        assert self._site.log is not None
        answer = tuple(self._sent)
        self._site.log(await shadow.judged(record, self._job.prompt_token_ids, answer))
