"""Thresholds for fractions, costs and failure rates, on scores whose answers are known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster.config import RoutingConfig
from cluster.errors import ConfigError, RequestError
from router.api import CascadeOptions
from router.calibration import Calibration, answers_needed, read_calibration
from router.policies import RoutingState, make_policy
from router.promises import Prices, fraction_for_cost, fraction_for_failures, kept_needed
from router.record import AnswerRecord
from router.samples import calibrate, collect, dependencies_of, realised_fraction
from router.scores import ScoreSpec
from router.threshold import Threshold
from tests.router.logs import DEPENDS, WINDOW, record, uniform_records
from tests.router.views import view

ROUTING = RoutingConfig(margin_window_tokens=2, max_escalation_tokens=4, calibration="c")


def calibrated(records: list[AnswerRecord], target: float = 0.3) -> Calibration:
    return calibrate(collect(records, WINDOW), WINDOW, target, DEPENDS)


def test_the_threshold_is_the_order_statistic_of_the_running_minimum() -> None:
    # Running minima of window means 1, 2, ..., 9: the third smallest of nine escalates 3 / 10.
    records = [record(i, [9.0, 9.0, 2.0 * i - 9.0, 9.0]) for i in range(1, 10)]
    made = calibrated(records)
    assert made.scores == tuple(float(i) for i in range(1, 10))
    assert made.threshold().value == 3.0


@pytest.mark.parametrize("target", [0.1, 0.3, 0.5])
def test_the_mean_realised_fraction_is_the_target_and_the_interval_covers_it(
    target: float,
) -> None:
    realised, covered = [], 0
    for seed in range(120):
        made = calibrated(uniform_records(199, seed=seed), target)
        # Scores are uniform in [0, 10): the long-run fraction is known without sampling it.
        realised.append(made.threshold().value / 10.0)
        low, high = made.interval(target)
        covered += low <= realised[-1] <= high
    assert sum(realised) / len(realised) == pytest.approx(target, abs=0.01)
    assert 0.84 <= covered / 120 <= 0.96


def test_the_interval_is_that_of_the_beta_distribution() -> None:
    low, high = calibrated(uniform_records(1000), 0.3).interval(0.3)
    assert (low, high) == pytest.approx((0.276, 0.324), abs=0.001)


def test_ties_do_not_break_the_fraction() -> None:
    source = random.Random(1)
    records = [record(i, [source.choice([1.0, 5.0])] * 2) for i in range(4_000)]
    made = calibrated(records[:2_000], 0.2)
    assert made.threshold().value == 1.0
    later = collect(records[2_000:], WINDOW)
    assert realised_fraction(later, made.threshold()) == pytest.approx(0.2, abs=0.03)


def test_a_larger_fraction_never_has_a_lower_threshold() -> None:
    made = calibrated(uniform_records(300))
    values = [made.threshold(step / 100).value for step in range(1, 100)]
    assert values == sorted(values)


def test_too_few_answers_are_refused_with_the_number_that_would_do() -> None:
    with pytest.raises(ConfigError, match="on at least 9$"):
        calibrated(uniform_records(8), 0.1)
    assert calibrated(uniform_records(9), 0.1).rank(0.1) == 1
    assert [answers_needed(fraction) for fraction in (0.3, 0.1, 1.0)] == [3, 9, 0]


def test_answers_without_a_score_count_as_answers_that_stay() -> None:
    records = [record(i, [float(i)] * 2) for i in range(5)] + [record(9, [1.0])] * 4
    made = calibrated(records, 0.3)
    assert (made.size, made.unscored, made.threshold().value) == (9, 4, 2.0)
    with pytest.raises(ConfigError, match="only 5 of 9 answers have a score"):
        made.threshold(0.7)


def test_a_log_that_was_cut_by_escalations_tells_only_what_lies_above_them() -> None:
    cut = [record(i, [1.0, 0.5], complete=False, score=0.75) for i in range(20)]
    made = calibrated(cut + [record(i, [float(i)] * 2) for i in range(20, 99)], 0.5)
    assert made.blind == 20
    assert made.threshold(0.3).value == 29.0
    with pytest.raises(ConfigError, match="took over 20 of 99 .* ask for 0.210 or more"):
        made.threshold(0.2)


def test_a_score_of_whole_answers_refuses_a_log_that_was_cut() -> None:
    records = [record(1, [1.0, 0.5], complete=False, score=0.75), record(2, [1.0])]
    with pytest.raises(ConfigError, match="deferral needs whole answers"):
        collect(records, ScoreSpec(name="deferral"))


def test_a_file_survives_the_disk_and_a_changed_one_has_another_id(tmp_path: Path) -> None:
    made = calibrated(uniform_records(99))
    path = tmp_path / "c.json"
    path.write_text(made.model_dump_json())
    assert read_calibration(path) == made
    assert read_calibration(path).calibration_id == made.calibration_id
    changed = Calibration.model_validate(made.model_dump() | {"target_fraction": 0.2})
    assert changed.calibration_id != made.calibration_id
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    with pytest.raises(ConfigError, match="version: .*make it again"):
        read_calibration(path)


@pytest.mark.parametrize("field", list(type(DEPENDS).model_fields))
def test_a_stale_file_is_refused_by_the_field_that_changed(field: str) -> None:
    made = calibrated(uniform_records(9))
    made.check_dependencies(DEPENDS)
    with pytest.raises(ConfigError, match=f"stale calibration: {field} is"):
        made.check_dependencies(DEPENDS.model_copy(update={field: "other"}))


def test_lines_of_two_deployments_are_not_mixed() -> None:
    other = DEPENDS.model_copy(update={"mapper_id": "9"})
    records = [record(1, [1.0]), record(2, [1.0]).model_copy(update={"depends": other})]
    with pytest.raises(ConfigError, match="line 2 .*mapper_id is 9 there and 4 here"):
        dependencies_of(records)


def test_the_policy_uses_the_files_threshold_and_names_the_file() -> None:
    made = calibrated(uniform_records(99), 0.3)
    state = RoutingState.of(ROUTING, made)
    decision = make_policy(ROUTING, CascadeOptions(), state).on_request(view("00"))
    assert decision.threshold == made.threshold(0.3).value
    assert decision.calibration_id == made.calibration_id
    wished = make_policy(ROUTING, CascadeOptions(target_fraction=0.1), state).on_request(view("00"))
    assert wished.threshold == made.threshold(0.1).value
    assert wished.threshold < decision.threshold


def test_a_file_for_another_score_is_refused_at_start_and_per_request() -> None:
    made = calibrated(uniform_records(99))
    other = ROUTING.model_copy(update={"margin_window_tokens": 3})
    with pytest.raises(ConfigError, match="window_tokens 2, the policy has window_tokens 3"):
        RoutingState.of(other, made)
    with pytest.raises(RequestError, match="cascade.policy: the calibration is for name margin"):
        make_policy(ROUTING, CascadeOptions(policy="quantile"), RoutingState.of(ROUTING, made))


PRICES = Prices(small_token=0.25, large_token=1.0, handoff=0.5, longest_tokens=4)


def test_an_answer_costs_the_small_tokens_then_the_handoff_then_the_large_ones() -> None:
    (sample,) = collect([record(1, [5.0, 5.0, 1.0, 5.0])], WINDOW)
    assert PRICES.of(sample, Threshold(1.0)) == 1.0
    assert PRICES.of(sample, Threshold(4.0)) == 3 * 0.25 + 0.5 + 1.0
    assert PRICES.of(sample, Threshold(6.0)) == 2 * 0.25 + 0.5 + 2.0


def test_held_back_tokens_are_paid_twice_and_earlier_never_costs_less() -> None:
    prices = Prices(
        small_token=0.25, large_token=1.0, handoff=0.5, longest_tokens=4, hold_back_tokens=2
    )
    margins = [[1.0, 1.0, 9.0, 9.0], [9.0, 1.0, 1.0, 9.0], [9.0, 9.0, 1.0, 1.0]]
    samples = collect([record(i, one) for i, one in enumerate(margins)], WINDOW)
    costs = [prices.of(one, Threshold(2.0)) for one in samples]
    assert costs == [2 * 0.25 + 0.5 + 4.0, 3 * 0.25 + 0.5 + 3.0, 4 * 0.25 + 0.5 + 2.0]
    assert prices.bound == 5.0


def test_the_conformal_cost_bound_holds_on_average_and_is_nearly_used_up() -> None:
    costs = []
    for seed in range(100):
        samples = collect(uniform_records(150, seed=seed), WINDOW)
        fraction = fraction_for_cost(samples, PRICES, 0.7)
        made = calibrate(samples, WINDOW, fraction, DEPENDS)
        # Two tokens: 0.5 when kept, 1.0 when handed over after the second.
        costs.append(0.5 + 0.5 * made.threshold().value / 10.0)
    assert 0.65 <= sum(costs) / len(costs) <= 0.7


def test_a_cost_below_that_of_the_small_model_is_refused_with_what_is_known() -> None:
    samples = collect(uniform_records(99), WINDOW)
    # (99 answers at 0.5 and the bound of 4.5 once) / 100
    with pytest.raises(ConfigError, match="at most 0.54; allow more"):
        fraction_for_cost(samples, PRICES, 0.5)


def judged(count: int, seed: int, failing_below: float) -> list[AnswerRecord]:
    """Answers that fail exactly where their score is low."""
    return [
        one.model_copy(update={"failed": (one.margins or (0.0,))[0] < failing_below})
        for one in uniform_records(count, seed=seed)
    ]


def test_failures_are_kept_below_the_limit_as_often_as_promised() -> None:
    broken = 0
    for seed in range(60):
        samples = collect(judged(600, seed, 3.0), WINDOW)
        fraction = fraction_for_failures(samples, 0.1, 0.9)
        kept_from = calibrate(samples, WINDOW, fraction, DEPENDS).threshold().value
        rate = max(0.0, 3.0 - kept_from) / (10.0 - kept_from)
        broken += rate > 0.1
        # 2.2 would do exactly; the grid and the confidence cost a few points.
        assert 0.2 <= fraction <= 0.4
    assert broken / 60 <= 0.1


def test_too_few_judged_answers_are_refused_with_the_number_that_would_do() -> None:
    assert [kept_needed(rate, 0.95) for rate in (0.1, 0.05, 0.02, 0.01)] == [29, 59, 149, 299]
    samples = collect(judged(100, 0, 0.0), WINDOW)
    with pytest.raises(ConfigError, match="100 judged answers .* at least 118"):
        fraction_for_failures(samples, 0.05, 0.95)


def test_a_small_model_that_always_fails_certifies_nothing() -> None:
    samples = collect(judged(400, 0, 10.0), WINDOW)
    with pytest.raises(ConfigError, match="no threshold keeps failures below 0.1"):
        fraction_for_failures(samples, 0.1, 0.9)
