"""A closed loop of handoffs: as soon as one is over, the next begins. No engines, no arrivals."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import simpy

from cluster.plan import transfer_s
from cluster.simulate_cost import HandoffCost
from cluster.simulate_handoff import Handoffs, Order
from cluster.simulate_mappers import Ends, Mapper, Mappers
from cluster.simulate_share import Window
from cluster.simulate_spec import Rules

# Enough rounds that the first ones, in which all begin at once, do not count.
_ROUNDS, _SKIPPED = 60, 20
_UNLIMITED_GBPS = 1e6


def handoffs_per_s(
    cost: HandoffCost,
    rules: Rules,
    *,
    mappers: int,
    link_gbps: float,
    engine_gbps: float | None,
    in_flight: int,
    tokens: int,
) -> float:
    """How many handoffs of `tokens` end in a second while `in_flight` are under way.

    All go from one engine to another, each with a link of `engine_gbps`; every mapper has one of
    `link_gbps`. The targets have blocks at once.
    """
    env = simpy.Environment()
    window = Window(0.0, 1.0)
    patient = rules.model_copy(update={"lease_s": 1e9, "deadline_s": 1e9})
    queue = Mappers(
        env,
        [Mapper(link_gbps, window, rules.local_gbps) for _ in range(mappers)],
        rules.concurrent_handoffs,
    )
    handoffs = Handoffs(env, queue, cost, patient, window)
    engine_gbps = engine_gbps or _UNLIMITED_GBPS
    source, target = Ends(engine_gbps), Ends(engine_gbps)
    ended_s: list[float] = []
    wanted = _ROUNDS * in_flight

    def one_after_the_other(number: int) -> Generator[simpy.Event, Any, None]:
        # Requests that begin at once would stay in step, and all want the same link for ever.
        yield env.timeout(number / in_flight * alone_s)
        while len(ended_s) < wanted:
            allocated, over = env.event(), env.event()
            allocated.succeed()
            arrived = partial(_happen, over)
            handoffs.begin(Order(tokens, source, target, allocated, _nothing, arrived, _unexpected))
            yield over
            ended_s.append(env.now)

    chunks = cost.chunks(tokens)
    slowest_bytes = max(
        sum(one.read_bytes for one in chunks), sum(one.write_bytes for one in chunks)
    )
    alone_s = max(transfer_s(slowest_bytes, link_gbps), sum(one.map_s for one in chunks))
    loops = [env.process(one_after_the_other(number)) for number in range(in_flight)]
    env.run(until=env.all_of(loops))
    first = _SKIPPED * in_flight
    return (wanted - first) / (ended_s[wanted - 1] - ended_s[first - 1])


def _happen(event: simpy.Event) -> None:
    event.succeed()


def _nothing() -> None:
    """The source's blocks are of no interest."""


def _unexpected(reason: str) -> None:
    raise AssertionError(f"a handoff without limits failed: {reason}")
