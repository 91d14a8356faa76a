"""`kvcascade replay`: a log under other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import IMPORT_PATH
from router.record import AnswerRecord
from router.samples import calibrate, collect
from tests.router.logs import DEPENDS, WINDOW, record


def write(path: Path, records: list[AnswerRecord]) -> str:
    path.write_text("".join(one.model_dump_json() + "\n" for one in records))
    return str(path)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["replay", *words], env={"COLUMNS": "100"})


def answers(count: int = 9) -> list[AnswerRecord]:
    """Whole answers whose margins are 1, 2, ..."""
    return [record(number, [float(number)] * 4) for number in range(1, count + 1)]


def test_decisions_that_change_are_counted_both_ways(tmp_path: Path) -> None:
    cut = record(10, [0.5] * 8, complete=False, score=0.5)
    log = write(tmp_path / "log.jsonl", [*answers(), cut])
    done = run(log, "--policy", "first_token", "--threshold", "3.5", "--json")
    assert done.exit_code == 0, done.output
    seen = json.loads(done.stdout)
    assert (seen["escalated_before"], seen["escalated_after"]) == (1, 4)
    assert (seen["changed_to_large"], seen["changed_to_small"]) == (3, 0)
    assert (seen["fraction_after"], seen["uncertain"]) == (0.4, 0)
    lower = json.loads(run(log, "--policy", "first_token", "--threshold", "0.1", "--json").stdout)
    assert (lower["changed_to_small"], lower["uncertain"]) == (1, 1)


def test_a_calibration_brings_its_own_score(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", answers())
    made = calibrate(collect(answers(), WINDOW), WINDOW, 0.3, DEPENDS)
    (tmp_path / "c.json").write_text(made.model_dump_json())
    seen = json.loads(run(log, "--calibration", str(tmp_path / "c.json"), "--json").stdout)
    assert (seen["policy"], seen["calibration_id"]) == ("margin", made.calibration_id)
    # Scores below the third smallest are doubted, and that one itself by its draw.
    assert seen["escalated_after"] in (2, 3)
    words = ("--calibration", str(tmp_path / "c.json"), "--target-fraction", "0.8", "--json")
    assert json.loads(run(log, *words).stdout)["escalated_after"] in (7, 8)


def test_a_configuration_file_decides_and_the_table_says_how_much_changes(tmp_path: Path) -> None:
    args = {
        "small": {"name": "s", "source": "x"},
        "large": {"name": "l", "source": "y"},
        "mapper": {"small_to_large": "identity"},
        "routing": {"policy": "quantile", "margin_window_tokens": 1, "margin_threshold": 2.5},
    }
    application = {"name": "cascade", "import_path": IMPORT_PATH, "args": args}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [application]}))
    log = write(tmp_path / "log.jsonl", answers())
    shown = " ".join(run(log, "--config", str(config)).stdout.split())
    assert "decisions that change: 2 (to large: 2, to small: 0); uncertain: 0" in shown
    assert "decided again by quantile" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--threshold", "1", "--calibration", "c.json"), "both set a threshold"),
        (("--policy", "magic"), "routing.policy: Input should be"),
        (("--target-fraction", "0.5"), "target_fraction needs `calibration`"),
        (("--calibration", "missing.json"), "missing.json: no such calibration"),
    ],
)
def test_what_cannot_be_replayed_ends_with_one_message(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = run(write(tmp_path / "log.jsonl", answers()), *words)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
