"""The routing bench's numbers, against values worked out by hand."""

from __future__ import annotations

import pytest

from bench.routing_metrics import (
    Ends,
    apgr,
    area,
    auroc,
    cpt,
    deferral_area,
    ece,
    f1,
    failure_rates,
    oracle,
    quadrants,
    share_interval,
)

ENDS = Ends(small=0.2, large=0.6)


def test_pgr_is_0_at_the_small_model_and_1_at_the_large_one() -> None:
    assert ENDS.pgr(0.2) == 0 and ENDS.pgr(0.6) == pytest.approx(1)
    assert ENDS.pgr(0.5) == pytest.approx(0.75) and ENDS.pgr(0.1) == pytest.approx(-0.25)
    assert Ends(0.4, 0.4).pgr(0.5) is None
    assert ENDS.diagonal(0.25) == pytest.approx(0.3)


def test_likeness_counts_shared_words_once_for_each_time_they_occur() -> None:
    # Shared: the (once), cat. 2 * 2 / (3 + 5).
    assert f1(["the", "the", "cat"], ["the", "cat", "sat", "on", "it"]) == pytest.approx(0.5)
    assert f1(["a"], ["b"]) == 0 and f1([], ["b"]) == 0 and f1([], []) == 1


def test_the_area_is_that_of_trapezoids() -> None:
    # 0.5 * (0 + 1) / 2 + 0.5 * (1 + 1) / 2
    assert area([(0.0, 0.0), (0.5, 1.0), (1.0, 1.0)]) == pytest.approx(0.75)


def test_apgr_of_chance_is_a_half_and_always_has_both_ends() -> None:
    assert apgr([(0.3, ENDS.diagonal(0.3)), (0.9, ENDS.diagonal(0.9))], ENDS) == pytest.approx(0.5)
    assert apgr([], ENDS) == pytest.approx(0.5)
    # PGR 0, 1, 1 at 0, 0.5, 1, given out of order and with an end that is replaced by its own.
    assert apgr([(1.0, 0.0), (0.5, 0.6)], ENDS) == pytest.approx(0.75)
    assert apgr([(0.5, 0.4)], Ends(0.4, 0.4)) is None


def test_the_deferral_area_is_what_chance_does_not_have() -> None:
    # The curve 0.2, 0.6, 0.6 covers 0.2 + 0.3 = 0.5; chance covers 0.4.
    assert deferral_area([(0.5, 0.6)], ENDS) == pytest.approx(0.1)
    assert deferral_area([(0.5, 0.3)], ENDS) == pytest.approx(-0.05)


def test_cpt_reads_the_line_between_points_and_does_not_count_the_end() -> None:
    points = [(0.2, 0.3), (0.6, 0.5)]  # PGR 0.25 and 0.75
    assert cpt(points, ENDS, 50) == pytest.approx(0.4)
    assert cpt(points, ENDS, 25) == pytest.approx(0.2)
    assert cpt(points, ENDS, 10) == pytest.approx(0.08)
    assert cpt(points, ENDS, 80) is None


def test_cpt_is_not_undone_by_a_later_lower_point() -> None:
    # PGR 0.5, then 0.25, then 1: the envelope stays at 0.5 until it rises from there.
    points = [(0.2, 0.4), (0.4, 0.3), (0.8, 0.6)]
    assert cpt(points, ENDS, 50) == pytest.approx(0.2)
    assert cpt(points, ENDS, 75) == pytest.approx(0.6)


def test_the_oracle_takes_rescues_first_and_losses_last() -> None:
    small, large = [0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]
    found = oracle(small, large, [0.0, 0.125, 0.25, 0.5, 0.75, 1.0])
    assert [quality for _, quality in found] == pytest.approx([0.5, 0.625, 0.75, 0.75, 0.75, 0.5])


def test_auroc_counts_pairs_in_which_the_failed_answer_scores_lower() -> None:
    # Failed 1, 3; good 2, 3: 1<2, 1<3, 3<2 no, 3=3 half: 2.5 of 4.
    assert auroc([1.0, 3.0, 2.0, 3.0], [True, True, False, False]) == pytest.approx(0.625)
    assert auroc([1.0, 2.0, 3.0], [True, True, False]) == 1
    assert auroc([1.0, 2.0], [True, True]) is None


def test_failure_rates_fall_with_the_score() -> None:
    # Score 2 fails more often than score 1, so both share (1 + 0 + 1) / 3; score 4 never fails.
    scores, failed = [1.0, 1.0, 2.0, 4.0], [True, False, True, False]
    rates = failure_rates(scores, failed, [0.0, 1.0, 2.0, 3.0, 9.0])
    assert rates == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1 / 3, 0.0])


def test_ece_is_the_mean_gap_of_bins_by_their_size() -> None:
    # Bin [0.2, 0.3): predicted 0.2 + 0.25, failed 1: gap 0.55. Bin [0.9, 1]: 1.9 against 2.
    assert ece([0.2, 0.25, 0.9, 1.0], [True, False, True, True]) == pytest.approx(0.65 / 4)


def test_quadrants_name_who_is_right() -> None:
    small = [True, True, False, False, False]
    large = [True, False, True, False, True]
    assert quadrants(small, large) == {"RESCUE": 2, "LOSS": 1, "SAFE": 1, "HARD": 1}


def test_a_small_sample_widens_the_interval_of_its_share() -> None:
    # Rank 1 of 1: the long-run fraction is uniform, so of 9 answers each count is as likely.
    assert share_interval(1, 1, 9, confidence=0.7) == pytest.approx((1 / 9, 8 / 9))
    narrow, wide = share_interval(300, 999, 100_000), share_interval(300, 999, 500)
    assert wide[0] < narrow[0] < 0.3 < narrow[1] < wide[1]
    assert narrow == pytest.approx((0.2765, 0.3241), abs=2e-3)
