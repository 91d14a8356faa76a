"""Turns a fleet that ran into the numbers of a report, and says whether it kept up."""

from __future__ import annotations

import math

from cluster.simulate import Fleet
from cluster.simulate_handoff import Ends
from cluster.simulate_report import Percentiles, Point, PoolUse
from cluster.simulate_spec import Pool, Targets, pools_of

# A pool that fills by more than this share of what arrives, beyond chance, cannot keep up.
_GROWTH = 0.03
_CHANCE_DEVIATIONS = 3


def point(fleet: Fleet, rate: float, targets: Targets, price_per_gpu_hour: float) -> Point:
    """Numbers of a fleet that ran at `rate`."""
    pools = {pool: _use(fleet, pool) for pool in pools_of(fleet.variant)}
    gpus = sum(use.gpus for use in pools.values())
    hours = gpus / rate * 1e6 / 3_600
    escalates = fleet.variant != "all_large"
    samples = fleet.samples
    timed = {
        name: Percentiles.of(getattr(samples, name))
        for name in ("first_token", "large_first_token", "handoff", "small_tpot", "large_tpot")
    }
    return Point(
        rate=rate,
        requests=len(fleet.requests),
        escalated=sum(escalates and one.escalates for one in fleet.requests),
        handoffs=fleet.handoffs.outcomes["mapped"],
        recomputed=dict(sorted(fleet.recomputed.items())),
        link_bytes=fleet.link_bytes,
        **timed,
        pools=pools,
        gpus=gpus,
        gpu_hours_per_million=hours,
        cost_per_million=hours * price_per_gpu_hour,
        mean_request_s=fleet.sojourn_s / max(1, fleet.ended),
        saturated=saturated(fleet),
        meets_targets=not _late(timed, targets),
    )


def saturated(fleet: Fleet) -> Pool | None:
    """The pool that fills up fastest for what it is asked, if faster than chance explains."""
    since_s = fleet.window.end_s - fleet.window.seconds / 2
    late = [one for one in fleet.requests if one.arrives_s >= since_s]
    escalated = sum(one.escalates for one in late)
    shares: list[tuple[float, Pool]] = []
    for pool, (before, after) in fleet.grown.items():
        is_first = pool == "small" or fleet.variant == "all_large"
        arrived = len(late) if is_first else escalated
        beyond = after - before - _CHANCE_DEVIATIONS * math.sqrt(before + 1)
        if beyond > _GROWTH * arrived:
            shares.append(((after - before) / max(1, arrived), pool))
    if not shares:
        return None
    worst = max(shares)[1]
    if worst == "mapper":
        # Handoffs that wait for the target's blocks hold the mappers' places.
        places = len(fleet.mappers) * fleet.setup.rules.concurrent_handoffs
        if fleet.handoffs.held_up.measured > places * fleet.window.seconds / 2:
            return "large"
    return worst


def _late(timed: dict[str, Percentiles | None], targets: Targets) -> bool:
    limits = {
        "first_token": targets.first_token_s,
        "large_first_token": targets.first_token_s,
        "small_tpot": targets.tpot_s,
        "large_tpot": targets.tpot_s,
    }
    return any(
        one is not None and one.p99_s > limits[name]
        for name, one in timed.items()
        if name in limits
    )


def _use(fleet: Fleet, pool: Pool) -> PoolUse:
    seconds = fleet.window.seconds
    replicas = fleet.replicas.of(pool)
    before, after = fleet.grown[pool]
    kv_held: float | None = None
    ends: list[Ends]
    if pool == "mapper":
        busy = sum(mapper.gpu.measured for mapper in fleet.mappers) / (replicas * seconds)
        arithmetic = busy
        ends = [mapper.ends for mapper in fleet.mappers]
    else:
        engines = fleet.pools[pool].engines
        busy = sum(engine.busy_s for engine in engines) / (replicas * seconds)
        arithmetic = sum(engine.arithmetic_s for engine in engines) / (replicas * seconds)
        held = sum(engine.reserved.measured for engine in engines)
        kv_held = held / (replicas * seconds * engines[0].cost.pool_tokens)
        ends = fleet.pools[pool].ends
    out = [one.out.measured / (one.out.capacity * seconds) for one in ends]
    into = [one.into.measured / (one.into.capacity * seconds) for one in ends]
    return PoolUse(
        replicas=replicas,
        gpus=replicas * fleet.setup.rules.gpus(pool),
        busy=busy,
        arithmetic=arithmetic,
        kv_held=kv_held,
        link_out=sum(out) / replicas,
        link_in=sum(into) / replicas,
        link_busiest=max(*out, *into),
        growth_per_s=(after - before) / (seconds / 2),
    )
