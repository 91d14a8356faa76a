"""`kvcascade calibrate` from a log to a file that a router accepts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import IMPORT_PATH, CascadeConfig, RoutingConfig
from cluster.prompt_run import Run
from router.calibration import read_calibration
from router.policies import RoutingState
from router.record import AnswerRecord
from router.scores import ScoreSpec
from tests.router.logs import DEPENDS, uniform_records

WORDS = ("--window-tokens", "2", "--last-token", "4")


def write(path: Path, records: Iterable[AnswerRecord]) -> Path:
    path.write_text("".join(one.model_dump_json() + "\n" for one in records))
    return path


def run(tmp_path: Path, log: Path, *words: str) -> Any:
    out = ("--log", str(log), "--out", str(tmp_path / "c.json"))
    return CliRunner().invoke(app, ["calibrate", *out, *WORDS, *words], env={"COLUMNS": "100"})


def test_a_log_becomes_a_file_whose_thresholds_are_those_printed(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", uniform_records(999))
    done = run(tmp_path, log, "--target-fraction", "0.3", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    rows = {row["target_fraction"]: row for row in shown["targets"]}
    assert sorted(rows) == [0.1, 0.2, 0.3, 0.5]
    made = read_calibration(tmp_path / "c.json")
    for target, row in rows.items():
        # The scores are uniform in [0, 10).
        assert row["threshold"] == made.threshold(target).value
        assert row["threshold"] / 10 == pytest.approx(target, abs=0.05)
        assert row["low"] < target < row["high"]
        assert row["realised"] == pytest.approx(target, abs=0.08)
    routing = RoutingConfig(margin_window_tokens=2, max_escalation_tokens=4, calibration="c.json")
    assert RoutingState.of(routing, made).calibration == made


def test_the_table_marks_the_chosen_target_and_says_what_to_do_next(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", uniform_records(199))
    shown = " ".join(run(tmp_path, log, "--target-fraction", "0.25").stdout.split())
    assert "> 0.25" in shown and "> 0.3" not in shown
    assert "set it as `routing.calibration`" in shown


def test_a_cost_is_turned_into_a_fraction_and_noted_in_the_file(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", uniform_records(500))
    done = run(
        tmp_path, log, "--max-cost", "0.9", "--longest-tokens", "2", "--hold-back-tokens", "0"
    )
    assert done.exit_code == 0, done.output
    made = read_calibration(tmp_path / "c.json")
    assert made.promise is not None and (made.promise.kind, made.promise.limit) == ("cost", 0.9)
    # 0.5 kept, 2 tokens of the small model; an escalation after the second costs no more.
    assert made.target_fraction == pytest.approx(1.0, abs=0.01)
    assert "keeps the cost at or below 0.9" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give one of --target-fraction"),
        (("--target-fraction", "0.3", "--max-cost", "1"), "give one of --target-fraction"),
        (("--target-fraction", "0.3", "--policy", "random"), "have a score to calibrate"),
        (("--target-fraction", "0.01"), "calibrate on at least 99"),
        (("--max-failure-rate", "0.05"), "0 judged answers cannot show"),
    ],
)
def test_what_cannot_be_calibrated_ends_with_one_message(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = run(tmp_path, write(tmp_path / "log.jsonl", uniform_records(50)), *words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "c.json").exists()


def test_prompts_are_answered_under_the_endpoints_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def answered(prompts: Any, cascade: CascadeConfig, depends: Any, **settings: Any) -> Run:
        asked.update(settings, prompts=prompts, name=cascade.cascade_name)
        return Run(tuple(uniform_records(99)), ("400: too long",))

    monkeypatch.setattr("cluster.dependencies.running_dependencies", lambda cascade: DEPENDS)
    monkeypatch.setattr("cluster.prompt_run.run_prompts", answered)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    config = tmp_path / "config.yaml"
    args = {
        "cascade_name": "mine",
        "small": {"name": "s", "source": "x"},
        "large": {"name": "l", "source": "y"},
        "mapper": {"small_to_large": "identity"},
        "routing": {"margin_window_tokens": 2, "max_escalation_tokens": 3},
    }
    application = {"name": "cascade", "import_path": IMPORT_PATH, "args": args}
    config.write_text(yaml.safe_dump({"applications": [application]}))
    words = ("--prompts", str(prompts), "--config", str(config), "--out", str(tmp_path / "c.json"))
    done = CliRunner().invoke(app, ["calibrate", *words, "--target-fraction", "0.3", "--json"])
    assert done.exit_code == 0, done.output
    made = read_calibration(tmp_path / "c.json")
    assert made.score == ScoreSpec(name="margin", window_tokens=2, last_token=3)
    assert (asked["name"], asked["concurrency"], asked["reads_prompt"]) == ("mine", 8, False)
    assert asked["prompts"] == [[{"role": "user", "content": "hello"}]]
    assert "1 prompts have no answer; the first: 400: too long" in done.stderr


def test_answers_come_from_one_place(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", uniform_records(9))
    done = run(tmp_path, log, "--prompts", "p.jsonl", "--target-fraction", "0.3")
    assert (done.exit_code, "give one of --log and --prompts" in done.stderr) == (2, True)
