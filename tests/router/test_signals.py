"""Margins and the sliding mean."""

from __future__ import annotations

import math

import pytest

from router.ports import TokenStep
from router.signals import SlidingMean, margin


def test_margin_is_top1_minus_top2_even_when_another_token_was_sampled() -> None:
    step = TokenStep(token_id=7, logprobs=((7, -4.0, 9), (1, -0.5, 1), (2, -1.25, 2)))
    assert margin(step) == 0.75


@pytest.mark.parametrize(
    "logprobs",
    [(), ((7, -0.1, 1),), ((7, -0.1, 1), (3, -math.inf, 2)), ((7, math.nan, 1), (3, -1.0, 2))],
)
def test_margin_without_two_finite_numbers_is_unknown(
    logprobs: tuple[tuple[int, float, int], ...],
) -> None:
    assert margin(TokenStep(token_id=7, logprobs=logprobs)) is None


def test_sliding_mean_is_unknown_until_the_window_is_full_and_then_moves() -> None:
    mean = SlidingMean(3)
    seen = []
    for value in (3.0, 6.0, 9.0, 0.0):
        mean.push(value)
        seen.append(mean.value)
    assert seen == [None, None, 6.0, 5.0]
