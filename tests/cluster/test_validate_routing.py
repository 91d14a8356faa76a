"""`kvcascade validate` on a calibration file: what a router would say of it when it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.config import CascadeConfig
from cluster.dependencies import running_dependencies
from cluster.validate_routing import check_routing
from router.calibration import Dependencies
from router.samples import calibrate, collect
from tests.mappers.tiny import write_model
from tests.router.logs import DEPENDS, WINDOW, uniform_records


def config(tmp_path: Path, **routing: Any) -> CascadeConfig:
    model = {"source": str(tmp_path / "model")}
    return CascadeConfig.model_validate(
        {
            "small": {**model, "name": "s"},
            "large": {**model, "name": "l"},
            "mapper": {"small_to_large": "identity"},
            "routing": {"margin_window_tokens": 2, "max_escalation_tokens": 4, **routing},
        }
    )


def found(tmp_path: Path, depends: Dependencies, **routing: Any) -> list[tuple[str, str]]:
    made = calibrate(collect(uniform_records(99), WINDOW), WINDOW, 0.3, depends)
    path = tmp_path / "c.json"
    path.write_text(made.model_dump_json())
    cascade = config(tmp_path, **{"calibration": str(path)} | routing)
    return [(finding.level, finding.text) for finding in check_routing(cascade)]


def test_without_a_file_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert list(check_routing(config(tmp_path))) == []


def test_a_file_of_this_pair_is_ok_and_shows_its_threshold(tmp_path: Path) -> None:
    write_model(tmp_path / "model", layers=1)
    depends = running_dependencies(config(tmp_path))
    (threshold, fits) = found(tmp_path, depends)
    assert threshold[0] == "ok" and "0.3 of the answers (90 %: 0.2" in threshold[1]
    assert fits == ("ok", "made with these models, this mapper and this vLLM")
    assert "for 0.5 of the answers" in found(tmp_path, depends, target_fraction=0.5)[0][1]


def test_a_file_of_another_pair_or_score_is_a_problem(tmp_path: Path) -> None:
    write_model(tmp_path / "model", layers=1)
    levels = [level for level, _ in found(tmp_path, DEPENDS)]
    assert levels == ["ok", "problem"]
    assert "stale calibration: small_model is s there" in found(tmp_path, DEPENDS)[1][1]
    ((level, text),) = found(tmp_path, DEPENDS, margin_window_tokens=3)
    assert level == "problem" and "window_tokens 2, the policy has window_tokens 3" in text
    ((level, text),) = found(tmp_path, DEPENDS, calibration=str(tmp_path / "none.json"))
    assert level == "problem" and "no such calibration" in text


def test_models_that_are_not_here_leave_the_file_unchecked(tmp_path: Path) -> None:
    levels = [level for level, _ in found(tmp_path, DEPENDS)]
    assert levels == ["ok", "unchecked"]
