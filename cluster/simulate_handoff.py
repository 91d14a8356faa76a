"""Simulated handoffs: a queue for mapper replicas, then read, map and write as one pipeline.

One part of each step goes first, alone; then all steps run at once on what is left, each at the
rate that its link or GPU grants. With nothing else under way this takes exactly what
`cluster.plan.overlapped_s` says: the longest step, and one part of each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from cluster.simulate_cost import HandoffCost
from cluster.simulate_share import FairShare, Flow, Level, Port, Window
from cluster.simulate_spec import Rules


class Ends:
    """The two directions of one replica's link, in bytes per second."""

    def __init__(self, link_gbps: float) -> None:
        self.out = Port(link_gbps * 1e9 / 8)
        self.into = Port(link_gbps * 1e9 / 8)


class Mapper:
    """A mapper replica: its link, and a GPU that its handoffs share evenly."""

    def __init__(self, link_gbps: float, window: Window) -> None:
        self.ends = Ends(link_gbps)
        self.gpu = Port(1.0)
        self.handoffs = Level(window)


class Mappers:
    """Grants places on the mapper with the fewest handoffs, first come, first served."""

    def __init__(self, env: simpy.Environment, mappers: list[Mapper], places: int) -> None:
        self._env = env
        self.mappers = mappers
        self._places = places
        self._queue: deque[simpy.Event] = deque()

    def take(self) -> simpy.Event:
        """An event whose value is the mapper; give it back with `give`."""
        asked = self._env.event()
        self._queue.append(asked)
        self._grant()
        return asked

    def give(self, mapper: Mapper) -> None:
        mapper.handoffs.add(-1, self._env.now)
        self._grant()

    def withdraw(self, asked: simpy.Event) -> None:
        """No longer wanted: leave the queue, or give back what was granted."""
        if asked.triggered:
            mapper: Mapper | None = asked.value
            assert mapper is not None
            self.give(mapper)
        else:
            self._queue.remove(asked)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _grant(self) -> None:
        while self._queue:
            mapper = min(self.mappers, key=lambda one: one.handoffs.value)
            if mapper.handoffs.value >= self._places:
                return
            mapper.handoffs.add(1, self._env.now)
            self._queue.popleft().succeed(mapper)


@dataclass(slots=True)
class Order:
    """One handoff of `tokens` from `source` to `target`.

    `allocated` happens when the target has blocks, `on_read` is called when the source may free
    its own, `on_arrived` when the target holds all, `on_failed` with a reason when the lease ended
    before the source was read.
    """

    tokens: int
    source: Ends
    target: Ends
    allocated: simpy.Event
    on_read: Callable[[], None]
    on_arrived: Callable[[], None]
    on_failed: Callable[[str], None]


class Handoffs:
    """Conducts handoffs on the mappers of a fleet and counts them.

    `held_up` are those that hold a mapper's place and wait for blocks of the target.
    """

    def __init__(
        self,
        env: simpy.Environment,
        mappers: Mappers,
        cost: HandoffCost,
        rules: Rules,
        window: Window,
    ) -> None:
        self._env = env
        self._mappers = mappers
        self._cost = cost
        self._rules = rules
        self._share = FairShare(env, window)
        self.held_up = Level(window)
        self.outcomes: Counter[str] = Counter()
        self.moved_tokens = 0

    def begin(self, order: Order) -> None:
        self._env.process(self._handoff(order))

    def _handoff(self, order: Order) -> Generator[simpy.Event, Any, None]:
        env = self._env
        lease = env.timeout(self._rules.lease_s, value="lease")
        copies = 2 if self._rules.place == "apart" else 1
        yield env.timeout(self._cost.overhead_s + copies * self._rules.link_latency_ms / 1e3)
        asked = self._mappers.take()
        yield asked | lease
        if not asked.triggered:
            self._mappers.withdraw(asked)
            self._fail(order)
            return
        mapper: Mapper | None = asked.value
        assert mapper is not None
        starts = self._steps(order, mapper)
        part = 1 / self._cost.stages
        for number, start in enumerate(starts):
            if number == len(starts) - 1:
                self.held_up.add(1, env.now)
                yield order.allocated | lease
                self.held_up.add(-1, env.now)
                if not order.allocated.triggered:
                    self._mappers.give(mapper)
                    self._fail(order)
                    return
            flow = start(part)
            yield flow.done | lease
            if not flow.done.triggered:
                self._share.cancel(flow)
                self._mappers.give(mapper)
                self._fail(order)
                return
        flows = [start(1 - part) for start in starts]
        yield flows[0].done | lease
        if not flows[0].done.triggered:
            for flow in flows:
                self._share.cancel(flow)
            self._mappers.give(mapper)
            self._fail(order)
            return
        order.on_read()
        yield env.all_of([flow.done for flow in flows])
        self._mappers.give(mapper)
        self.outcomes["mapped"] += 1
        self.moved_tokens += order.tokens
        order.on_arrived()

    def _fail(self, order: Order) -> None:
        self.outcomes["lease"] += 1
        order.on_failed("lease")

    def _steps(self, order: Order, mapper: Mapper) -> list[Callable[[float], Flow]]:
        """What starts a share of each step, in order of the pipeline."""
        cost, place = self._cost, self._rules.place
        read_bytes = order.tokens * cost.read_bytes_per_token
        write_bytes = order.tokens * cost.write_bytes_per_token
        map_s = cost.map_s(order.tokens)

        def read(part: float) -> Flow:
            return self._share.start(read_bytes * part, order.source.out, mapper.ends.into)

        def convert(part: float) -> Flow:
            return self._share.start(map_s * part, mapper.gpu)

        def write(part: float) -> Flow:
            return self._share.start(write_bytes * part, mapper.ends.out, order.target.into)

        if place == "receiver":
            return [read, convert]
        return [convert, write] if place == "sender" else [read, convert, write]
