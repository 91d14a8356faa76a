"""Simulated handoffs: a queue for mapper replicas, then read, map and write as one pipeline.

With nothing else under way and a part for every layer this takes exactly what
`cluster.plan.overlapped_s` says: the longest step, and one part of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from cluster.simulate_cost import HandoffCost
from cluster.simulate_mappers import Ends, Mapper, Mappers
from cluster.simulate_pipeline import Pipeline, Step
from cluster.simulate_share import FairShare, Port, Window
from cluster.simulate_spec import Resource, Rules


@dataclass(slots=True)
class Order:
    """One handoff of `tokens` from `source` to `target`.

    `allocated` happens when the target has blocks. `on_read` is called once, when the source may
    free its own; then `on_arrived` when the target holds all, or `on_failed` with a reason: the
    `lease` ended before a mapper had a place, or the handoff was not over by its `deadline`.
    """

    tokens: int
    source: Ends
    target: Ends
    allocated: simpy.Event
    on_read: Callable[[], None]
    on_arrived: Callable[[], None]
    on_failed: Callable[[str], None]


class Handoffs:
    """Conducts handoffs on the mappers of a fleet and counts them."""

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
        self._running: dict[Pipeline, None] = {}
        self.outcomes: Counter[str] = Counter()
        self.moved_tokens = 0

    def begin(self, order: Order) -> None:
        self._env.process(self._handoff(order))

    def places_wait_for(self) -> Counter[Resource]:
        """The handoffs that hold a mapper's place now, by what they wait for."""
        return Counter(one.waits_for for one in self._running)

    def _handoff(self, order: Order) -> Generator[simpy.Event, Any, None]:
        env, rules = self._env, self._rules
        lease, deadline = env.timeout(rules.lease_s), env.timeout(rules.deadline_s)
        copies = 2 if rules.place == "apart" else 1
        yield env.timeout(self._cost.overhead_s + copies * rules.link_latency_ms / 1e3)
        if not rules.read_ahead:
            yield order.allocated | lease
            if not order.allocated.triggered:
                self._fail(order, "lease")
                return
        asked = self._mappers.take()
        yield asked | lease
        if not asked.triggered:
            self._mappers.withdraw(asked)
            self._fail(order, "lease")
            return
        # A mapper that begins has the source wait until the deadline.
        mapper: Mapper | None = asked.value
        assert mapper is not None
        pipeline = Pipeline(
            env,
            self._share,
            self._steps(order, mapper),
            order.allocated,
        )
        self._running[pipeline] = None
        yield pipeline.read | deadline
        if pipeline.read.triggered:
            order.on_read()
            yield pipeline.done | deadline
        pipeline.cancel()
        del self._running[pipeline]
        self._mappers.give(mapper)
        if pipeline.done.triggered:
            self.outcomes["mapped"] += 1
            self.moved_tokens += order.tokens
            order.on_arrived()
        else:
            self._fail(order, "deadline", freed=pipeline.read.triggered)

    def _fail(self, order: Order, reason: str, *, freed: bool = False) -> None:
        self.outcomes[reason] += 1
        if not freed:
            order.on_read()
        order.on_failed(reason)

    def _steps(self, order: Order, mapper: Mapper) -> list[Step]:
        """The pipeline. The copy within a node is a step where it takes time.

        Before the target has blocks nothing is written, and one chunk is mapped.
        """
        place = self._rules.place
        chunks = self._cost.chunks(order.tokens)
        within = None if mapper.local is None else (mapper.local,)
        into, out = (order.source.out, mapper.ends.into), (mapper.ends.out, order.target.into)
        read_ports = within if place == "sender" else into
        write_ports = within if place == "receiver" else out
        steps = []
        if read_ports is not None:
            read_bytes = [one.read_bytes for one in chunks]
            steps.append(Step(read_bytes, read_ports, _resource(read_ports, within)))
        ahead = 0 if write_ports is None else 1
        steps.append(Step([one.map_s for one in chunks], (mapper.gpu,), "mapper", ahead))
        if write_ports is not None:
            write_bytes = [one.write_bytes for one in chunks]
            steps.append(Step(write_bytes, write_ports, _resource(write_ports, within), 0))
        return steps


def _resource(ports: tuple[Port, ...], within: tuple[Port, ...] | None) -> Resource:
    """A copy within the mapper's node is its own work."""
    return "mapper" if ports is within else "link"
