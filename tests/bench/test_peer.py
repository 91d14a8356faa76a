"""The arithmetic of the peer's page, on runs whose times were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.peer_page import Spread, beside, page, rows_of, verdict
from bench.peer_runs import SYSTEMS, Matrix, Run

PEER = "peer-helped"
MACHINE = {"cpu": "a processor", "cores": 2, "versions": {"ray": "2.60.0"}}


def run(system: str, rate_gbps: float | None, moving_ms: float, **changes: object) -> Run:
    """100 ms around a transfer of 25 MB, which is 200 Mb."""
    made = Run(
        system=system,
        rate_gbps=rate_gbps,
        tokens=1_000,
        prompt_tokens=990,
        first=False,
        first_token_ms=moving_ms + 100.0,
        moving_ms=moving_ms,
        crossed_bytes=25_000_000,
        received_bytes=26_000_000,
        stages_ms={},
        good=True,
    )
    return replace(made, **changes)


def test_a_row_is_the_median_with_its_extremes_and_the_share_of_the_link() -> None:
    (row,) = rows_of([run("peer", 1.0, ms) for ms in (250.0, 400.0, 200.0)])
    assert row.moving_ms == Spread(250.0, 200.0, 400.0)
    assert row.first_token_ms == Spread(350.0, 300.0, 500.0)
    assert row.gbps == pytest.approx(0.8) and row.share == pytest.approx(0.8)
    assert row.runs == 3


def test_first_and_failed_runs_are_in_no_row() -> None:
    runs = [
        run("peer", None, 100.0),
        run("peer", None, 900.0, first=True),
        run("peer", None, 5.0, good=False),
    ]
    (row,) = rows_of(runs)
    assert row.moving_ms.middle == 100.0 and row.share is None


def test_rows_are_sorted_by_link_length_and_turn() -> None:
    runs = [run("peer", None, 1.0), run("peer", 1.0, 1.0, tokens=500), run("peer", 1.0, 1.0)]
    runs += [run("identity", 1.0, 1.0), run("identity", 0.5, 1.0)]
    assert [(row.rate_gbps, row.tokens, row.system) for row in rows_of(runs)] == [
        (0.5, 1_000, "identity"),
        (1.0, 500, "peer"),
        (1.0, 1_000, "identity"),
        (1.0, 1_000, "peer"),
        (None, 1_000, "peer"),
    ]


def test_what_is_slower_is_named_with_its_part_in_and_around_the_transfer() -> None:
    runs = [
        run(PEER, 1.0, 200.0),
        run(PEER, None, 100.0),
        run("identity", 1.0, 200.0),
        # 50 ms longer in the transfer, 30 ms around it.
        run("identity", None, 150.0, first_token_ms=280.0),
        run("identity-own", None, 500.0),
    ]
    equal, slower = beside(rows_of(runs), PEER)
    assert (equal.ratio, equal.moving_ratio, equal.around_ms) == (1.0, 1.0, 0.0)
    assert slower.ratio == pytest.approx(1.4) and slower.moving_ratio == pytest.approx(1.5)
    assert slower.around_ms == pytest.approx(30.0)
    text = verdict([equal, slower])
    assert "1.00 to 1.40 of its time" in text and "in 1 of 2 cases" in text
    assert "unlimited, 990 tokens: first token +80 ms" in text
    assert "the transfer +50 ms and what is around it +30 ms" in text
    assert "1 Gb/s" not in text


def test_a_faster_transfer_with_more_around_it_is_not_hidden() -> None:
    runs = [run(PEER, 1.0, 200.0), run("identity", 1.0, 150.0, first_token_ms=400.0)]
    text = verdict(beside(rows_of(runs), PEER))
    assert "in 1 of 1 cases; the transfer alone is in 0." in text
    assert "the transfer -50 ms and what is around it +150 ms" in text


def test_the_page_has_every_row_and_counts_what_failed() -> None:
    runs = [run(PEER, 1.0, 250.0), run("identity", 1.0, 200.0), run("peer", 1.0, 9.0, good=False)]
    text = page(rows_of(runs), runs, MACHINE, {"identity": 120.0}, {"identity": 1.5}, 23_040)
    assert "| 1 Gb/s | 990 | identity handoff, mapper at the target | 25.0 |" in text
    assert "| 250 ms (250 ms to 250 ms) | 0.80 | 80% |" in text
    assert "1 of 3 requests did not move their cache" in text
    assert "23,040 bytes of KV per token" in text and "Against Ray PD as" not in text


def test_the_page_shows_the_stages_of_our_handoffs_alone() -> None:
    stages = {"ticket": 20.0, "read": 150.0, "map": 90.0, "write": 60.0, "admit": 80.0}
    runs = [run("identity", 1.0, 200.0, stages_ms=stages)]
    runs.append(run("identity-own", 1.0, 300.0, stages_ms=stages))
    text = page(rows_of(runs), runs, MACHINE, {}, {}, 23_040)
    assert "| 1 Gb/s | 990 | 300 | 200 | 20 | 0 | 150 | 90 | 60 | 0 | 80 |" in text
    assert "| 400 | 300 | 20 |" not in text


def test_the_page_tells_what_the_longest_first_prefill_took() -> None:
    runs = [
        run(PEER, None, 10.0),
        run(PEER, None, 10.0, first=True, stages_ms={"prefill": 2_000.0}),
        run("peer", None, 10.0, first=True, stages_ms={"prefill": 60_000.0}),
        run("peer", None, 10.0, first=True, tokens=500, stages_ms={"prefill": 5_000.0}),
    ]
    text = page(rows_of(runs), runs, MACHINE, {}, {}, 23_040)
    assert "A first prefill of 1,000 tokens takes\n  2.00 s (Ray PD, " in text
    assert "and\n  60.00 s (Ray PD with NixlConnector as it ships)." in text


def test_the_progress_bar_counts_every_request() -> None:
    matrix = Matrix(SYSTEMS[:2], [1.0, None], [500, 1_000], 3)
    # A warm-up, each length once, and then rounds, rates and lengths.
    assert matrix.steps == 2 * (1 + 2 + 3 * 2 * 2)
