"""What a router did lately, in numbers."""

from __future__ import annotations

from typing import Literal

import pytest

from router.running import Running
from router.stats import HandoffRecord


def ended(
    outcome: Literal["mapped", "recompute", "cancelled"],
    total_s: float = 1.0,
    predicted_s: float | None = None,
) -> HandoffRecord:
    return HandoffRecord(
        outcome=outcome,
        reason=None,
        started_unix_s=0.0,
        stages_s={} if outcome == "cancelled" else {"total": total_s},
        predicted_recompute_s=predicted_s,
    )


def test_an_idle_router_has_no_fraction() -> None:
    running = Running(large="l", policy="margin", target_fraction=None)
    assert running.snapshot() == {
        "requests": 0,
        "escalated": 0,
        "realised_fraction": None,
        "target_fraction": None,
        "policy": "margin",
        "window": 1_000,
        "handoffs": {"mapped": 0, "recompute": 0, "cancelled": 0},
        "saved_prefill_s": 0.0,
        "refused_routing": None,
    }


def test_the_fraction_is_that_of_the_last_answers_that_a_policy_decided() -> None:
    running = Running(large="l", policy="margin", target_fraction=0.3, window=4)
    for model in ("l", "l", "s", "l", "s", "s"):
        running.route(model=model, reason="low_margin" if model == "l" else "confident")
    for reason in ("named", "forced", "scheduled"):
        running.route(model="l", reason=reason)
    seen = running.snapshot()
    assert (seen["requests"], seen["escalated"], seen["realised_fraction"]) == (4, 1, 0.25)


def test_another_routing_begins_with_no_answers() -> None:
    running = Running(large="l", policy="margin", target_fraction=None)
    running.route(model="l", reason="low_margin")
    running.handoff(ended("mapped", 0.25, 1.0))
    running.follow(policy="random", target_fraction=0.5)
    seen = running.snapshot()
    assert (seen["policy"], seen["target_fraction"]) == ("random", 0.5)
    assert (seen["requests"], seen["realised_fraction"]) == (0, None)
    assert seen["handoffs"]["mapped"] == 1


def test_mapped_handoffs_save_what_reading_was_predicted_to_take_beyond_them() -> None:
    running = Running(large="l", policy="margin", target_fraction=0.3)
    running.handoff(ended("mapped", 0.25, 1.0))
    running.handoff(ended("mapped", 0.75, 0.5))
    running.handoff(ended("mapped", 0.25))
    running.handoff(ended("recompute", 0.5, 1.0))
    running.handoff(ended("cancelled", predicted_s=1.0))
    seen = running.snapshot()
    assert seen["handoffs"] == {"mapped": 3, "recompute": 1, "cancelled": 1}
    assert seen["saved_prefill_s"] == pytest.approx(0.75 - 0.25)
