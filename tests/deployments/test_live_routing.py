"""What routing follows: only a calibration of what is served, and it may change while it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import CascadeConfig
from cluster.dependencies import running_dependencies
from cluster.errors import ConfigError
from deployments.live_routing import LiveRouting, Routing
from router.job import Site
from router.record import read_log
from router.samples import calibrate, collect
from tests.fakes import FakeHandoffPort, ScriptedEngine
from tests.mappers.tiny import write_model
from tests.router.logs import WINDOW, record, uniform_records

SITE = Site(
    small=ScriptedEngine([]),
    large=ScriptedEngine([]),
    handoffs=FakeHandoffPort(),
    names={"small": "s", "large": "l"},
    small_context_tokens=256,
    min_handoff_tokens=8,
    hold_back_tokens=0,
)


def config(tmp_path: Path, **routing: Any) -> CascadeConfig:
    folder = tmp_path / "model"
    if not folder.exists():
        write_model(folder, layers=1)
    model = {"source": str(folder)}
    return CascadeConfig.model_validate(
        {
            "small": {**model, "name": "s"},
            "large": {**model, "name": "l"},
            "mapper": {"small_to_large": "identity"},
            "routing": {"margin_window_tokens": 2, "max_escalation_tokens": 4, **routing},
        }
    )


def live(cascade: CascadeConfig, changes: list[Routing] | None = None) -> LiveRouting:
    heard: list[Routing] = [] if changes is None else changes
    return LiveRouting(cascade, ScriptedEngine([]), changed=heard.append)


def test_a_plain_configuration_reads_no_model() -> None:
    cascade = CascadeConfig.model_validate(
        {
            "small": {"name": "s", "source": "/missing/s"},
            "large": {"name": "l", "source": "/missing/l"},
            "mapper": {"small_to_large": "identity"},
        }
    )
    now = live(cascade).now
    assert (now.state.calibration, now.state.budget, now.log) == (None, None, None)


def test_a_calibration_of_the_running_pair_is_taken_and_a_stale_one_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.json"
    cascade = config(tmp_path, calibration=str(path))
    depends = running_dependencies(cascade)
    assert (depends.mapper_id, depends.logprobs_mode) == ("identity", "raw_logprobs")
    made = calibrate(collect(uniform_records(99), WINDOW), WINDOW, 0.3, depends)
    path.write_text(made.model_dump_json())
    assert live(cascade).now.state.calibration == made
    small = cascade.small.model_copy(
        update={"engine_kwargs": {"logprobs_mode": "processed_logprobs"}}
    )
    with pytest.raises(ConfigError, match="logprobs_mode is raw_logprobs there and processed"):
        live(cascade.model_copy(update={"small": small}))


def test_logged_lines_say_what_they_were_made_with(tmp_path: Path) -> None:
    cascade = config(tmp_path, log_file=str(tmp_path / "log.jsonl"), log_margins=True)
    routing = live(cascade)
    assert routing.now.log is not None
    routing.now.log(record(1, [1.0, 2.0]))
    routing.close()
    (line,) = read_log(tmp_path / "log.jsonl")
    assert line.depends == running_dependencies(cascade)
    assert line.margins == (1.0, 2.0)


def test_a_change_counts_for_answers_that_begin_and_tells_whoever_counts(tmp_path: Path) -> None:
    cascade, changes = config(tmp_path, budget_escalations=3), list[Routing]()
    routing = live(cascade, changes)
    before = routing.now
    wanted = {"routing": {"policy": "random", "target_fraction": 0.25, "hold_back_tokens": 2}}
    assert routing.offer(wanted) is None
    assert changes == [routing.now]
    assert (routing.now.config.policy, routing.now.target_fraction) == ("random", 0.25)
    # As a whole: what only `args` had is gone. What was begun goes on with what it has.
    assert routing.now.state.budget is None and before.state.budget is not None
    assert (before.at(SITE).hold_back_tokens, routing.now.at(SITE).hold_back_tokens) == (4, 2)
    assert routing.offer(None) is None
    assert routing.now.config == cascade.routing and len(changes) == 2


def test_what_stays_the_same_keeps_its_state(tmp_path: Path) -> None:
    cascade, changes = config(tmp_path, budget_escalations=3), list[Routing]()
    routing = live(cascade, changes)
    budget = routing.now.state.budget
    same = cascade.routing.model_dump(exclude_unset=True)
    for user_config in (None, {}, {"routing": None}, {"routing": same}):
        routing.apply(user_config)
    assert routing.now.state.budget is budget and changes == []


@pytest.mark.parametrize(
    ("user_config", "reason"),
    [
        ({"routing": {"policy": "margn"}}, "deployments.router.user_config.routing.policy: "),
        ({"handoff": {}}, "deployments.router.user_config.handoff: unknown key"),
        ({"routing": {"calibration": "/missing/c.json"}}, "/missing/c.json"),
        ({"routing": {"log_file": "/dev/null/log.jsonl"}}, "/dev/null"),
    ],
    ids=["value", "key", "calibration", "log"],
)
def test_a_change_that_cannot_be_followed_changes_nothing(
    tmp_path: Path, user_config: dict[str, Any], reason: str
) -> None:
    routing = live(config(tmp_path))
    before = routing.now
    refused = routing.offer(user_config)
    assert refused is not None and reason in refused and "\n" not in refused
    assert routing.now is before
    with pytest.raises((ConfigError, OSError)):
        routing.apply(user_config)


def test_answers_of_two_logs_stay_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    routing = live(config(tmp_path, log_file=str(first)))
    begun = routing.now
    routing.apply({"routing": {"log_file": str(second)}})
    other = routing.now.log
    routing.apply({"routing": {"log_file": str(second), "hold_back_tokens": 2}})
    assert routing.now.log is other
    for now, seed in ((routing.now, 1), (begun, 2)):
        assert now.log is not None
        now.log(record(seed, [1.0, 2.0]))
    routing.close()
    assert [len(list(read_log(path))) for path in (first, second)] == [1, 1]
