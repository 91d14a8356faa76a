"""Two lines through measurements, and the choice between them."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.forecast import EXPLORE_EVERY, KEPT, LEAST, STALE_S, Forecast, Line

POINTS = st.lists(st.tuples(st.integers(1, 100_000), st.floats(0.0, 100.0)), max_size=80)
LENGTHS = st.integers(0, 200_000)


def learnt(now_s: list[float] | None = None) -> Forecast:
    """Mapped: 50 ms and 10 us a token. Recompute: 5 ms and 100 us a token: even at 500 tokens."""
    forecast = Forecast(clock=lambda: 0.0 if now_s is None else now_s[0])
    for tokens in (100, 400, 1_000, 3_000):
        forecast.observe_mapped(tokens, 0.050 + 10e-6 * tokens)
        forecast.observe_recompute(tokens, 0.005 + 100e-6 * tokens)
    return forecast


def test_a_line_without_noise_is_found_exactly() -> None:
    forecast = learnt()
    assert forecast.mapped_s(2_000) == pytest.approx(0.070)
    assert forecast.recompute_s(2_000) == pytest.approx(0.205)


def test_below_the_break_even_length_reading_again_is_chosen_and_above_it_mapping() -> None:
    forecast = learnt()
    found = [forecast.cheaper(tokens, tokens) for tokens in (100, 490, 510, 5_000)]
    assert found == ["recompute", "recompute", "mapped", "mapped"]


def test_what_the_target_already_has_is_neither_read_nor_mapped() -> None:
    # A handoff that maps 4,000 tokens does not pay for 200 that are missing.
    assert learnt().cheaper(200, 4_000) == "recompute"


def test_a_tie_is_read_again() -> None:
    forecast = Forecast(clock=lambda: 0.0)
    for tokens in (100, 200, 300):
        forecast.observe_mapped(tokens, 0.25)
        forecast.observe_recompute(tokens, 0.25)
    assert forecast.cheaper(100, 100) == "recompute"


def test_too_few_or_too_similar_lengths_predict_nothing() -> None:
    line = Line()
    for _ in range(10):
        line.observe(100, 1.0)
    assert line.at(100) is None
    line.observe(124, 1.0)
    assert line.at(100) is None
    line.observe(126, 1.0)
    assert line.at(100) == pytest.approx(1.0)
    few = Line()
    for tokens in (10, 1_000)[: LEAST - 1]:
        few.observe(tokens, 1.0)
    assert few.at(100) is None


def test_a_stall_does_not_move_the_line_much() -> None:
    source = random.Random(0)
    line = Line()
    for number in range(40):
        tokens = source.randint(100, 4_000)
        seconds = 0.05 + 20e-6 * tokens + source.uniform(0.0, 0.002)
        line.observe(tokens, seconds + (3.0 if number in (7, 20, 33) else 0.0))
    # Plain least squares is 0.2 s and more too high.
    assert line.at(1_000) == pytest.approx(0.071, abs=0.005)


def test_a_slower_machine_is_noticed() -> None:
    line = Line()
    for factor in (1.0, 3.0):
        for number in range(KEPT):
            tokens = 100 + 37 * number % 2_000
            line.observe(tokens, factor * 1e-4 * tokens)
    assert line.at(1_000) == pytest.approx(0.3)


@given(POINTS, LENGTHS, LENGTHS)
def test_a_prediction_is_never_negative_and_never_falls_with_length(
    points: list[tuple[int, float]], one: int, other: int
) -> None:
    line = Line()
    for tokens, seconds in points:
        line.observe(tokens, seconds)
    low, high = line.at(min(one, other)), line.at(max(one, other))
    if high is not None:
        assert low is not None and 0.0 <= low <= high


def test_nothing_is_said_of_far_more_tokens_than_were_measured() -> None:
    line = Line()
    for tokens in (100, 200, 400):
        line.observe(tokens, tokens * 0.001)
    assert line.at(800) == pytest.approx(0.8)
    assert line.at(801) is None


def chosen(forecast: Forecast, tokens: int) -> list[Literal["mapped", "recompute"] | None]:
    return [forecast.cheaper(tokens, tokens) for _ in range(2 * EXPLORE_EVERY)]


def test_a_path_that_was_not_measured_for_long_is_taken_once_in_a_while() -> None:
    now_s = [0.0]
    forecast = learnt(now_s)
    assert set(chosen(forecast, 800)) == {"mapped"}
    now_s[0] = STALE_S + 1.0
    found = chosen(forecast, 800)
    assert [i for i, one in enumerate(found, 1) if one == "recompute"] == [32, 64]
    forecast.observe_recompute(800, 0.085)
    assert set(chosen(forecast, 800)) == {"mapped"}


def test_nobody_waits_several_times_as_long_for_a_measurement() -> None:
    now_s = [0.0]
    forecast = learnt(now_s)
    now_s[0] = STALE_S + 1.0
    # 0.1 s against 0.5 s.
    assert set(chosen(forecast, 5_000)) == {"mapped"}


def test_an_unknown_path_leaves_the_choice_open() -> None:
    forecast = Forecast(clock=lambda: 0.0)
    for tokens in (100, 1_000, 2_000):
        forecast.observe_mapped(tokens, 0.1)
    assert set(chosen(forecast, 800)) == {None}
