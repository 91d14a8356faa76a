"""How often an engine replica sends, by its own clock."""

from __future__ import annotations

import asyncio

import pytest

from deployments.pacing import Pace


def test_the_interval_grows_with_the_streams_and_shrinks_when_they_end() -> None:
    pace = Pace(1_000)
    assert pace.interval_s == 0.0
    with pace.stream():
        assert pace.interval_s == pytest.approx(0.001)
        with pace.stream():
            assert pace.interval_s == pytest.approx(0.002)
        assert pace.interval_s == pytest.approx(0.001)
    assert pace.interval_s == 0.0


def test_a_stream_that_fails_is_no_longer_counted() -> None:
    pace = Pace(10)
    with pytest.raises(ValueError, match="gone"), pace.stream():
        raise ValueError("gone")
    assert pace.interval_s == 0.0


async def test_a_pause_lasts_what_all_streams_together_may_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = Pace(100)
    with pace.stream() as first, pace.stream() as second:
        await first()
        await second()
    assert slept == pytest.approx([0.02, 0.02])
