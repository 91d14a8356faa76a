"""A budget in tokens of the large model: spent as an estimate, settled at the end."""

from __future__ import annotations

from cluster.config import RoutingConfig
from router.api import CascadeOptions
from router.budget import FIRST_ESTIMATE_TOKENS, Budget, Charge
from router.policies import RoutingState, make_policy
from tests.router.views import view


def taken(budget: Budget) -> Charge:
    charge = budget.take()
    assert charge is not None
    return charge


def test_an_escalation_under_way_counts_as_the_mean_of_those_that_ended() -> None:
    budget = Budget(None, 60.0, lambda: 0.0, large_tokens=100)
    budget.settle(taken(budget), 40)
    second = taken(budget)
    assert second.tokens == 40
    assert budget.take() is None
    budget.settle(second, 10)
    # 50 tokens are spent and the mean is now 0.9 * 40 + 0.1 * 10 = 37.
    assert taken(budget).tokens == 37


def test_the_first_estimate_holds_until_something_is_known() -> None:
    budget = Budget(None, 60.0, lambda: 0.0, large_tokens=2 * FIRST_ESTIMATE_TOKENS)
    assert [budget.take() is None for _ in range(3)] == [False, False, True]


def test_one_escalation_always_fits_and_spent_tokens_leave_with_the_window() -> None:
    now_s = [0.0]
    budget = Budget(None, 10.0, lambda: now_s[0], large_tokens=5)
    budget.settle(taken(budget), 1_000)
    assert budget.take() is None
    now_s[0] = 10.0
    assert budget.take() is not None


def test_the_policy_settles_with_what_the_large_model_wrote() -> None:
    routing = RoutingConfig(policy="large", budget_large_tokens=300)
    state = RoutingState.of(routing, None, clock=lambda: 0.0)
    seen = []
    for tokens in (200, 50, 0):
        policy = make_policy(routing, CascadeOptions(), state)
        seen.append(policy.on_request(view("00")).reason)
        policy.on_end(tokens)
    # 200 are spent, and the second is estimated at 200 too.
    assert seen == ["policy", "budget", "budget"]
