"""Turns a fleet that ran into the numbers of a report, and says whether it kept up."""

from __future__ import annotations

import math

from cluster.simulate import Fleet
from cluster.simulate_mappers import Ends
from cluster.simulate_report import Percentiles, Point, PoolUse
from cluster.simulate_spec import Pool, Resource, Targets, pools_of

# A pool that fills by more than this share of what arrives, beyond chance, cannot keep up.
_GROWTH = 0.03
_CHANCE_DEVIATIONS = 3
# With fewer of the mappers' places taken than this share, nobody waits for one.
_SCARCE = 0.5


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
        places_held=places_held(fleet),
        gpus=gpus,
        gpu_hours_per_million=hours,
        cost_per_million=hours * price_per_gpu_hour,
        mean_request_s=fleet.sojourn_s / max(1, fleet.ended),
        saturated=saturated(fleet),
        meets_targets=not _late(timed, targets),
    )


def saturated(fleet: Fleet) -> Resource | None:
    """What fills up fastest for what it is asked, if faster than chance explains.

    Handoffs that wait for their KV are held up by what the mappers' places are held for; while
    many places are free, by the target alone.
    """
    since_s = fleet.window.end_s - fleet.window.seconds / 2
    late = [one for one in fleet.requests if one.arrives_s >= since_s]
    escalated = sum(one.escalates for one in late)
    places = places_held(fleet)
    scarce = sum(places.values()) > _SCARCE
    shares: list[tuple[float, Pool]] = []
    for pool, (before, after) in (fleet.kept if scarce else fleet.grown).items():
        if pool == "mapper" and not scarce:
            continue
        is_first = pool == "small" or fleet.variant == "all_large"
        arrived = len(late) if is_first else escalated
        beyond = after - before - _CHANCE_DEVIATIONS * math.sqrt(before + 1)
        if beyond > _GROWTH * arrived:
            shares.append(((after - before) / max(1, arrived), pool))
    if not shares:
        return None
    worst = max(shares)[1]
    return max(places.items(), key=lambda one: one[1])[0] if worst == "mapper" else worst


def places_held(fleet: Fleet) -> dict[Resource, float]:
    """Share of the mappers' places that handoffs hold, by what these wait for."""
    places = len(fleet.mappers) * fleet.setup.rules.concurrent_handoffs
    seen = max(1, fleet.looks) * max(1, places)
    return {one: count / seen for one, count in sorted(fleet.places_wait_for.items())}


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
