"""The policy that judges the prompt, from its decision to its calibration and replay."""

from __future__ import annotations

import pytest

from cluster.config import RoutingConfig
from cluster.errors import ConfigError
from router.api import CascadeOptions
from router.policies import RoutingState, make_policy
from router.policy import Decision
from router.prompt import prompt_score
from router.record import MAX_PROMPT_LOGPROBS, AnswerRecord, Watch
from router.replay import replay
from router.samples import calibrate, collect
from router.scores import ScoreSpec
from tests.fakes import step
from tests.router.logs import DEPENDS, record
from tests.router.views import view

ROUTING = RoutingConfig(policy="prompt", prompt_window_tokens=2, prompt_threshold=-1.0)
SPEC = ScoreSpec(name="prompt", window_tokens=2)


def asked(logprobs: tuple[float, ...], routing: RoutingConfig = ROUTING) -> Decision:
    policy = make_policy(routing, CascadeOptions())
    assert policy.reads_prompt
    policy.on_request(view("00"))
    return policy.on_prompt(logprobs)


def test_the_score_is_the_mean_of_the_last_tokens_or_of_a_short_prompt() -> None:
    assert prompt_score((-9.0, -1.0, -2.0), 2) == -1.5
    assert prompt_score((-3.0,), 2) == -3.0
    assert prompt_score((), 2) is None
    assert prompt_score((float("-inf"), -1.0), 2) is None


def test_a_surprising_prompt_is_escalated_before_the_first_token() -> None:
    assert asked((-0.1, -1.0, -1.5)) == Decision("escalate", "surprising_prompt", -1.25, -1.0)
    assert asked((-9.0, -1.0, -0.5)) == Decision("stay", "confident", -0.75, -1.0)
    assert asked(()) == Decision("stay", "no_evidence", None, -1.0)


def test_after_the_prompt_no_token_changes_the_decision() -> None:
    policy = make_policy(ROUTING, CascadeOptions())
    policy.on_request(view("00"))
    policy.on_prompt((-0.5, -0.5))
    assert policy.on_token(step(1, 0.0)).action == "stay"
    assert policy.on_complete("stop") == Decision("stay", "confident", -0.5, -1.0)


def test_no_other_policy_costs_the_prefix_cache() -> None:
    for name in ("margin", "quantile", "first_token", "deferral", "small", "large"):
        policy = make_policy(RoutingConfig.model_validate({"policy": name}), CascadeOptions())
        assert not policy.reads_prompt
        assert policy.on_prompt((-99.0,)).action == "stay"


def logged(count: int, routing: RoutingConfig = ROUTING) -> list[AnswerRecord]:
    """Prompts whose scores are -1, -2, ...; answered by whoever the policy chose."""
    records = []
    for number in range(1, count + 1):
        watch = Watch(make_policy(routing, CascadeOptions()))
        watch.on_request(view(f"{number:016x}"))
        decision = watch.on_prompt((*[0.0] * 300, -float(number), -float(number)))
        if decision.action == "stay":
            watch.on_token(step(1, 3.0))
            decision = watch.on_complete("stop")
        line = watch.record(decision, small_tokens=1, large_tokens=0)
        records.append(line.model_copy(update={"unix_s": float(number), "depends": DEPENDS}))
    return records


def test_the_log_keeps_the_end_of_the_prompt_and_replays_exactly() -> None:
    records = logged(9)
    assert len(records[0].prompt_logprobs or ()) == MAX_PROMPT_LOGPROBS
    again = replay(records, ROUTING)
    assert [one.escalated for one in again.outcomes] == [one.escalated for one in records]
    assert again.fraction == 8 / 9 and again.uncertain == 0
    other = ROUTING.model_copy(update={"prompt_threshold": -6.5})
    assert replay(records, other).fraction == 3 / 9


def test_any_log_of_the_policy_calibrates_it_for_every_answer_has_its_score() -> None:
    made = calibrate(collect(logged(9), SPEC), SPEC, 0.3, DEPENDS)
    assert made.scores == tuple(-float(number) for number in range(9, 0, -1))
    assert (made.threshold().value, made.blind) == (-7.0, 0)
    routing = RoutingConfig(policy="prompt", prompt_window_tokens=2, calibration="c")
    state = RoutingState.of(routing, made)
    decision = make_policy(routing, CascadeOptions(), state).on_request(view("00"))
    assert (decision.threshold, decision.calibration_id) == (-7.0, made.calibration_id)


def test_a_log_without_prompts_is_refused_by_what_to_do() -> None:
    with pytest.raises(ConfigError, match="log under `prompt`"):
        collect([record(1, [1.0])], SPEC)
