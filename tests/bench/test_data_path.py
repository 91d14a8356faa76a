"""What is made of a mapper's reports on the data path: shares of the link, fairness, the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.data_path_page import Shape, Together, Trial, page, timeline

SHAPE = Shape(layers=2, kv_heads=2, head_dim=8)
CPU_S = {"source": 0.1, "mapper": 0.2, "target": 0.3}
ABOUT = {
    "cores": 2,
    "cpu": "a processor",
    "load_average_1min": 0.5,
    "load_after": 1.5,
    "seconds": 12.0,
}


def report(tokens: int, total_s: float, *, moved: int | None = None) -> dict[str, Any]:
    step = {"stage": "read", "first_token": 0, "last_token": tokens, "begin_s": 0.0, "end_s": 0.4}
    moved = tokens * SHAPE.token_bytes if moved is None else moved
    return {
        "bytes_read": moved,
        "bytes_written": tokens * SHAPE.token_bytes,
        "convert_s": total_s,
        "read_s": 0.8 * total_s,
        "map_s": 0.1 * total_s,
        "write_s": 0.5 * total_s,
        "chunks": 4,
        "steps": [step],
    }


def test_a_token_has_keys_and_values_of_two_bytes_each() -> None:
    assert SHAPE.token_bytes == 2 * 2 * 8 * 2 * 2
    assert Shape(layers=28, kv_heads=8, head_dim=64).token_bytes == 57_344


def test_rates_are_of_the_busiest_links_bytes_and_the_whole_time() -> None:
    trial = Trial.of(SHAPE, 0.001, 1_000, report(1_000, 1.25), CPU_S)
    assert trial.moved_bytes == 128_000
    assert trial.gbps == pytest.approx(128_000 * 8 / 1.25 / 1e9)
    assert trial.to_longest == pytest.approx(1.25)


def test_a_report_that_moved_too_little_is_refused() -> None:
    with pytest.raises(AssertionError):
        Trial.of(SHAPE, 1.0, 1_000, report(1_000, 1.0, moved=5), CPU_S)


def test_together_counts_until_the_last_one_ended() -> None:
    reports = [report(1_000, seconds) for seconds in (2.0, 2.5, 2.2)]
    several = Together.of(0.002, 1_000, reports, 32, report(32, 0.3))
    assert several.gbps == pytest.approx(3 * 128_000 * 8 / 2.5 / 1e9)
    assert several.unfairness == pytest.approx(1.25)
    assert several.short_s == 0.3


def test_the_page_has_a_row_per_link_and_length(tmp_path: Path) -> None:
    trials = [
        Trial.of(SHAPE, rate, tokens, report(tokens, 0.5 + 0.1 * number), CPU_S)
        for rate in (0.001, None)
        for tokens in (32, 1_000)
        for number in range(3)
    ]
    at_once = [
        Together.of(rate, 1_000, [report(1_000, 2.0)] * 4, 32, report(32, 0.9))
        for rate in (0.001, None)
        for _ in range(3)
    ]
    text = page(SHAPE, trials, at_once, ABOUT)
    assert "| 0.001 Gb/s | 1,000 | 4 | 600 (500-700) | 480 / 60 / 300 |" in text
    assert "0.00 Gb/s = 1.71 | 1.25 | 100 / 200 / 300 |" in text
    assert "| unlimited | 2.00 | 0.00 Gb/s | 1.00 | 900 : 600 |" in text
    assert "Medians of 3 runs" in text and "2 cores, a processor" in text
    timeline(trials[-1], tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1_000
