"""Decisions of the policies and who wins over whom."""

from __future__ import annotations

import pytest

from cluster.config import RoutingConfig
from router.api import CascadeOptions
from router.policies import make_policy
from router.policy import Decision, FixedPolicy, Policy, ScheduledPolicy
from router.threshold import ScorePolicy
from tests.fakes import step
from tests.router.views import view

ROUTING = RoutingConfig(margin_window_tokens=2, margin_threshold=1.0, max_escalation_tokens=4)


def margin_policy() -> Policy:
    return make_policy(ROUTING, CascadeOptions())


def test_margin_escalates_on_the_first_window_below_the_threshold() -> None:
    policy = margin_policy()
    actions = [policy.on_token(step(1, margin)).action for margin in (3.0, 3.0, 0.5, 0.5)]
    assert actions == ["stay", "stay", "stay", "escalate"]


def test_margin_reports_the_window_mean_it_acted_on() -> None:
    policy = margin_policy()
    policy.on_token(step(1, 0.5))
    assert policy.on_token(step(1, 0.25)) == Decision("escalate", "low_margin", 0.375, 1.0)


def test_margin_waits_for_a_whole_window() -> None:
    assert margin_policy().on_token(step(1, 0.0)).action == "stay"


def test_missing_logprobs_neither_escalate_nor_count_as_confidence() -> None:
    policy = margin_policy()
    for _ in range(4):
        assert policy.on_token(step(1, None)) == Decision("stay", "no_evidence", None, 1.0)
    assert policy.on_complete("stop").reason == "no_evidence"


def test_missing_logprobs_do_not_push_doubt_out_of_the_window() -> None:
    policy = margin_policy()
    actions = [policy.on_token(step(1, margin)).action for margin in (0.5, None, 0.5)]
    assert actions == ["stay", "stay", "escalate"]


def test_margin_keeps_the_answer_after_its_last_escalation_token() -> None:
    policy = margin_policy()
    for _ in range(4):
        policy.on_token(step(1, 3.0))
    late = [policy.on_token(step(1, 0.0)) for _ in range(3)]
    assert [(decision.action, decision.reason) for decision in late] == [("stay", "past_limit")] * 3


def test_a_finished_answer_reports_its_lowest_window() -> None:
    policy = margin_policy()
    for margin in (4.0, 2.0, 6.0):
        policy.on_token(step(1, margin))
    assert policy.on_complete("stop") == Decision("stay", "confident", 3.0, 1.0)


def test_scheduled_goes_on_at_its_limit_but_not_after_the_models_own_end() -> None:
    assert ScheduledPolicy(5).on_complete("length").action == "escalate"
    assert ScheduledPolicy(5).on_complete("stop").action == "stay"
    assert ScheduledPolicy(0).on_complete("stop").action == "escalate"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (CascadeOptions(), ScorePolicy),
        (CascadeOptions(force="small"), FixedPolicy),
        (CascadeOptions(force="large"), FixedPolicy),
        (CascadeOptions(force="large", escalate_after_tokens=3), ScheduledPolicy),
        (CascadeOptions(escalate_after_tokens=0), ScheduledPolicy),
    ],
)
def test_the_requests_options_win_over_the_configured_policy(
    options: CascadeOptions, kind: type
) -> None:
    assert type(make_policy(ROUTING, options)) is kind


def test_forced_large_is_large_from_the_first_token() -> None:
    policy = make_policy(ROUTING, CascadeOptions(force="large"))
    assert policy.on_request(view("00")) == Decision("large", "forced")
