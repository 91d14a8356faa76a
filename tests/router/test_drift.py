"""A threshold that follows the traffic, and what it promises."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import RoutingConfig
from router.api import CascadeOptions
from router.drift import Drift
from router.policies import RoutingState, make_policy
from router.samples import calibrate, collect
from router.threshold import Threshold
from tests.fakes import step
from tests.router.logs import DEPENDS, WINDOW, uniform_records
from tests.router.views import view

ROUTING = RoutingConfig(
    margin_window_tokens=2, max_escalation_tokens=4, calibration="c", drift_step=0.1
)


def drift(step: float = 0.1, target: float = 0.3) -> Drift:
    start = Threshold(3.0, 0.5, "c")
    return Drift(start, target_fraction=target, low=0.0, high=10.0, step=step)


@given(
    st.lists(st.floats(0.0, 10.0), min_size=1, max_size=300),
    st.floats(0.01, 5.0),
    st.floats(0.05, 0.95),
)
def test_the_fraction_is_within_its_bound_for_scores_in_any_order(
    scores: list[float], step: float, target: float
) -> None:
    made = drift(step, target)
    escalated = 0
    for score in scores:
        doubts = made.threshold.doubts(score, 0.7)
        escalated += doubts
        made.observe(doubts)
        assert -step <= made.threshold.value <= 10.0 + step
    bound = (10.0 + step) / (step * len(scores))
    assert abs(escalated / len(scores) - target) <= bound + 1e-9


def test_traffic_that_became_harder_is_escalated_as_often_as_before() -> None:
    source = random.Random(0)
    made, seen = drift(0.2), []
    for number in range(6_000):
        score = source.uniform(0.0, 10.0 if number < 2_000 else 2.5)
        seen.append(made.threshold.doubts(score, source.random()))
        made.observe(seen[-1])
    # The calibrated threshold of 3.0 would escalate all of the later answers.
    assert sum(seen[3_000:]) / 3_000 == pytest.approx(0.3, abs=0.02)


def test_answers_without_a_score_cannot_push_it_out_of_range() -> None:
    made = drift()
    for _ in range(5_000):
        made.observe(False)
    assert made.threshold.value == pytest.approx(10.1)


def test_it_begins_at_the_calibrated_threshold_and_says_when_it_moved() -> None:
    made = drift()
    assert made.threshold == Threshold(3.0, 0.5, "c")
    made.observe(True)
    assert made.threshold == Threshold(pytest.approx(2.93), 0.0, "c+drift")


def test_moves_are_logged_once_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    made = drift()
    with caplog.at_level(logging.INFO, "router.drift"):
        for number in range(120):
            made.observe(number % 2 == 0)
    assert len(caplog.records) == 2
    assert "escalated 0.500 of 50 in all, target 0.300" in caplog.text


def state() -> RoutingState:
    made = calibrate(collect(uniform_records(99), WINDOW), WINDOW, 0.3, DEPENDS)
    return RoutingState.of(ROUTING, made)


def test_policies_take_the_running_threshold_and_report_each_answer_once() -> None:
    shared = state()
    assert shared.drift is not None and shared.calibration is not None
    start = shared.drift.threshold.value
    stays = make_policy(ROUTING, CascadeOptions(), shared)
    stays.on_request(view("00"))
    stays.on_token(step(1, 9.9))
    stays.on_complete("stop")
    stays.on_complete("stop")
    assert shared.drift.threshold.value == pytest.approx(start + 0.03)
    leaves = make_policy(ROUTING, CascadeOptions(), shared)
    assert leaves.on_request(view("00")).threshold == pytest.approx(start + 0.03)
    assert [leaves.on_token(step(1, 0.0)).action for _ in range(3)][1:] == ["escalate"] * 2
    assert shared.drift.threshold.value == pytest.approx(start + 0.03 - 0.07)
    made = make_policy(ROUTING, CascadeOptions(), shared).on_request(view("00"))
    assert made.calibration_id == f"{shared.calibration.calibration_id}+drift"


def test_a_request_with_a_target_of_its_own_neither_follows_nor_moves_it() -> None:
    shared = state()
    assert shared.drift is not None and shared.calibration is not None
    before = shared.drift.threshold
    own = make_policy(ROUTING, CascadeOptions(target_fraction=0.5), shared)
    assert own.on_request(view("00")).threshold == shared.calibration.threshold(0.5).value
    own.on_complete("stop")
    assert shared.drift.threshold == before
