"""One simulated engine replica: continuous batching, chunked prefill and a KV pool.

Steps follow one another like those of a vLLM engine: requests that write an answer have a token
each, what is left of the step's token budget reads prompts in order of arrival. A request is
admitted when the pool has room for all the tokens it will ever have, so that nothing is preempted.
Knows no other replica: what happens next is told by callbacks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from cluster.simulate_cost import EngineCost
from cluster.simulate_share import Level, Window
from cluster.simulate_spec import Rules


@dataclass(slots=True, eq=False)
class Work:
    """A request in one engine: a context of `context_tokens`, then `new_tokens` written.

    `held_tokens` of the context are there already, or come from elsewhere when `remote`; the engine
    then calls `on_allocated` when it has blocks and waits for `Engine.arrived`. With `keep` the
    blocks stay pinned after the last token until `Engine.unpin`.
    """

    context_tokens: int
    new_tokens: int
    on_first: Callable[[], None]
    on_done: Callable[[], None]
    keep: bool = False
    remote: bool = False
    held_tokens: int = 0
    on_allocated: Callable[[], None] | None = None
    allocated: bool = False

    @property
    def pool_tokens(self) -> int:
        """KV of the whole context and all new tokens but the last, which is never read."""
        return self.context_tokens + self.new_tokens - 1


class Engine:
    """A replica. `ongoing` counts its requests; a pinned one that ended no longer counts.

    `busy_s` is the measured time with a step under way, `arithmetic_s` what of it arithmetic at
    the GPUs' rate would have taken. Up to `most_steps` steps without any reading are one event;
    with 1 every step is.
    """

    most_steps = 64

    def __init__(
        self, env: simpy.Environment, cost: EngineCost, rules: Rules, window: Window
    ) -> None:
        self._env = env
        self.cost = cost
        self._rules = rules
        self._window = window
        self._waiting: deque[Work] = deque()
        self._ready: deque[Work] = deque()
        self._reading: deque[Work] = deque()
        self._writing: list[tuple[int, int, Work]] = []
        self._step = 0
        self._order = 0
        self._decode_context_tokens = 0
        self._wake: simpy.Event | None = None
        self.ongoing = 0
        self.reserved = Level(window)
        self.pinned_tokens = 0
        self._expected = 0
        self._expected_tokens = 0
        self.busy_s = 0.0
        self.arithmetic_s = 0.0
        env.process(self._run())

    def submit(self, work: Work) -> None:
        self.ongoing += 1
        self._waiting.append(work)
        self._awake()

    def arrived(self, work: Work) -> None:
        """The remote KV of an allocated work is there."""
        assert work.allocated and work.remote
        self._expect(work, -1)
        self._ready.append(work)
        self._awake()

    def recompute(self, work: Work) -> None:
        """Nothing will come for a remote work: the engine reads all of it."""
        if work.allocated:
            self._expect(work, -1)
        work.remote = False
        work.held_tokens = 0
        if work.allocated:
            self._ready.append(work)
            self._awake()

    @property
    def expected(self) -> int:
        """Requests that are here and wait for KV from elsewhere.

        Also those that wait for room which the KV that is awaited has reserved.
        """
        if not self._waiting or self._full:
            return self._expected
        first = self._waiting[0].pool_tokens
        here_tokens = self.reserved.value - self._expected_tokens
        blocked = not self._fits(self._waiting[0]) and here_tokens + first <= self.cost.pool_tokens
        return self._expected + (len(self._waiting) if blocked else 0)

    def _expect(self, work: Work, change: int) -> None:
        self._expected += change
        self._expected_tokens += change * work.pool_tokens

    @property
    def _full(self) -> bool:
        """Whether as many requests run as may."""
        return len(self._reading) + len(self._writing) >= self._rules.max_seqs

    def may_pin(self, work: Work) -> bool:
        """Whether tickets may hold the blocks of this work besides what they hold."""
        limit = self._rules.max_pinned_fraction * self.cost.pool_tokens
        return self.pinned_tokens + work.pool_tokens <= limit

    def pin(self, work: Work) -> None:
        self.pinned_tokens += work.pool_tokens

    def unpin(self, work: Work) -> None:
        """Free the blocks of a pinned work."""
        self.pinned_tokens -= work.pool_tokens
        self.free(work)

    def free(self, work: Work) -> None:
        self.reserved.add(-work.pool_tokens, self._env.now)
        self._awake()

    def _awake(self) -> None:
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env = self._env
        while True:
            parts = self._schedule()
            decodes = len(self._writing)
            if not parts and not decodes:
                self._wake = env.event()
                yield self._wake
                continue
            if not parts:
                yield from self._write_on(decodes)
                continue
            flop, read, behind = 0.0, 0, 0
            for work, tokens in parts:
                flop += self.cost.read_flop(work.held_tokens, work.held_tokens + tokens)
                read += tokens
                behind += work.held_tokens
            step_s, arithmetic_s = self.cost.step_s(
                decodes, self._decode_context_tokens, flop, read, behind
            )
            yield env.timeout(step_s)
            self._note_busy(step_s, arithmetic_s)
            self._finish(parts, decodes, 1)

    def _write_on(self, decodes: int) -> Generator[simpy.Event, Any, None]:
        """Steps that only write, as one event, until an answer ends or something new comes.

        What comes within a step waits for its end, as it does between single steps.
        """
        env = self._env
        began_s, now_s, context_tokens = env.now, env.now, self._decode_context_tokens
        ends_s, arithmetic_s = [], []
        for _ in range(min(self._writing[0][0] - self._step, self.most_steps)):
            step_s, one_s = self.cost.step_s(decodes, context_tokens, 0.0, 0, 0)
            now_s += step_s
            ends_s.append(now_s)
            arithmetic_s.append(one_s)
            context_tokens += decodes
        self._wake = env.event()
        yield env.timeout(now_s - began_s) | self._wake
        self._wake = None
        steps = min(bisect_left(ends_s, env.now) + 1, len(ends_s))
        if ends_s[steps - 1] > env.now:
            yield env.timeout(ends_s[steps - 1] - env.now)
        self._note_busy(env.now - began_s, sum(arithmetic_s[:steps]))
        self._finish([], decodes, steps)

    def _note_busy(self, seconds: float, arithmetic_s: float) -> None:
        """Account for steps that took `seconds` until now."""
        measured_s = self._window.overlap_s(self._env.now - seconds, self._env.now)
        self.busy_s += measured_s
        self.arithmetic_s += measured_s * arithmetic_s / seconds

    def _schedule(self) -> list[tuple[Work, int]]:
        """What each prompt reads in the next step; admits what fits."""
        budget = self._rules.step_tokens - len(self._writing)
        parts: list[tuple[Work, int]] = []
        for work in self._reading:
            if budget <= 0:
                break
            budget -= self._part(work, budget, parts)
        while budget > 0 and not self._full:
            if self._ready:
                work = self._ready.popleft()
            elif self._waiting and self._fits(self._waiting[0]):
                work = self._waiting.popleft()
                self.reserved.add(work.pool_tokens, self._env.now)
                work.allocated = True
                if work.on_allocated is not None:
                    work.on_allocated()
                if work.remote:
                    self._expect(work, 1)
                    continue
            else:
                break
            self._reading.append(work)
            budget -= self._part(work, budget, parts)
        return parts

    def _fits(self, work: Work) -> bool:
        assert work.pool_tokens <= self.cost.pool_tokens
        return self.reserved.value + work.pool_tokens <= self.cost.pool_tokens

    def _part(self, work: Work, budget: int, parts: list[tuple[Work, int]]) -> int:
        left = work.context_tokens - work.held_tokens
        tokens = min(left, self._rules.long_prefill_tokens, budget)
        parts.append((work, tokens))
        return tokens

    def _finish(self, parts: list[tuple[Work, int]], decodes: int, steps: int) -> None:
        self._step += steps
        self._decode_context_tokens += decodes * steps
        ended = []
        while self._writing and self._writing[0][0] == self._step:
            ended.append(heapq.heappop(self._writing)[2])
        for work in ended:
            self._decode_context_tokens -= work.pool_tokens
            self._end(work)
        for work, tokens in parts:
            work.held_tokens += tokens
            if work.held_tokens < work.context_tokens:
                continue
            self._reading.remove(work)
            work.on_first()
            if work.new_tokens == 1:
                self._end(work)
                continue
            self._order += 1
            self._decode_context_tokens += work.context_tokens
            heapq.heappush(self._writing, (self._step + work.new_tokens - 1, self._order, work))

    def _end(self, work: Work) -> None:
        self.ongoing -= 1
        if not work.keep:
            self.free(work)
        work.on_done()
