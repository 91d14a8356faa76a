"""Scores and the policies that act on them."""

from __future__ import annotations

import pytest

from cluster.config import RoutingConfig
from cluster.errors import RequestError
from router.api import CascadeOptions
from router.budget import Budget
from router.chance import request_hash, uniform
from router.policies import RoutingState, make_policy
from router.policy import Decision
from router.scores import RunningQuantile, ScoreSpec
from router.splice import Cascade, Job
from router.threshold import DeferralPolicy, ScorePolicy, Threshold
from tests.fakes import ScriptedEngine, step
from tests.router.views import view
from tests.router_bench import LARGE, PROMPT, SMALL, Bench

HASHES = [f"{number:016x}" for number in range(4_000)]


def test_a_low_quantile_is_that_of_all_margins_so_far_and_waits_for_enough_of_them() -> None:
    quantile = RunningQuantile(0.5, least=3)
    seen = []
    for value in (9.0, 1.0, 5.0, 0.0, 0.5):
        quantile.push(value)
        seen.append(quantile.value)
    assert seen == [None, None, 5.0, 1.0, 1.0]


def test_quantile_escalates_on_few_bad_tokens_that_a_window_would_average_away() -> None:
    routing = RoutingConfig(margin_window_tokens=4, margin_quantile=0.0, margin_threshold=1.0)
    margins = (9.0, 9.0, 9.0, 0.5)
    actions = {}
    for name in ("margin", "quantile"):
        policy = make_policy(routing, CascadeOptions(policy=name))
        actions[name] = [policy.on_token(step(1, margin)).action for margin in margins][-1]
    assert actions == {"margin": "stay", "quantile": "escalate"}


def test_first_token_looks_at_the_first_token_only() -> None:
    routing = RoutingConfig(policy="first_token", margin_threshold=1.0)
    doubtful, sure = (make_policy(routing, CascadeOptions()) for _ in range(2))
    first = doubtful.on_token(step(1, 0.5))
    assert first == Decision("escalate", "low_margin", 0.5, 1.0)
    later = [sure.on_token(step(1, margin)) for margin in (2.0, 0.1)]
    assert [(one.action, one.reason) for one in later] == [
        ("stay", "watching"),
        ("stay", "past_limit"),
    ]


@pytest.mark.parametrize("policy", ["margin", "quantile", "first_token", "deferral"])
def test_answers_without_logprobs_stay_for_lack_of_evidence(policy: str) -> None:
    made = make_policy(RoutingConfig.model_validate({"policy": policy}), CascadeOptions())
    made.on_request(view("00"))
    assert made.on_token(step(1, None)).reason == "no_evidence"
    assert made.on_complete("stop").reason == "no_evidence"


def test_deferral_judges_the_mean_of_the_whole_answer_at_its_end() -> None:
    policy = DeferralPolicy(ScoreSpec(name="deferral"), Threshold(1.0))
    assert [policy.on_token(step(1, margin)).action for margin in (0.0, 1.5)] == ["stay"] * 2
    assert policy.on_complete("stop") == Decision("escalate", "low_margin", 0.75, 1.0)


async def deferred(hold_back: int) -> tuple[list[int], Bench]:
    bench = Bench(small=ScriptedEngine([step(token, 0.1) for token in SMALL]), hold_back=hold_back)
    wanted = CascadeOptions(policy="deferral")
    routing = RoutingConfig(margin_threshold=1.0)
    job = Job(prompt_token_ids=PROMPT, max_tokens=20, sampling=lambda *part: part)
    cascade = Cascade(bench.site(), make_policy(routing, wanted), wanted, job)
    tokens = [one.token_id async for piece in cascade.pieces() for one in piece.chunk.steps]
    return tokens, bench


async def test_deferral_lets_the_large_model_answer_afresh_when_everything_was_held_back() -> None:
    tokens, bench = await deferred(64)
    assert tokens == LARGE
    assert bench.small.requests[0].keep == "always"
    assert bench.large.requests[0].prompt_token_ids == PROMPT


async def test_deferral_rewrites_only_the_held_back_end_of_what_was_sent() -> None:
    tokens, bench = await deferred(4)
    # Nineteen tokens were seen with four of them held back; the last chunk waits with them.
    assert tokens == SMALL[:15] + LARGE[15:]


def test_a_tie_is_split_by_request_and_always_the_same_way() -> None:
    spec = ScoreSpec(name="first_token", last_token=1)
    threshold = Threshold(1.0, tie_fraction=0.25)

    def escalates(request: str) -> bool:
        policy = ScorePolicy(spec, threshold)
        policy.on_request(view(request))
        return policy.on_token(step(1, 1.0)).action == "escalate"

    drawn = [escalates(request) for request in HASHES]
    assert sum(drawn) / len(drawn) == pytest.approx(0.25, abs=0.02)
    assert drawn[:100] == [escalates(request) for request in HASHES[:100]]


def test_random_takes_its_fraction_and_decides_alike_for_a_retry() -> None:
    routing = RoutingConfig(policy="random", target_fraction=0.3)

    def action(request: str) -> str:
        return make_policy(routing, CascadeOptions()).on_request(view(request)).action

    actions = [action(request) for request in HASHES]
    assert actions.count("large") / len(actions) == pytest.approx(0.3, abs=0.02)
    assert actions == [action(request) for request in HASHES]


def test_draws_for_routes_and_ties_are_unrelated() -> None:
    same = sum((uniform(one, "route") < 0.5) == (uniform(one, "tie") < 0.5) for one in HASHES)
    assert same / len(HASHES) == pytest.approx(0.5, abs=0.03)


def test_equal_prompts_and_no_others_have_equal_hashes() -> None:
    assert request_hash((1, 2, 3)) == request_hash((1, 2, 3))
    assert len({request_hash(ids) for ids in [(1, 2, 3), (3, 2, 1), (1, 2), (256, 2, 3)]}) == 4


def test_a_budget_is_shared_by_all_requests_and_comes_back_with_time() -> None:
    now_s = [0.0]
    routing = RoutingConfig(policy="large", budget_escalations=2, budget_window_s=10.0)
    state = RoutingState.of(routing, None, clock=lambda: now_s[0])
    seen = []
    for at_s in (0.0, 5.0, 6.0, 10.0, 11.0, 15.0):
        now_s[0] = at_s
        decision = make_policy(routing, CascadeOptions(), state).on_request(view("00"))
        seen.append((decision.action, decision.reason))
    spent, large = ("stay", "budget"), ("large", "policy")
    assert seen == [large, large, spent, large, spent, large]


def test_an_answer_that_waits_for_a_place_to_cut_spends_one_escalation() -> None:
    routing = RoutingConfig(
        margin_window_tokens=1, margin_threshold=1.0, budget_escalations=2, budget_window_s=10.0
    )
    state = RoutingState(budget=Budget(2, 10.0, lambda: 0.0))
    first, second, third = (make_policy(routing, CascadeOptions(), state) for _ in range(3))
    assert [first.on_token(step(1, 0.0)).action for _ in range(3)] == ["escalate"] * 3
    assert second.on_token(step(1, 0.0)).action == "escalate"
    assert third.on_token(step(1, 0.0)) == Decision("stay", "budget", 0.0, 1.0)


def test_a_forced_request_needs_no_budget() -> None:
    routing = RoutingConfig(budget_escalations=1)
    state = RoutingState(budget=Budget(1, 10.0, lambda: 0.0))
    forced = [make_policy(routing, CascadeOptions(force="large"), state) for _ in range(3)]
    assert [policy.on_request(view("00")).action for policy in forced] == ["large"] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CascadeOptions(target_fraction=0.2), "cascade.target_fraction: this deployment has no"),
        (CascadeOptions(policy="random"), "cascade.target_fraction: policy `random` needs one"),
        (CascadeOptions(policy="large", target_fraction=0.2), "`large` is a fixed choice"),
    ],
)
def test_options_that_this_deployment_cannot_follow_are_refused(
    options: CascadeOptions, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        make_policy(RoutingConfig(), options)
