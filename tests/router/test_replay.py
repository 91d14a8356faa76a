"""The decision log of real splices, and its replay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster.config import RoutingConfig
from cluster.errors import ConfigError
from deployments.decision_log import DecisionLog
from router.api import CascadeOptions
from router.job import Job, Site
from router.policies import RoutingState, make_policy
from router.record import AnswerRecord, read_log
from router.replay import replay
from router.splice import Cascade
from tests.fakes import ScriptedEngine, step
from tests.router.logs import DEPENDS, record
from tests.router_bench import SMALL, Bench

SETTINGS = [
    RoutingConfig(margin_window_tokens=3, margin_threshold=1.2),
    RoutingConfig(policy="quantile", margin_window_tokens=3, margin_threshold=0.4),
    RoutingConfig(policy="first_token", margin_threshold=1.2),
    RoutingConfig(policy="deferral", margin_threshold=2.0),
    RoutingConfig(policy="random", target_fraction=0.4),
    RoutingConfig(policy="small"),
    RoutingConfig(
        margin_window_tokens=3, margin_threshold=1.2, budget_escalations=5, budget_window_s=7.0
    ),
]


async def written(routing: RoutingConfig, count: int = 40) -> list[AnswerRecord]:
    """Answers over scripted engines, one a second, whose margins depend on the answer alone."""
    now_s = 0.0
    state = RoutingState.of(routing, None, clock=lambda: now_s)
    records: list[AnswerRecord] = []
    for number in range(count):
        now_s = float(number)
        source = random.Random(number)
        small = [step(token, source.expovariate(0.5)) for token in SMALL]
        bench = Bench(small=ScriptedEngine(small), hold_back=routing.hold_back_tokens)
        site = Site(**{**vars(bench.site()), "log": records.append})
        job = Job(
            prompt_token_ids=tuple(range(number, number + 100)),
            max_tokens=20,
            sampling=lambda *part: part,
        )
        wish = CascadeOptions()
        cascade = Cascade(site, make_policy(routing, wish, state), wish, job)
        async for _ in cascade.pieces():
            pass
        await cascade.info()
        records[-1] = records[-1].model_copy(update={"unix_s": now_s})
    return records


@pytest.mark.parametrize("routing", SETTINGS, ids=lambda one: f"{one.policy}")
async def test_a_replay_with_the_same_settings_escalates_what_was_escalated(
    routing: RoutingConfig,
) -> None:
    records = await written(routing)
    again = replay(records, routing)
    assert [one.escalated for one in again.outcomes] == [one.escalated for one in records]
    assert [(one.decision.reason, one.decision.score) for one in again.outcomes] == [
        (one.decision.reason, one.decision.score) for one in records
    ]
    if routing.policy != "small":
        assert 0.0 < again.fraction < 1.0
    assert again.uncertain == 0


async def test_whole_answers_replay_any_policy_as_it_would_have_run() -> None:
    records = await written(RoutingConfig(policy="small"))
    for routing in SETTINGS:
        lived = sum(one.escalated for one in await written(routing)) / len(records)
        assert replay(records, routing).fraction == lived


async def test_an_answer_that_was_cut_is_uncertain_under_a_lower_threshold() -> None:
    records = await written(SETTINGS[0])
    lower = replay(records, SETTINGS[0].model_copy(update={"margin_threshold": 0.0}))
    assert (lower.fraction, lower.uncertain) == (0.0, sum(one.escalated for one in records))


async def test_a_budgets_refusal_is_in_the_log() -> None:
    records = await written(SETTINGS[-1])
    refused = [one for one in records if any(turn.reason == "budget" for turn in one.turns)]
    assert refused and not any(one.escalated for one in refused if len(one.turns) == 2)
    assert max(sum(one.escalated for one in records[i : i + 7]) for i in range(34)) <= 5


async def test_an_escalation_that_had_to_wait_waits_in_the_replay_too() -> None:
    routing = RoutingConfig(margin_window_tokens=1, margin_threshold=1.0)
    records: list[AnswerRecord] = []
    margins = [8.0] * len(SMALL)
    for number in (3, 4, 9):
        margins[number] = 0.5
    small = [step(token, margin) for token, margin in zip(SMALL, margins, strict=True)]
    bench = Bench(small=ScriptedEngine(small))
    site = Site(**{**vars(bench.site()), "log": records.append})
    job = Job(
        prompt_token_ids=tuple(range(100)),
        max_tokens=20,
        sampling=lambda *part: part,
        may_switch=lambda sent: len(sent) > 6,
    )
    cascade = Cascade(site, make_policy(routing, CascadeOptions()), CascadeOptions(), job)
    async for _ in cascade.pieces():
        pass
    (line,) = records
    assert (line.forbidden, line.decision.at_token) == ((4, 5), 10)
    assert (line.prompt_tokens, line.unread_tokens) == (100, {"small": 100, "large": 100})
    (again,) = replay(records, routing).outcomes
    assert again.decision.score == 0.5 and again.certain
    assert len(line.margins or ()) == 10
    free = line.model_copy(update={"forbidden": (), "margins": line.margins[:5]})
    assert replay([free], routing).outcomes[0].escalated
    held = line.model_copy(update={"margins": line.margins[:5], "complete": True})
    assert not replay([held], routing).outcomes[0].escalated


async def test_the_log_goes_to_a_file_and_comes_back(tmp_path: Path) -> None:
    records = await written(SETTINGS[0], 5)
    path = tmp_path / "new" / "log.jsonl"
    for _ in range(2):  # a restart appends
        log = DecisionLog(path, DEPENDS, margins=True)
        for one in records:
            log(one)
        log.close()
    expected = [one.model_copy(update={"depends": DEPENDS}) for one in records]
    assert read_log(path) == expected * 2


async def test_without_margins_a_line_is_short_and_a_replay_says_what_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.jsonl"
    log = DecisionLog(path, DEPENDS, margins=False)
    log(record(1, [float(i) for i in range(1000)]))
    log.close()
    assert len(path.read_bytes()) < 1_500
    with pytest.raises(ConfigError, match=r"log_margins: true"):
        replay(read_log(path), SETTINGS[0])


def test_a_full_queue_drops_lines_and_counts_them(tmp_path: Path) -> None:
    told: list[bool] = []
    log = DecisionLog(
        tmp_path / "log.jsonl",
        DEPENDS,
        margins=True,
        queue_lines=2,
        on_drop=lambda: told.append(True),
    )
    log.close()
    for number in range(5):
        log(record(number, [1.0]))
    assert (log.dropped, len(told)) == (3, 3)


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(record(1, [1.0]).model_dump_json() + '\n{"version": 1}\n')
    with pytest.raises(ConfigError, match=r"log.jsonl:2: unix_s: Field required"):
        read_log(path)
