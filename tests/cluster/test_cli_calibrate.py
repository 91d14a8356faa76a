"""`kvcascade calibrate` from a log to a file that a router accepts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import RoutingConfig
from router.calibration import read_calibration
from router.policies import RoutingState
from router.record import AnswerRecord
from tests.router.logs import uniform_records

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
