"""A router begins only with a calibration of what it serves, and logs what it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import CascadeConfig
from cluster.dependencies import running_dependencies
from cluster.errors import ConfigError
from deployments.router import _routing
from router.record import read_log
from router.samples import calibrate, collect
from tests.mappers.tiny import write_model
from tests.router.logs import WINDOW, record, uniform_records


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


def test_a_plain_configuration_reads_no_model() -> None:
    cascade = CascadeConfig.model_validate(
        {
            "small": {"name": "s", "source": "/missing/s"},
            "large": {"name": "l", "source": "/missing/l"},
            "mapper": {"small_to_large": "identity"},
        }
    )
    state, log = _routing(cascade)
    assert (state.calibration, state.budget, log) == (None, None, None)


def test_a_calibration_of_the_running_pair_is_taken_and_a_stale_one_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.json"
    cascade = config(tmp_path, calibration=str(path))
    depends = running_dependencies(cascade)
    assert (depends.mapper_id, depends.logprobs_mode) == ("identity", "raw_logprobs")
    made = calibrate(collect(uniform_records(99), WINDOW), WINDOW, 0.3, depends)
    path.write_text(made.model_dump_json())
    state, _ = _routing(cascade)
    assert state.calibration == made
    small = cascade.small.model_copy(
        update={"engine_kwargs": {"logprobs_mode": "processed_logprobs"}}
    )
    with pytest.raises(ConfigError, match="logprobs_mode is raw_logprobs there and processed"):
        _routing(cascade.model_copy(update={"small": small}))


def test_logged_lines_say_what_they_were_made_with(tmp_path: Path) -> None:
    cascade = config(tmp_path, log_file=str(tmp_path / "log.jsonl"), log_margins=True)
    _, log = _routing(cascade)
    assert log is not None
    log(record(1, [1.0, 2.0]))
    log.close()
    (line,) = read_log(tmp_path / "log.jsonl")
    assert line.depends == running_dependencies(cascade)
    assert line.margins == (1.0, 2.0)
