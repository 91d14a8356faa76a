"""Conversations stay with the model that has read them, unless a change is worth it."""

from __future__ import annotations

import pytest

from cluster.config import RoutingConfig
from router.api import CascadeOptions
from router.budget import Budget
from router.policies import RoutingState, make_policy
from router.policy import Policy
from tests.fakes import step
from tests.router.views import view

# One nat per 1,000 tokens, against a threshold of 0.5 nats.
ROUTING = RoutingConfig(margin_window_tokens=1, margin_threshold=0.5, sticky_cost=1.0)


def policy(routing: RoutingConfig = ROUTING) -> Policy:
    return make_policy(routing, CascadeOptions())


def test_a_first_turn_is_not_moved() -> None:
    decision = policy().on_request(view("00", small=900, large=900))
    assert (decision.action, decision.threshold) == ("stay", 0.5)


def test_the_large_model_keeps_what_the_small_one_would_have_to_read() -> None:
    decision = policy().on_request(view("00", last_model="large", small=900, large=400))
    assert (decision.action, decision.reason, decision.threshold) == ("large", "sticky", 1.0)


def test_a_little_more_to_read_only_raises_the_threshold() -> None:
    made = policy()
    decision = made.on_request(view("00", last_model="large", small=500, large=100))
    assert (decision.action, decision.threshold) == ("stay", 0.9)
    assert made.on_token(step(1, 0.8)).action == "escalate"
    assert policy().on_token(step(1, 0.8)).action == "stay"


def test_a_large_model_that_has_read_nothing_is_asked_in_greater_doubt_only() -> None:
    made = policy()
    decision = made.on_request(view("00", last_model="small", small=100, large=400))
    assert decision.threshold == pytest.approx(0.2)
    assert [made.on_token(step(1, margin)).action for margin in (0.3, 0.1)] == ["stay", "escalate"]


def test_the_same_reading_after_an_answer_of_the_small_model_moves_but_does_not_hold() -> None:
    decision = policy().on_request(view("00", last_model="small", small=900, large=100))
    assert (decision.action, decision.threshold) == ("stay", 1.3)


def test_a_held_answer_spends_no_budget() -> None:
    routing = ROUTING.model_copy(update={"budget_escalations": 1})
    state = RoutingState(budget=Budget(1, 60.0, lambda: 0.0))
    for _ in range(3):
        made = make_policy(routing, CascadeOptions(), state)
        held = made.on_request(view("00", last_model="large", small=900, large=0))
        assert held.reason == "sticky"
    made = make_policy(routing, CascadeOptions(), state)
    made.on_request(view("00"))
    assert made.on_token(step(1, 0.0)).action == "escalate"


def test_a_prompt_score_below_zero_is_held_by_the_size_of_its_threshold() -> None:
    routing = RoutingConfig(policy="prompt", prompt_threshold=-2.0, sticky_cost=1.0)
    asked = [
        policy(routing).on_request(view("00", last_model="large", small=small, large=0)).action
        for small in (1_900, 2_000)
    ]
    assert asked == ["stay", "large"]


def test_what_the_request_asks_for_is_not_held() -> None:
    made = make_policy(ROUTING, CascadeOptions(force="small"))
    assert made.on_request(view("00", last_model="large", small=9_000, large=0)).reason == "forced"
