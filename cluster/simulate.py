"""A fleet under load as a discrete-event simulation, one variant at one rate.

Requests arrive, the small model answers, some go on to the large one. Costs of work are the
planner's (`cluster.simulate_cost`); what is new here is waiting. The same seed gives the same
result, and every variant and rate sees the same requests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from cluster.catalog import Architecture
from cluster.errors import ConfigError
from cluster.plan_report import Scenario
from cluster.simulate_cost import EngineCost, HandoffCost, Machine, engine_cost, handoff_cost
from cluster.simulate_engine import Engine, Work
from cluster.simulate_handoff import Handoffs, Order
from cluster.simulate_load import Request
from cluster.simulate_mappers import Ends, Mapper, Mappers
from cluster.simulate_share import Level, Window
from cluster.simulate_spec import Load, Pool, Replicas, Resource, Rules, Variant, pools_of


@dataclass(frozen=True)
class Setup:
    """Everything about a fleet but its size and its rate. A `machine` replaces the GPUs."""

    source: Architecture
    target: Architecture
    scenario: Scenario
    link_gbps: float
    load: Load
    rules: Rules
    machine: Machine | None = None

    def engine(self, pool: Pool) -> EngineCost:
        model = self.source if pool == "small" else self.target
        gpus = self.rules.gpus(pool)
        return engine_cost(model, gpus, self.scenario, self.rules, self.machine)

    @property
    def handoff(self) -> HandoffCost:
        return handoff_cost(self.source, self.target, self.scenario, self.rules, self.machine)


class EnginePool:
    """Replicas of one model. A request goes to the less busy of two that are drawn at random,
    which is how Ray Serve routes.
    """

    def __init__(
        self,
        env: simpy.Environment,
        cost: EngineCost,
        replicas: int,
        link_gbps: float,
        rules: Rules,
        window: Window,
        seed: int,
    ) -> None:
        self.engines = [Engine(env, cost, rules, window) for _ in range(replicas)]
        self.ends = [Ends(link_gbps) for _ in range(replicas)]
        self._random = random.Random(seed)

    def choose(self) -> int:
        first = self._random.randrange(len(self.engines))
        second = self._random.randrange(len(self.engines))
        ongoing = self.engines[first].ongoing, self.engines[second].ongoing
        return first if ongoing[0] <= ongoing[1] else second

    @property
    def ongoing(self) -> int:
        return sum(engine.ongoing for engine in self.engines)


@dataclass(slots=True)
class Samples:
    """Durations in seconds of the measured requests."""

    first_token: list[float]
    large_first_token: list[float]
    handoff: list[float]
    small_tpot: list[float]
    large_tpot: list[float]


class Fleet:
    """One variant with its replicas, fed with requests by `run`."""

    def __init__(
        self,
        setup: Setup,
        variant: Variant,
        replicas: Replicas,
        requests: list[Request],
        on_second: Callable[[float], None] | None = None,
    ) -> None:
        self.setup, self.variant, self.replicas = setup, variant, replicas
        self.requests = requests
        self._on_second = on_second
        load, rules = setup.load, setup.rules
        self.env = simpy.Environment()
        self.window = Window(load.warmup * load.seconds, load.seconds)
        self.pools: dict[Pool, EnginePool] = {}
        self.mappers: list[Mapper] = []
        for pool in pools_of(variant):
            count = replicas.of(pool)
            if not count:
                raise ConfigError(f"{variant} needs {pool} replicas; give at least 1")
            if pool == "mapper":
                self.mappers = [
                    Mapper(setup.link_gbps, self.window, rules.local_gbps) for _ in range(count)
                ]
                continue
            seed = load.seed * 2 + (pool == "large")
            self.pools[pool] = EnginePool(
                self.env, setup.engine(pool), count, setup.link_gbps, rules, self.window, seed
            )
            self._check_room(pool)
        self._queue = Mappers(self.env, self.mappers, rules.concurrent_handoffs)
        self.handoffs = Handoffs(self.env, self._queue, setup.handoff, rules, self.window)
        self.recomputed: Counter[str] = Counter()
        self.samples = Samples([], [], [], [], [])
        self.in_system = Level(self.window)
        self.sojourn_s = 0.0
        self.ended = 0
        self.grown: dict[Pool, tuple[int, int]] = {}
        self.kept: dict[Pool, tuple[int, int]] = {}
        self.places_wait_for: Counter[Resource] = Counter()
        self.looks = 0

    def run(self) -> None:
        """Let all requests arrive and end."""
        self.env.process(self._arrive())
        self.env.process(self._watch())
        self.env.run()
        assert self.ended == len(self.requests) and self.in_system.value == 0
        for pool in self.pools.values():
            for engine in pool.engines:
                assert engine.reserved.value == engine.pinned_tokens == engine.ongoing == 0
        assert all(mapper.handoffs.value == 0 for mapper in self.mappers)

    @property
    def link_bytes(self) -> float:
        """All bytes that went over links."""
        outs = [ends.out.carried for pool in self.pools.values() for ends in pool.ends]
        return sum(outs) + sum(mapper.ends.out.carried for mapper in self.mappers)

    def _arrive(self) -> Generator[simpy.Event, Any, None]:
        for request in self.requests:
            yield self.env.timeout(max(0.0, request.arrives_s - self.env.now))
            self.in_system.add(1, self.env.now)
            if self.variant == "all_large":
                self._answer(request, "large", request.answer_tokens)
            else:
                self._answer(request, "small", request.small_tokens)

    def _watch(self) -> Generator[simpy.Event, Any, None]:
        """Notes how full each pool is before and after the second half of the measured time, and
        every second what the mappers' places are held for.
        """
        middle_s = (self.window.start_s + self.window.end_s) / 2
        before: dict[Pool, tuple[int, int]] = {}
        for until_s in (middle_s, self.window.end_s):
            self.places_wait_for.clear()
            self.looks = 0
            while self.env.now < until_s:
                yield self.env.timeout(min(1.0, until_s - self.env.now))
                self.places_wait_for.update(self.handoffs.places_wait_for())
                self.looks += 1
                if self._on_second is not None:
                    self._on_second(self.env.now)
            now = {pool: (self.ongoing(pool), self._kept(pool)) for pool in pools_of(self.variant)}
            for pool, (ongoing, kept) in now.items():
                was = before.get(pool, (0, 0))
                self.grown[pool], self.kept[pool] = (was[0], ongoing), (was[1], kept)
            before = now

    def ongoing(self, pool: Pool) -> int:
        """Requests in a pool now, waiting ones included."""
        if pool != "mapper":
            return self.pools[pool].ongoing
        return self._queue.waiting + sum(mapper.handoffs.value for mapper in self.mappers)

    def _kept(self, pool: Pool) -> int:
        """Those of them that the pool itself keeps: a handoff is its target's until that has
        blocks, then it is the mappers'.
        """
        expected = sum(engine.expected for engine in self.pools["large"].engines)
        if pool == "mapper":
            return expected
        return self.pools[pool].ongoing - (expected if pool == "large" else 0)

    def _measured(self, request: Request) -> bool:
        return request.arrives_s >= self.window.start_s

    def _answer(self, request: Request, pool: Pool, tokens: int) -> None:
        """The first model of a request writes its part."""
        chosen = self.pools[pool].choose()
        engine = self.pools[pool].engines[chosen]
        escalates = request.escalates and pool == "small"
        first_s = 0.0

        def first() -> None:
            nonlocal first_s
            first_s = self.env.now
            if self._measured(request):
                self.samples.first_token.append(first_s - request.arrives_s)

        def done() -> None:
            self._note_tpot(request, pool, first_s, tokens)
            if escalates:
                self._escalate(request, chosen, work)
            else:
                self._end(request)

        work = Work(request.prompt_tokens, tokens, first, done)
        work.keep = escalates and self.variant == "handoff"
        engine.submit(work)

    def _escalate(self, request: Request, small: int, before: Work) -> None:
        """The large model takes over, by a handoff where the variant has them and rules allow."""
        decided_s = self.env.now
        large = self.pools["large"]
        chosen = large.choose()
        target, source = large.engines[chosen], self.pools["small"].engines[small]
        rules = self.setup.rules
        first_s = 0.0

        def first() -> None:
            nonlocal first_s
            first_s = self.env.now
            if self._measured(request):
                self.samples.large_first_token.append(first_s - decided_s)

        def done() -> None:
            self._note_tpot(request, "large", first_s, request.large_tokens)
            self._end(request)

        context_tokens = request.prompt_tokens + request.small_tokens
        work = Work(context_tokens, request.large_tokens, first, done)
        if not before.keep:
            target.submit(work)
            return
        covered_tokens = context_tokens - rules.native_suffix_tokens
        refused = None
        if covered_tokens < rules.min_handoff_tokens:
            refused = "short"
        elif not source.may_pin(before):
            refused = "pinned"
        if refused is not None:
            source.free(before)
            self.recomputed[refused] += 1
            target.submit(work)
            return
        source.pin(before)
        allocated = self.env.event()

        def arrived() -> None:
            if self._measured(request):
                self.samples.handoff.append(self.env.now - decided_s)
            target.arrived(work)

        def failed(reason: str) -> None:
            self.recomputed[reason] += 1
            target.recompute(work)

        work.remote, work.held_tokens = True, covered_tokens
        work.on_allocated = lambda: _happen(allocated)
        ends = self.pools["small"].ends[small], large.ends[chosen]
        self.handoffs.begin(
            Order(covered_tokens, *ends, allocated, lambda: source.unpin(before), arrived, failed)
        )
        target.submit(work)

    def _note_tpot(self, request: Request, pool: Pool, first_s: float, tokens: int) -> None:
        if tokens > 1 and self._measured(request):
            samples = self.samples.small_tpot if pool == "small" else self.samples.large_tpot
            samples.append((self.env.now - first_s) / (tokens - 1))

    def _end(self, request: Request) -> None:
        self.ended += 1
        self.sojourn_s += self.env.now - request.arrives_s
        self.in_system.add(-1, self.env.now)

    def _check_room(self, pool: Pool) -> None:
        room = self.pools[pool].engines[0].cost.pool_tokens
        most = max((one.prompt_tokens + one.answer_tokens for one in self.requests), default=0)
        if most > room:
            raise ConfigError(
                f"the KV pool of a {pool} replica holds {room:,} tokens and a request takes "
                f"{most:,}; give the replicas more GPUs or lower --max-tokens"
            )


def _happen(event: simpy.Event) -> None:
    event.succeed()
