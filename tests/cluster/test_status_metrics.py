"""Prometheus text as numbers, and the live view over it."""

from __future__ import annotations

import math

import pytest

from cluster.status_metrics import Scrape, Window, quantile
from cluster.status_top import HANDOFF_SECONDS, HANDOFFS, Top, sparkline
from tests.cluster.scrape import scrape_text


def scrape(at_s: float = 0.0, **counts: int) -> Scrape:
    return Scrape.parse(scrape_text(**counts), at_s=at_s)


def test_totals_sum_over_the_labels_that_are_not_named() -> None:
    found = scrape()
    assert found.total(HANDOFFS) == 14
    assert found.total(HANDOFFS, outcome="mapped") == 12
    assert found.total(HANDOFFS, outcome="nothing") is None
    assert found.label_values(HANDOFFS, "outcome") == ["mapped", "recompute"]


def test_buckets_sum_over_series() -> None:
    found = scrape().buckets(HANDOFF_SECONDS, stage="total", path="mapped")
    assert found == {0.1: 0, 0.2: 9, 0.5: 12, math.inf: 12}


@pytest.mark.parametrize(("q", "expected"), [(0.5, 0.1625), (0.8, 0.2), (0.95, 0.35), (1.0, 0.4)])
def test_quantiles_are_linear_within_a_bucket(q: float, expected: float) -> None:
    # None up to 100 ms, 80 of 100 up to 200 ms, all up to 400 ms.
    buckets = {0.1: 0.0, 0.2: 80.0, 0.4: 100.0, math.inf: 100.0}
    assert quantile(buckets, q) == pytest.approx(expected)


def test_a_quantile_in_the_open_bucket_is_its_lower_bound() -> None:
    assert quantile({0.1: 1, math.inf: 10}, 0.9) == 0.1


def test_no_observations_have_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0, math.inf: 0}, 0.5) is None


def test_a_rate_is_the_increase_within_the_window() -> None:
    window = Window(30.0)
    window.add(scrape(100.0, mapped=12))
    assert window.rate(HANDOFFS, outcome="mapped") is None
    window.add(scrape(110.0, mapped=17))
    assert window.rate(HANDOFFS, outcome="mapped") == pytest.approx(0.5)
    window.add(scrape(135.0, mapped=42))  # the first is too old by now
    assert window.rate(HANDOFFS, outcome="mapped") == pytest.approx(1.0)


def test_a_counter_that_fell_has_restarted() -> None:
    window = Window(30.0)
    window.add(scrape(0.0, mapped=50))
    window.add(scrape(10.0, mapped=20))
    assert window.rate(HANDOFFS, outcome="mapped") == pytest.approx(2.0)
    within = window.buckets(HANDOFF_SECONDS, stage="total", path="mapped")
    assert within[math.inf] == 20


def test_times_are_those_of_the_window_when_it_has_any() -> None:
    window = Window(30.0)
    for at_s, mapped in ((0.0, 12), (10.0, 12)):
        window.add(scrape(at_s, mapped=mapped))
    labels = {"stage": "total", "path": "mapped"}
    assert window.buckets(HANDOFF_SECONDS, **labels)[math.inf] == 12
    window.add(scrape(20.0, mapped=15))
    assert window.buckets(HANDOFF_SECONDS, **labels) == {0.1: 0, 0.2: 3, 0.5: 3, math.inf: 3}


def test_a_sparkline_spans_from_zero_to_the_largest() -> None:
    assert sparkline([0.0, 1.0, 2.0]) == "▁▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"


def test_the_live_view_draws_rates_once_there_are_two_scrapes() -> None:
    from rich.console import Console

    view = Top()
    console = Console(width=100, record=True)
    for at_s, mapped in ((0.0, 12), (10.0, 32), (20.0, 32)):
        view.add(scrape(at_s, mapped=mapped))
    console.print(view.frame(None))
    shown = console.export_text()
    assert "1.00/s" in shown
    assert "handoffs per second █▅" in shown
