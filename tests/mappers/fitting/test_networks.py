"""A fit whose linear map is refused, and the networks that may take its place."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mappers.fingerprint import fingerprint
from mappers.fitting.fit import FitReport, FitSettings, fit
from mappers.fitting.run import FitRun
from mappers.judging.records import ScoreReport
from mappers.mapper import LinearMapper, Mapper
from mappers.mlp import MlpMapper
from mappers.store import load_mapper
from tests.mappers.tiny import sentences, write_model

SETTINGS: dict[str, Any] = {
    "k": 1,
    "tokens": 12_288,
    "heldout_tokens": 160,
    "sequence_tokens": 32,
    "dtype": torch.float32,
    "network_units": 8,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        write_model(root / "small", layers=2, seed=1),
        write_model(root / "large", layers=2, seed=2),
    )


def run(
    models: tuple[Path, Path],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdicts: dict[type[Mapper], str],
    **changes: Any,
) -> tuple[FitReport, str]:
    """A fit whose mappers are judged as said, and what it printed."""
    judge = FitRun._score

    def score(self: FitRun, mapper: Mapper) -> ScoreReport | None:
        report = judge(self, mapper)
        assert report is not None
        return report.model_copy(update={"verdict": verdicts[type(mapper)], "reasons": ("told",)})

    monkeypatch.setattr(FitRun, "_score", score)
    printed = io.StringIO()
    texts = sentences(140, seed=1), sentences(4, seed=2)
    settings = FitSettings(**(SETTINGS | changes))
    report = fit(*models, *texts, out, settings, console=Console(file=printed, width=400))
    return report, printed.getvalue()


def test_networks_take_the_place_of_a_refused_map(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: dict[type[Mapper], str] = {LinearMapper: "refuse", MlpMapper: "accept"}
    linear, _ = run(models, tmp_path / "linear", monkeypatch, verdicts)
    monkeypatch.undo()
    report, printed = run(models, tmp_path / "out", monkeypatch, verdicts, fallback=True)
    manifest = report.manifest
    assert manifest.kind == "networks" and manifest.networks is not None
    assert manifest.networks.hidden_units == 8 and manifest.networks.residual
    assert manifest.score is not None and manifest.score.verdict == "accept"
    # What the linear map leaves over is learned in part.
    assert manifest.heldout_r2.mean_v > linear.manifest.heldout_r2.mean_v + 0.005
    assert report.parameters > linear.parameters
    assert "training networks on top of it" in printed and "GB of caches" in printed
    assert not (tmp_path / "out.work").exists()
    running = fingerprint(models[0]), fingerprint(models[1])
    assert isinstance(load_mapper(report.folder, *running), MlpMapper)


def test_a_linear_map_stays_where_networks_are_not_asked_for_or_not_better(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: dict[type[Mapper], str] = {LinearMapper: "refuse", MlpMapper: "refuse"}
    report, printed = run(models, tmp_path / "out", monkeypatch, refused, fallback=True)
    assert report.manifest.kind == "linear" and "networks" in report.seconds
    assert "the linear map is kept" in printed
    monkeypatch.undo()
    accepted: dict[type[Mapper], str] = {LinearMapper: "accept"}
    report, _ = run(models, tmp_path / "other", monkeypatch, accepted, fallback=True)
    assert report.manifest.kind == "linear" and "networks" not in report.seconds
