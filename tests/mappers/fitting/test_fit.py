"""Packing, capturing, fitting and scoring with tiny real models."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cluster.errors import MapperError
from mappers.capture import cache_to_kv, kv_to_cache, load_model, pack, position_free_kv, windows
from mappers.fingerprint import fingerprint
from mappers.fitting.accumulate import PassState, solve_all
from mappers.fitting.blocks import PairMoments
from mappers.fitting.fit import FitReport, FitSettings, fit
from mappers.fitting.select import choose_layers, single_source_r2_SL
from mappers.fitting.solved import weights_of
from mappers.fitting.spool import Feed, ModelPair
from mappers.geometry import read_config, rope_spec
from mappers.judging.score import MAPPED, NATIVE, RAW, judge, score_mapper
from mappers.manifest import Ridge, read_manifest
from mappers.mapper import IdentityMapper, LinearMapper
from mappers.rope import Rope
from mappers.store import load_mapper
from tests.mappers.tiny import sentences, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        write_model(root / "small", layers=2, seed=1),
        write_model(root / "large", layers=3, kv_heads=4, seed=2),
    )


@pytest.fixture(scope="module")
def report(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> FitReport:
    return fit(
        *models,
        sentences(40, seed=1),
        sentences(4, seed=2),
        tmp_path_factory.mktemp("out") / "mapper",
        FitSettings(k=1, tokens=3_200, heldout_tokens=320, sequence_tokens=32, dtype=torch.float32),
        console=Console(file=io.StringIO()),
    )


def test_packing_begins_every_sequence_alike_and_separates_texts(
    models: tuple[Path, Path],
) -> None:
    packed = pack(["w0 w1 w2", "w3 w4"], models[0], sequence_tokens=4, max_tokens=100)
    assert packed.ids_ST.tolist() == [[1, 3, 4, 5], [1, 2, 6, 7]]
    assert packed.tokens == 8 and packed.texts == 2
    shorter = pack(["w0 w1 w2", "w3 w4"], models[0], sequence_tokens=4, max_tokens=4)
    assert shorter.ids_ST.tolist() == [[1, 3, 4, 5]] and shorter.texts == 1
    assert shorter.sha256 != packed.sha256
    with pytest.raises(MapperError, match="fewer than one sequence"):
        pack(["w0"], models[0], sequence_tokens=8, max_tokens=100)


def test_windows_stay_within_one_text_and_begin_alike(models: tuple[Path, Path]) -> None:
    cut = windows(["w0 w1 w2 w3 w4 w5 w6", "w7", "<s> w8 w9 w10"], models[0], 4, 100)
    assert cut.ids_ST.tolist() == [[1, 3, 4, 5], [1, 7, 8, 9], [1, 11, 12, 13]]
    assert cut.texts == 2
    assert windows(["w0 w1 w2 w3 w4 w5 w6"], models[0], 4, 4).ids_ST.shape == (1, 4)
    with pytest.raises(MapperError, match="fills a window of 4"):
        windows(["w0"], models[0], 4, 100)


def test_a_heavy_first_token_is_mapped_exactly(models: tuple[Path, Path]) -> None:
    prints = [fingerprint(folder) for folder in models]
    ropes = Rope(prints[0].rope), Rope(prints[1].rope)
    pair = ModelPair(models, ropes, torch.float32, "cpu")
    data = pack(sentences(10, seed=1), models[0], 32, 960)
    feed = Feed(data, 256, pair)
    errors = []
    for weight in (1, 1_000):
        state = PassState(PairMoments(prints[0].geometry, prints[1].geometry))
        for at in range(len(feed.batches)):
            state.add(feed.read(at), 32, weight)
        chosen = choose_layers(single_source_r2_SL(state.moments), 1)
        fits = solve_all(state.moments, chosen, "full", Ridge())
        mapper = LinearMapper(*prints, weights_of(chosen, fits), dtype=torch.float32)
        _, v_x = position_free_kv(pair.source, ropes[0], data.ids_ST[:1, :1])
        _, v_y = position_free_kv(pair.target, ropes[1], data.ids_ST[:1, :1])
        _, mapped = mapper.apply(v_x, v_x, 0)
        errors.append(float((mapped - v_y).norm() / v_y.norm()))
    assert errors[1] < 0.1 * errors[0]


def test_captured_keys_are_position_free(models: tuple[Path, Path]) -> None:
    model = load_model(models[0], torch.float32, "cpu")
    turn = Rope(rope_spec(read_config(models[0])))
    k_LNHD, _ = position_free_kv(model, turn, torch.full((1, 6), 5))
    # The first layer's keys depend on the token alone once the rotation is taken off.
    torch.testing.assert_close(k_LNHD[0], k_LNHD[0, :1].expand(6, -1, -1), rtol=1e-4, atol=1e-4)
    cached = model.base_model(input_ids=torch.full((1, 6), 5), use_cache=True).cache
    k_LBTHD, _ = cache_to_kv(cached)
    assert (k_LBTHD[0, 0, 5] - k_LBTHD[0, 0, 0]).abs().max() > 0.1 * k_LBTHD[0].abs().max()
    again, _ = cache_to_kv(kv_to_cache(*cache_to_kv(cached)))
    assert torch.equal(again, k_LBTHD)


def test_fit_writes_a_mapper_that_loads_and_records_how_it_was_made(
    models: tuple[Path, Path], report: FitReport
) -> None:
    manifest = read_manifest(report.folder)
    assert manifest == report.manifest
    assert manifest.calibration.tokens == 3_200 and manifest.heldout.tokens == 320
    assert manifest.k == 1 and len(manifest.source_layers) == 3
    # 32 features hold part of what 64 target values say of a token, and noise is not fitted.
    assert 0.2 < manifest.heldout_r2.v[0] < 0.9
    assert report.parameters == 2 * 3 * 32 * 64
    running = fingerprint(models[0]), fingerprint(models[1])
    mapper = load_mapper(report.folder, *running, allow_refused=True)
    assert mapper.target.kv_heads == 4


def test_score_has_every_control_and_an_exact_injection(report: FitReport) -> None:
    score = report.manifest.score
    assert score is not None
    names = [row.name for row in score.rows]
    assert names == [
        "native",
        "native injected",
        "mapped",
        "another text's cache",
        "random mapper",
        "no prefix",
        "source alone",
    ]
    assert score.injection_exact
    assert score.row("native injected").kl_to_native == 0.0
    assert score.row("native injected").top1_agreement == 1.0
    assert score.windows == 10 and score.prefix_tokens == 16 and score.scored_tokens == 16


def test_a_mapper_is_accepted_only_when_it_recovers_half_and_beats_the_small_model() -> None:
    row = {"native": 20.0, "mapped": 40.0, "no prefix": 320.0, "source alone": 60.0}
    recovered, reasons = judge(row, injection_exact=True)
    assert recovered == pytest.approx(0.75) and reasons == ()
    assert "source model alone" in judge(row | {"source alone": 30.0}, True)[1][0]
    assert "recovers 25%" in judge(row | {"mapped": 160.0, "source alone": 500.0}, True)[1][0]
    assert "no better with a prefix" in judge(row | {"no prefix": 19.0}, True)[1][0]
    assert "the test itself" in judge(row, injection_exact=False)[1][0]


def test_identity_scores_as_native(models: tuple[Path, Path]) -> None:
    model = load_model(models[0], torch.float32, "cpu")
    windows = pack(sentences(2, seed=3), models[0], 32, 64)
    identity = IdentityMapper(fingerprint(models[0]).geometry, torch.float32)
    score = score_mapper(model, model, identity, windows, prefix_tokens=16)
    assert score.row(MAPPED).perplexity == score.row(NATIVE).perplexity
    assert score.row(MAPPED).attention_cosine == pytest.approx(1.0, abs=1e-5)
    assert score.row(RAW).top1_agreement == 1.0
    with pytest.raises(MapperError, match="cannot be split"):
        score_mapper(model, model, identity, windows, prefix_tokens=32)


def test_too_few_observations_are_refused_and_few_are_warned_of(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    quiet = Console(file=io.StringIO())
    settings = FitSettings(
        k=None, tokens=64, heldout_tokens=32, sequence_tokens=32, dtype=torch.float32
    )
    out = tmp_path / "mapper"
    with pytest.raises(MapperError, match="64 calibration tokens cannot determine 64 features"):
        fit(*models, sentences(9, 1), sentences(9, 2), out, settings, console=quiet)
    assert not out.exists()
    with pytest.warns(UserWarning, match=r"only 2\.0 calibration tokens per feature"):
        more = replace(settings, tokens=128)
        fit(*models, sentences(9, 1), sentences(1, 2), out, more, console=quiet)
    assert read_manifest(out).k == 2


def test_models_with_different_tokenizers_are_refused(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", layers=1)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    with pytest.raises(MapperError, match="tokenizer"):
        fit(models[0], other, [], [], tmp_path / "out")
