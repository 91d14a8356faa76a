"""Whole fleets against closed forms, conservation laws and the planner's own predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster import plan
from cluster.errors import ConfigError
from cluster.plan_pair import handoff_s, make_plan
from cluster.simulate_engine import Engine
from cluster.simulate_measured import lone_takeover
from cluster.simulate_point import point
from cluster.simulate_spec import VARIANTS, Place, Replicas, Targets, Variant
from tests.cluster.fleet import always, ran, scenario, setup

SMALL_BYTES, LARGE_BYTES = 163_840, 262_144


# Queues with known answers.


@pytest.mark.parametrize("utilisation", [0.3, 0.7])
def test_one_engine_that_reads_one_prompt_at_a_time_waits_as_m_d_1_does(utilisation: float) -> None:
    tokens = 600
    whole_step = {"max_seqs": 1, "step_tokens": 1_000}
    load = {"prompt": always(tokens), "answer": always(1), "warmup": 0.0, "escalation": 0.0}
    service_s = plan.prefill_s(setup().target, tokens, scenario().hardware)
    made = setup(load | {"seconds": 40_000 * service_s}, whole_step)
    fleet = ran(made, "all_large", utilisation / service_s, Replicas(small=0, large=1, mapper=0))
    waited_s = np.mean(fleet.samples.first_token) - service_s
    pollaczek_khinchine_s = utilisation * service_s / (2 * (1 - utilisation))
    assert waited_s == pytest.approx(pollaczek_khinchine_s, rel=0.05)
    busy_s = fleet.pools["large"].engines[0].busy_s
    assert busy_s / fleet.window.seconds == pytest.approx(utilisation, rel=0.02)


def test_engines_that_read_random_prompts_are_as_busy_as_m_g_c() -> None:
    load = {"answer": always(1), "warmup": 0.0, "escalation": 0.0, "seconds": 200.0}
    made = setup(load, {"max_seqs": 1, "step_tokens": 60_000})
    fleet = ran(made, "all_large", 8.0, Replicas(small=0, large=3, mapper=0))
    work_s = sum(
        plan.prefill_s(made.target, one.prompt_tokens, scenario().hardware)
        for one in fleet.requests
    )
    engines = fleet.pools["large"].engines
    busy_s = sum(engine.busy_s for engine in engines)
    assert busy_s == pytest.approx(work_s, rel=0.01)
    assert 0.2 < busy_s / (3 * 200.0) < 0.9


@pytest.mark.parametrize("variant", VARIANTS)
def test_littles_law_holds(variant: Variant) -> None:
    fleet = ran(setup(), variant, 25.0)
    ended_s = fleet.env.now
    mean_in_system = fleet.in_system.integral / ended_s
    arrivals_per_s = len(fleet.requests) / ended_s
    mean_sojourn_s = fleet.sojourn_s / len(fleet.requests)
    assert mean_in_system == pytest.approx(arrivals_per_s * mean_sojourn_s, rel=1e-9)


# Conservation.


@pytest.mark.parametrize(
    ("place", "bytes_per_token"),
    [("receiver", SMALL_BYTES), ("sender", LARGE_BYTES), ("apart", SMALL_BYTES + LARGE_BYTES)],
)
def test_links_carry_the_bytes_of_all_handoffs_and_pools_are_empty_after(
    place: Place, bytes_per_token: int
) -> None:
    fleet = ran(setup({"burstiness": 0.3}, {"place": place}), "handoff", 30.0)
    escalated = [one for one in fleet.requests if one.escalates]
    assert fleet.ended == len(fleet.requests)
    assert fleet.handoffs.outcomes["mapped"] + fleet.recomputed.total() == len(escalated) > 100
    tokens = sum(
        one.prompt_tokens + one.small_tokens - 1
        for one in escalated
        if one.prompt_tokens + one.small_tokens - 1 >= 64
    )
    assert set(fleet.recomputed) <= {"short"}
    assert fleet.handoffs.moved_tokens == tokens
    assert fleet.link_bytes == pytest.approx(tokens * bytes_per_token, rel=1e-9)
    for pool in fleet.pools.values():
        assert [(one.reserved.value, one.pinned_tokens) for one in pool.engines] == (
            [(0, 0)] * len(pool.engines)
        )


def test_a_slow_link_ends_leases_and_every_request_is_still_answered() -> None:
    fleet = ran(setup(rules={"lease_s": 0.3}, link_gbps=1.0), "handoff", 20.0)
    escalated = sum(one.escalates for one in fleet.requests)
    assert fleet.recomputed["lease"] == fleet.handoffs.outcomes["lease"] > escalated / 2
    assert fleet.ended == len(fleet.requests)
    assert fleet.link_bytes > fleet.handoffs.moved_tokens * SMALL_BYTES


def test_tickets_beyond_their_share_of_the_pool_are_refused() -> None:
    fleet = ran(setup(rules={"max_pinned_fraction": 0.005}), "handoff", 20.0)
    assert fleet.recomputed["pinned"] > 0
    assert fleet.ended == len(fleet.requests)


def test_engines_are_the_same_until_an_escalation_whatever_follows() -> None:
    """Common random numbers: the small pool of both cascades lives through the same."""
    first = [ran(setup(), one, 20.0).samples.first_token for one in ("handoff", "reprefill")]
    assert first[0] == first[1]


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    def numbers(seed: int) -> str:
        fleet = ran(setup({"seed": seed}), "handoff", 20.0)
        return point(fleet, 20.0, Targets(), 3.0).model_dump_json()

    assert numbers(1) == numbers(1) != numbers(2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_in_one_event_are_the_steps_one_by_one(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ran(setup(), variant, 25.0)
    monkeypatch.setattr(Engine, "most_steps", 1)
    single = ran(setup(), variant, 25.0)
    for field in ("first_token", "large_first_token", "handoff", "small_tpot", "large_tpot"):
        assert getattr(many.samples, field) == pytest.approx(
            getattr(single.samples, field), rel=1e-6
        )
    for name, pool in many.pools.items():
        for one, other in zip(pool.engines, single.pools[name].engines, strict=True):
            assert one.busy_s == pytest.approx(other.busy_s)
            # A run of steps that crosses the window's edge counts there in proportion.
            assert one.arithmetic_s == pytest.approx(other.arithmetic_s, rel=1e-4)


# More load, more waiting.


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_load_never_lowers_a_median(variant: Variant) -> None:
    points = [
        point(ran(setup({"seconds": 60.0}), variant, rate), rate, Targets(), 3.0)
        for rate in (5.0, 10.0, 20.0, 40.0)
    ]
    for field in ("first_token", "large_first_token", "large_tpot"):
        medians_s = [value.p50_s for one in points if (value := getattr(one, field)) is not None]
        assert len(medians_s) == (0 if (variant, field) == _NEVER else 4)
        for less_s, more_s in zip(medians_s, medians_s[1:], strict=False):
            assert more_s > 0.97 * less_s


_NEVER = ("all_large", "large_first_token")


LONG = {"lease_s": 1e6, "deadline_s": 1e6}


def full(rules: dict[str, Any], rate: float, link_gbps: float = 400.0, **counts: int) -> str | None:
    """What a fleet of handoffs says cannot keep up."""
    made = setup({"seconds": 60.0}, LONG | rules, link_gbps=link_gbps)
    replicas = Replicas(**({"small": 12, "large": 8, "mapper": 2} | counts))
    return point(ran(made, "handoff", rate, replicas), rate, Targets(), 3.0).saturated


def test_a_fleet_that_keeps_up_is_not_full() -> None:
    assert full({}, 20.0) is None


def test_too_few_small_replicas_are_seen_as_such() -> None:
    assert full({}, 60.0, small=2) == "small"


@pytest.mark.parametrize("mapper", [1, 2, 8])
@pytest.mark.parametrize("read_ahead", [True, False])
def test_places_that_the_large_pool_lacks_are_not_the_mappers_work(
    mapper: int, read_ahead: bool
) -> None:
    """Handoffs that wait for blocks of the target hold the mappers' places."""
    assert (
        full({"max_seqs": 16, "read_ahead": read_ahead}, 40.0, small=30, large=3, mapper=mapper)
        == "large"
    )


def test_memory_that_the_large_pool_lacks_is_not_the_mappers_work() -> None:
    assert full({"pool_fraction": 0.55}, 40.0, small=30, large=4) == "large"


@pytest.mark.parametrize("read_ahead", [True, False])
def test_maps_that_are_too_slow_fill_the_mappers(read_ahead: bool) -> None:
    # All source layers, at 36 handoffs a second: more than one GPU can map.
    assert (
        full({"k": 40, "read_ahead": read_ahead}, 120.0, small=40, large=20, mapper=1) == "mapper"
    )


@pytest.mark.parametrize("pool_fraction", [0.9, 0.6])
@pytest.mark.parametrize("place", ["apart", "receiver", "sender"])
def test_slow_links_are_neither_the_mappers_nor_the_large_pools_fault(
    place: Place, pool_fraction: float
) -> None:
    """Even when what is on its way has reserved all of the large pool."""
    rules = {"place": place, "pool_fraction": pool_fraction}
    assert full(rules, 40.0, link_gbps=5.0, small=24, mapper=1) == "link"


def test_overload_of_a_re_prefill_is_the_large_pools() -> None:
    made = setup({"seconds": 60.0})
    replicas = Replicas(small=12, large=1, mapper=0)
    assert point(ran(made, "reprefill", 40.0, replicas), 40.0, Targets(), 3.0).saturated == "large"


# One request alone.


@pytest.mark.parametrize("tokens", [64, 2_048, 30_000])
@pytest.mark.parametrize("place", ["receiver", "sender"])
@pytest.mark.parametrize("link_gbps", [400.0, 10.0])
def test_a_lone_handoff_takes_what_the_planner_says(
    tokens: int, place: Any, link_gbps: float
) -> None:
    by_layer = {"place": place, "chunk_tokens": None}
    made = setup(rules=by_layer, link_gbps=link_gbps, tokens=tokens)
    mapper = make_plan(made.source, made.target, made.scenario).mappers[0]
    expected_s = handoff_s(
        made.source, made.target, mapper, place, link_gbps, made.scenario, tokens
    )
    alone = lone_takeover(made, "handoff", tokens)
    assert alone.handoff_s == pytest.approx(expected_s, rel=1e-9)
    weights_s = plan.prefill_s(made.target, 1, scenario().hardware)
    assert alone.large_s - alone.handoff_s == pytest.approx(weights_s, rel=0.2)


def test_a_lone_handoff_over_two_links_has_three_overlapped_steps() -> None:
    made, tokens = setup(rules={"chunk_tokens": None}), 8_000
    steps_s = sorted(
        (
            plan.transfer_s(tokens * SMALL_BYTES, 400),
            made.handoff.map_s(tokens),
            plan.transfer_s(tokens * LARGE_BYTES, 400),
        )
    )
    expected_s = 0.02 + steps_s[2] + (steps_s[0] + steps_s[1]) / made.source.layers
    assert lone_takeover(made, "handoff", tokens).handoff_s == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("tokens", [64, 2_048, 30_000])
def test_a_lone_re_prefill_takes_what_the_planner_says(tokens: int) -> None:
    made = setup(rules={"step_tokens": 60_000})
    expected_s = plan.prefill_s(made.target, tokens + 1, scenario().hardware)
    alone = lone_takeover(made, "reprefill", tokens)
    assert alone.large_s == pytest.approx(expected_s, rel=1e-9)
    assert alone.handoff_s is None


def test_chunks_of_a_prompt_each_read_the_weights() -> None:
    made = setup()
    tokens = 20 * made.rules.long_prefill_tokens  # and the one that the small model wrote
    expected_s = plan.prefill_s(made.target, tokens + 1, scenario().hardware)
    weights_s = plan.prefill_s(made.target, 1, scenario().hardware)
    alone = lone_takeover(made, "reprefill", tokens)
    assert expected_s + 0.9 * weights_s < alone.large_s < expected_s + 1.3 * weights_s


# What cannot be simulated.


def test_a_request_that_no_pool_holds_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="give the replicas more GPUs or lower --max-tokens"):
        ran(setup({"max_tokens": 500_000, "prompt": always(400_000)}), "all_large", 1.0)


def test_a_model_that_does_not_fit_its_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit 1 GPUs of 40 GB"):
        ran(setup(rules={"gpu_memory_gb": 40}), "all_large", 1.0)
