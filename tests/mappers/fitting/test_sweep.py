"""Sweeping k and support: what is tried, which is chosen, what is drawn."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cluster.errors import MapperError
from cluster.sweep_table import print_sweep
from mappers.capture import load_model, pack
from mappers.fingerprint import fingerprint
from mappers.fitting.fit import FitReport, FitSettings, fit
from mappers.fitting.sweep import SweepResult, SweepRow, choose, plot_sweep, predict
from mappers.mapper import IdentityMapper
from tests.mappers.tiny import sentences, write_model

SETTINGS = FitSettings(
    sweep=True, tokens=1_280, heldout_tokens=160, sequence_tokens=32, dtype=torch.float32
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        write_model(root / "small", layers=3, seed=1),
        write_model(root / "large", layers=2, seed=2),
    )


def run(models: tuple[Path, Path], out: Path, settings: FitSettings = SETTINGS) -> FitReport:
    quiet = Console(file=io.StringIO())
    return fit(*models, sentences(20, 1), sentences(4, 2), out, settings, console=quiet)


@pytest.fixture(scope="module")
def report(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> FitReport:
    torch.set_num_threads(1)
    return run(models, tmp_path_factory.mktemp("out") / "mapper")


def row(kl_W: tuple[float, ...], parameters: int, cosine: float = 0.9) -> SweepRow:
    return SweepRow(
        k=1,
        support="full",
        attention_weights=False,
        width=1,
        observations_per_feature=10.0,
        parameters=parameters,
        in_sample_r2_keys=0.8,
        in_sample_r2_values=0.7,
        heldout_r2_keys=0.6,
        heldout_r2_values=0.5,
        attention_cosine=cosine,
        kl=sum(kl_W) / len(kl_W),
        kl_W=kl_W,
        top1_agreement=0.8,
        perplexity_ratio=1.2,
    )


def test_the_least_kl_wins_unless_a_smaller_mapper_is_as_good() -> None:
    best = row((0.10, 0.20, 0.30), parameters=100)
    # 0.01 worse, give or take 0.02 / sqrt(3): no evidence against it.
    near = row((0.11, 0.23, 0.29), parameters=50)
    # 0.01 worse in every window: small, but certain.
    worse = row((0.11, 0.21, 0.31), parameters=10)
    assert choose([best, worse]) == 0
    assert choose([best, near]) == 1
    assert choose([worse, near, best]) == 1


def test_the_cosine_decides_between_equally_good_mappers_of_one_size() -> None:
    best = row((0.10, 0.20, 0.30), parameters=100, cosine=0.90)
    near = row((0.11, 0.23, 0.29), parameters=100, cosine=0.95)
    assert choose([best, near]) == 1 and choose([near, best]) == 0
    assert choose([row((0.1,), 100), row((0.1001,), 10)]) == 0  # one window proves nothing


def test_every_k_and_support_is_tried_and_the_best_is_written(report: FitReport) -> None:
    result = report.sweep
    assert result is not None
    tried = [(one.support, one.k, one.width) for one in result.rows]
    assert tried == [
        ("full", 1, 32),
        ("full", 2, 64),
        ("full", 3, 96),
        ("head_local", 1, 16),
        ("head_local", 2, 32),
        ("head_local", 3, 48),
    ]
    assert result.not_swept == ("attention weights: not asked for",)
    for one in result.rows:
        assert one.parameters == 2 * 2 * 32 * one.width
        assert one.in_sample_r2_values is not None
        assert one.heldout_r2_values < one.in_sample_r2_values < 1
        assert one.kl > 0 and len(one.kl_W) == 5 and 0.2 < one.attention_cosine <= 1
    in_sample = [one.in_sample_r2_keys or 0.0 for one in result.rows[:3]]
    assert in_sample == sorted(in_sample)
    assert (report.manifest.k, report.manifest.support) == (result.best.k, result.best.support)
    assert report.parameters == result.best.parameters
    # The mapper that was written is the one that was judged.
    score = report.manifest.score
    assert score is not None
    assert score.row("mapped").kl_to_native == pytest.approx(result.best.kl, rel=1e-5)
    assert score.row("mapped").top1_agreement == pytest.approx(result.best.top1_agreement)
    assert report.manifest.heldout_r2.mean_k == pytest.approx(result.best.heldout_r2_keys)


def test_settings_that_the_text_cannot_determine_are_left_out_by_name(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    result = run(models, tmp_path / "out", replace(SETTINGS, tokens=64)).sweep
    assert result is not None
    assert [(one.support, one.k) for one in result.rows] == [
        ("full", 1),
        ("head_local", 1),
        ("head_local", 2),
        ("head_local", 3),
    ]
    assert "full, k 2: 64 tokens for 64 features" in result.not_swept
    with pytest.raises(MapperError, match="too few calibration tokens"):
        wide = write_model(tmp_path / "wide", layers=1, kv_heads=4)
        run((wide, models[1]), tmp_path / "none", replace(SETTINGS, tokens=32))


def test_the_best_setting_is_tried_with_attention_weights_too(
    models: tuple[Path, Path], report: FitReport, tmp_path: Path
) -> None:
    weighted = run(models, tmp_path / "out", replace(SETTINGS, attention_weights=True))
    assert weighted.sweep is not None and report.sweep is not None
    assert weighted.sweep.rows[:-1] == report.sweep.rows
    last = weighted.sweep.rows[-1]
    assert last.attention_weights and last.in_sample_r2_keys is None
    assert (last.k, last.support) == (report.sweep.best.k, report.sweep.best.support)
    assert last.kl != report.sweep.best.kl
    recorded = weighted.manifest.attention_weighting is not None
    assert recorded == weighted.sweep.best.attention_weights


def test_the_identity_predicts_as_the_native_cache(models: tuple[Path, Path]) -> None:
    model = load_model(models[0], torch.float32, "cpu")
    windows = pack(sentences(2, seed=3), models[0], 32, 96)
    identity = IdentityMapper(fingerprint(models[0]).geometry, torch.float32)
    seen = predict(model, model, identity, windows, 16)
    assert seen.kl_W == (0.0, 0.0, 0.0) and seen.top1_agreement == 1.0
    assert seen.perplexity_ratio == 1.0
    assert seen.attention_cosine == pytest.approx(1.0, abs=1e-5)


def test_the_table_names_every_setting_and_what_was_left_out(report: FitReport) -> None:
    heard = io.StringIO()
    assert report.sweep is not None
    print_sweep(report.sweep, Console(file=heard, width=160))
    printed = heard.getvalue()
    assert printed.count("head_local") == 3
    assert f"{report.sweep.best.kl:.4f}" in printed
    assert "not swept: attention weights: not asked for" in printed


def test_the_plot_is_an_image(report: FitReport, tmp_path: Path) -> None:
    assert report.sweep is not None
    weighted = report.sweep.with_row(
        report.sweep.best.model_copy(
            update={"attention_weights": True, "in_sample_r2_keys": None, "kl_W": (9.0,) * 5}
        )
    )
    assert isinstance(weighted, SweepResult) and len(weighted.rows) == 7
    plot_sweep(weighted, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
