"""Loads, fair shares, costs and queues by themselves."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from cluster import plan
from cluster.errors import ConfigError
from cluster.plan_report import Scenario
from cluster.simulate_cost import EngineCost
from cluster.simulate_load import draw_lengths, requests
from cluster.simulate_mappers import Mapper, Mappers
from cluster.simulate_share import FairShare, Flow, Level, Port, Window, max_min
from cluster.simulate_spec import Lengths, Load
from tests.cluster.fleet import always, scenario, setup

# Loads.


def test_lengths_have_their_median_and_their_95th_percentile() -> None:
    lengths = Lengths(median_tokens=1_000, p95_tokens=8_000)
    drawn = draw_lengths(lengths, np.random.default_rng(0), 200_000)
    assert np.median(drawn) == pytest.approx(1_000, rel=0.01)
    assert np.percentile(drawn, 95) == pytest.approx(8_000, rel=0.02)


def test_requests_keep_their_lengths_and_fates_at_every_rate() -> None:
    load = Load(seconds=50.0)
    slow, fast = requests(load, 10.0), requests(load, 100.0)
    assert 400 < len(slow) < 600 and 4_700 < len(fast) < 5_300
    for one, other in zip(slow, fast, strict=False):
        assert one.arrives_s == pytest.approx(10 * other.arrives_s)
        assert (one.prompt_tokens, one.answer_tokens, one.small_tokens, one.escalates) == (
            (other.prompt_tokens, other.answer_tokens, other.small_tokens, other.escalates)
        )


@pytest.mark.parametrize("shape", [1.0, 0.25])
def test_gaps_between_arrivals_vary_as_their_shape_says(shape: float) -> None:
    arrives_s = [one.arrives_s for one in requests(Load(seconds=500, burstiness=shape), 100.0)]
    gaps_s = np.diff(arrives_s)
    assert np.mean(gaps_s) == pytest.approx(0.01, rel=0.03)
    assert np.var(gaps_s) / np.mean(gaps_s) ** 2 == pytest.approx(1 / shape, rel=0.05)


def test_an_escalated_answer_has_tokens_of_both_models() -> None:
    load = Load(seconds=100.0, answer=Lengths(median_tokens=8, p95_tokens=64), escalation=0.5)
    drawn = requests(load, 50.0)
    escalated = [one for one in drawn if one.escalates]
    possible = sum(one.answer_tokens > 1 for one in drawn)
    assert possible < len(drawn)
    assert len(escalated) / possible == pytest.approx(0.5, abs=0.03)
    assert all(one.small_tokens >= 1 and one.large_tokens >= 1 for one in escalated)
    assert all(one.large_tokens == 0 for one in drawn if not one.escalates)


def test_prompt_and_answer_stay_within_the_longest_request() -> None:
    drawn = requests(Load(seconds=100.0, max_tokens=2_000), 20.0)
    assert max(one.prompt_tokens + one.answer_tokens for one in drawn) == 2_000


def test_lengths_come_from_a_file_in_pairs(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"prompt_tokens": 10, "answer_tokens": 3}\n\n{"prompt_tokens": 70, "answer_tokens": 5}\n'
    )
    drawn = requests(Load(seconds=20.0, lengths_file=path), 50.0)
    assert {(one.prompt_tokens, one.answer_tokens) for one in drawn} == {(10, 3), (70, 5)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no lengths"),
        ('{"prompt_tokens": 0, "answer_tokens": 3}', "line 1: Input should be greater than 0"),
        ('{"prompt_tokens": 4, "answer_tokens": 3}\nno', "line 2: Invalid JSON"),
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        requests(Load(lengths_file=path), 1.0)


# Fair shares.


def shared(amounts: list[tuple[float, float]], capacity: float) -> tuple[list[float], Port]:
    """When flows that start at a time with an amount are done on one port."""
    env = simpy.Environment()
    share, port = FairShare(env, Window(0.0, 100.0)), Port(capacity)
    done_s = [0.0] * len(amounts)

    def flow(at: int, start_s: float, amount: float) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(start_s)
        yield share.start(amount, port).done
        done_s[at] = env.now

    for at, (start_s, amount) in enumerate(amounts):
        env.process(flow(at, start_s, amount))
    env.run()
    return done_s, port


def test_two_flows_have_half_the_port_each_until_one_is_done() -> None:
    done_s, port = shared([(0.0, 1.0), (0.0, 3.0)], 1.0)
    assert done_s == pytest.approx([2.0, 4.0])
    assert port.carried == pytest.approx(4.0) == pytest.approx(port.measured)


def test_a_flow_that_joins_later_takes_its_half_from_then_on() -> None:
    done_s, _ = shared([(0.0, 4.0), (1.0, 2.0)], 2.0)
    assert done_s == pytest.approx([3.0, 3.0])


def test_a_cancelled_flow_leaves_its_share_and_what_it_moved() -> None:
    env = simpy.Environment()
    share, port = FairShare(env, Window(0.0, 100.0)), Port(2.0)
    first, second = share.start(10.0, port), share.start(4.0, port)
    env.run(until=1.0)
    share.cancel(first)
    env.run(until=second.done)
    assert env.now == pytest.approx(2.5)
    assert port.carried == pytest.approx(5.0) and not port.flows


@given(
    capacities=st.lists(st.floats(0.1, 100), min_size=1, max_size=5),
    ways=st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=8),
)
def test_every_flow_is_held_up_by_a_full_port_where_none_is_faster(
    capacities: list[float], ways: list[set[int]]
) -> None:
    """The definition of max-min fairness."""
    env = simpy.Environment()
    ports = [Port(one) for one in capacities]
    flows = []
    for way in ways:
        mine = tuple(ports[at] for at in sorted({one % len(ports) for one in way}))
        flow = Flow(1.0, mine, 0.0, env.event())
        flows.append(flow)
        for port in mine:
            port.flows[flow] = None
    rates = max_min(flows, ports)
    used = {port: sum(rates[flow] for flow in port.flows) for port in ports}
    for port in ports:
        assert used[port] <= port.capacity * (1 + 1e-9)
    for flow in flows:
        assert any(
            used[port] >= port.capacity * (1 - 1e-9)
            and rates[flow] >= max(rates[other] for other in port.flows) * (1 - 1e-9)
            for port in flow.ports
        )


def test_a_level_integrates_over_all_time_and_over_the_window() -> None:
    level = Level(Window(2.0, 4.0))
    level.add(3, 1.0)
    level.add(-1, 3.0)
    level.add(-2, 6.0)
    assert (level.integral, level.measured) == (3 * 2 + 2 * 3, 3 * 1 + 2 * 1)


# The mappers' queue.


def test_mappers_with_random_work_queue_as_m_m_c_does() -> None:
    """Erlang C: how long jobs wait for one of c servers, and how busy these are."""
    servers, arrivals_per_s, service_s, jobs = 3, 2.0, 1.2, 60_000
    env = simpy.Environment()
    window = Window(0.0, jobs / arrivals_per_s)
    mappers = [Mapper(1.0, window) for _ in range(servers)]
    queue, draws = Mappers(env, mappers, places=1), np.random.default_rng(3)
    waited_s: list[float] = []

    def job() -> Generator[simpy.Event, Any, None]:
        asked_s = env.now
        mapper = yield queue.take()
        waited_s.append(env.now - asked_s)
        yield env.timeout(draws.exponential(service_s))
        queue.give(mapper)

    def arrive() -> Generator[simpy.Event, Any, None]:
        for _ in range(jobs):
            yield env.timeout(draws.exponential(1 / arrivals_per_s))
            env.process(job())

    env.process(arrive())
    env.run()
    load = arrivals_per_s * service_s
    full = load**servers / math.factorial(servers) / (1 - load / servers)
    waits = full / (sum(load**n / math.factorial(n) for n in range(servers)) + full)
    assert np.mean(waited_s) == pytest.approx(waits * service_s / (servers - load), rel=0.08)
    busy = sum(mapper.handoffs.measured for mapper in mappers) / (servers * window.seconds)
    assert busy == pytest.approx(load / servers, rel=0.02)


def test_who_leaves_the_queue_gets_no_mapper() -> None:
    env = simpy.Environment()
    (only,) = mappers = [Mapper(1.0, Window(0.0, 1.0))]
    queue = Mappers(env, mappers, places=1)
    first, second, third = queue.take(), queue.take(), queue.take()
    queue.withdraw(second)
    queue.give(first.value)
    assert third.triggered and not second.triggered
    queue.withdraw(third)
    assert only.handoffs.value == queue.waiting == 0


# Costs.


def cost(gpus: int = 1, **changes: Any) -> tuple[EngineCost, Scenario]:
    return setup(rules={"large_gpus": gpus}, **changes).engine("large"), scenario(**changes)


@pytest.mark.parametrize("tokens", [1, 100, 32_768])
def test_reading_a_whole_prompt_in_one_step_is_the_planners_prefill(tokens: int) -> None:
    engine, planned = cost()
    target = setup().target
    flop = engine.read_flop(0, tokens)
    assert flop == pytest.approx(plan.prefill_flop_per_token(target, tokens) * tokens)
    assert engine.step_s(0, 0, flop, tokens, 0)[0] == pytest.approx(
        plan.prefill_s(target, tokens, planned.hardware)
    )


def test_parts_of_a_prompt_add_up_and_a_decode_is_a_part_of_one_token() -> None:
    engine, _ = cost(gpu_memory_gb_s=None)
    parts = [engine.read_flop(0, 700), engine.read_flop(700, 701), engine.read_flop(701, 5_000)]
    assert sum(parts) == pytest.approx(engine.read_flop(0, 5_000))
    decode_s, arithmetic_s = engine.step_s(1, 700, 0.0, 0, 0)
    assert decode_s == arithmetic_s == pytest.approx(engine.step_s(0, 0, parts[1], 1, 700)[0])


def test_a_step_takes_longer_with_every_request_in_it() -> None:
    engine, _ = cost()
    steps_s = [engine.step_s(n, n * 2_000, 0.0, 0, 0)[0] for n in (1, 8, 64, 128)]
    assert steps_s == sorted(steps_s) and steps_s[3] > 2 * steps_s[0]
    moved_bytes = 64 * 2_001 * 262_144 + plan.parameters(setup().target).total * 2
    assert steps_s[2] == pytest.approx(moved_bytes / (4.8e12 * 0.5))


def test_the_kv_pool_is_what_the_weights_leave_of_nine_tenths() -> None:
    engine, _ = cost(gpus=2)
    weights_bytes = plan.parameters(setup().target).total * 2
    assert engine.pool_tokens == int((2 * 141e9 * 0.9 - weights_bytes) / 262_144)


def test_percentiles_below_the_median_are_refused() -> None:
    with pytest.raises(ValueError, match="p95 of 5 tokens is below the median of 6"):
        Lengths(median_tokens=6, p95_tokens=5)
    assert draw_lengths(always(7), np.random.default_rng(0), 3).tolist() == [7, 7, 7]
