"""Every way to a mapper leads to the same one: interrupted, in shards, in passes, one by one."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from cluster.errors import MapperError
from mappers.fingerprint import fingerprint
from mappers.fitting.fit import FitReport, FitSettings, fit, fit_shard
from mappers.fitting.passes import plan_fit
from mappers.fitting.spool import Feed, Observed, checkpoint_bytes
from mappers.store import load_mapper
from tests.mappers.tiny import sentences, write_model

SETTINGS = FitSettings(
    k=2, tokens=3_200, heldout_tokens=320, sequence_tokens=32, dtype=torch.float32
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return (
        write_model(root / "small", layers=3, seed=1),
        write_model(root / "large", layers=4, seed=2),
    )


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine batches instead of one."""
    monkeypatch.setattr("mappers.fitting.passes._BATCH_TOKENS", 400)


def run(
    models: tuple[Path, Path], out: Path, settings: FitSettings = SETTINGS, **options: Any
) -> tuple[FitReport, str]:
    heard = io.StringIO()
    report = fit(
        *models,
        sentences(40, seed=1),
        sentences(4, seed=2),
        out,
        settings,
        console=Console(file=heard, width=200),
        **options,
    )
    assert not out.with_name(f"{out.name}.work").exists()
    return report, heard.getvalue()


def shard(models: tuple[Path, Path], out: Path, index: int, count: int, **options: Any) -> Path:
    texts = sentences(40, seed=1), sentences(4, seed=2)
    quiet = Console(file=io.StringIO())
    return fit_shard(*models, *texts, out, shard=(index, count), console=quiet, **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "mapper.safetensors")


def equal(one: Path, other: Path) -> bool:
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def two_pass_bytes(models: tuple[Path, Path], settings: FitSettings, **options: Any) -> int:
    """Free memory with which everything in one pass just does not fit."""
    shapes = [fingerprint(folder).geometry for folder in models]
    plan = plan_fit(shapes[0], shapes[1], settings.support, 2, 10**12, **options)
    files = sum(2 * checkpoint_bytes(folder) for folder in models)  # fp32
    return int((plan.peak_bytes + files) / 0.9) - 1_000


class Killed(Exception):
    pass


def kill_after(batches: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make reading fail once so many batches were read; gives those that are."""
    original, seen = Feed.read, []

    def read(self: Feed, at: int, **options: Any) -> Observed:
        if len(seen) == batches:
            raise Killed
        seen.append(at)
        return original(self, at, **options)

    monkeypatch.setattr(Feed, "read", read)
    return seen


@pytest.mark.parametrize(("passes", "after"), [("one", 3), ("two", 3), ("two", 11)])
def test_a_killed_fit_goes_on_where_it_was_and_ends_bit_for_bit_the_same(
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    passes: str,
    after: int,
) -> None:
    options = {"memory_bytes": two_pass_bytes(models, SETTINGS)} if passes == "two" else {}
    run(models, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        seen = kill_after(after, patch)
        with pytest.raises(Killed):
            run(models, tmp_path / "killed", checkpoint_s=0.0, **options)
        assert len(seen) == after
    assert not (tmp_path / "killed").exists()
    with monkeypatch.context() as patch:
        seen = kill_after(10**6, patch)
        _, heard = run(models, tmp_path / "killed", **options)
        assert "going on from" in heard
        assert seen[0] == after % 9
    assert equal(tmp_path / "killed", tmp_path / "whole")


def test_work_of_other_settings_is_dropped_with_a_word(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(3, patch)
        with pytest.raises(Killed):
            run(models, tmp_path / "out", checkpoint_s=0.0)
    other = replace(SETTINGS, first_token_weight=1)
    _, heard = run(models, tmp_path / "out", other)
    assert "other models, data or settings: removed" in heard
    run(models, tmp_path / "straight", other)
    assert equal(tmp_path / "out", tmp_path / "straight")


def test_a_folder_of_something_else_is_no_work_folder(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(MapperError, match="not the work folder of a fit"):
        run(models, tmp_path / "out", work_dir=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_four_shards_give_the_mapper_of_one_run(models: tuple[Path, Path], tmp_path: Path) -> None:
    run(models, tmp_path / "whole")
    out = tmp_path / "out"
    for index in (1, 2, 4):
        shard(models, out, index, 4, settings=SETTINGS)
    with pytest.raises(MapperError, match="shards 3 of 4 of pass 1 are missing"):
        run(models, out, shards=4)
    shard(models, out, 3, 4, settings=SETTINGS)
    run(models, out, shards=4)
    for name, expected in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(out)[name], expected, rtol=1e-2, atol=1e-6)
    with pytest.raises(MapperError, match="count from 1/4 to 4/4"):
        shard(models, out, 5, 4, settings=SETTINGS)
    with pytest.raises(MapperError, match="shards cannot know before"):
        both = replace(SETTINGS, sweep=True, attention_weights=True)
        shard(models, out, 1, 4, settings=both)


def test_every_pass_is_read_in_shards_before_the_next(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    options = {"memory_bytes": two_pass_bytes(models, SETTINGS)}
    whole, _ = run(models, tmp_path / "whole", **options)
    assert len(whole.plan.first + whole.plan.solve) == 2
    out = tmp_path / "out"
    for index in (1, 2):
        shard(models, out, index, 2, settings=SETTINGS, **options)
    with pytest.raises(MapperError, match="shards 1, 2 of 2 of pass 2 are missing"):
        run(models, out, shards=2, **options)
    for index in (1, 2):
        shard(models, out, index, 2, settings=SETTINGS, **options)
    run(models, out, shards=2, **options)
    for name, expected in weights(tmp_path / "whole").items():
        torch.testing.assert_close(weights(out)[name], expected, rtol=1e-2, atol=1e-6)


def test_two_passes_give_the_mapper_of_one(models: tuple[Path, Path], tmp_path: Path) -> None:
    one, _ = run(models, tmp_path / "one")
    two, heard = run(models, tmp_path / "two", memory_bytes=two_pass_bytes(models, SETTINGS))
    assert "everything in one pass" not in heard and len(two.plan.solve) == 1
    assert one.manifest.source_layers == two.manifest.source_layers
    for name, expected in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], expected, rtol=1e-2, atol=1e-6)


def test_one_model_after_the_other_gives_the_same_mapper(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    run(models, tmp_path / "beside")
    _, heard = run(models, tmp_path / "after", sequential=True)
    assert "one model after the other: 0.00 GB of disk" in heard
    assert equal(tmp_path / "after", tmp_path / "beside")


@pytest.mark.parametrize("support", ["full", "head_local"])
def test_attention_weights_are_recorded_and_change_the_mapper(
    models: tuple[Path, Path], tmp_path: Path, support: Any
) -> None:
    settings = replace(SETTINGS, support=support, k=1)
    run(models, tmp_path / "plain", settings)
    weighted, _ = run(models, tmp_path / "out", replace(settings, attention_weights=True))
    weighting = weighted.manifest.attention_weighting
    assert weighting is not None and weighting.boundaries == len(range(12, 32))
    width = 32 if support == "full" else 16
    assert weighting.least_effective_tokens == 2 * width
    assert {len(row) for row in weighting.alpha_k_LG} == {32 // width}
    alphas = [alpha for row in weighting.alpha_k_LG + weighting.alpha_v_LG for alpha in row]
    assert len(alphas) == 2 * 4 * 32 // width and 0.1 < min(alphas) <= max(alphas) <= 1.0
    assert not equal(tmp_path / "out", tmp_path / "plain")
    running = fingerprint(models[0]), fingerprint(models[1])
    assert load_mapper(tmp_path / "out", *running, allow_refused=True).target.layers == 4


def test_greedy_selection_is_recorded_and_works_in_two_passes(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, selection="greedy")
    one, _ = run(models, tmp_path / "one", settings)
    two, _ = run(models, tmp_path / "two", settings, memory_bytes=two_pass_bytes(models, settings))
    assert len(two.plan.solve) == 1
    assert one.manifest.selection == two.manifest.selection == "greedy"
    assert one.manifest.source_layers == two.manifest.source_layers


def test_a_model_mapped_to_itself_is_the_identity(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, k=1, ridge=SETTINGS.ridge.model_copy(update={"value": 1e-9}))
    report, _ = run((models[0], models[0]), tmp_path / "out", settings)
    assert report.manifest.source_layers == ((0,), (1,), (2,))
    assert min(report.manifest.heldout_r2.k + report.manifest.heldout_r2.v) > 1 - 1e-6
    eye = torch.eye(32)
    for layer_FO in weights(tmp_path / "out")["v_weight_LGFO"][:, 0]:
        assert (layer_FO.float() - eye).abs().max() < 1e-4


@pytest.mark.parametrize(("gigabytes", "judged"), [(14, False), (18, True)])
def test_one_model_after_the_other_is_chosen_where_both_do_not_fit(
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gigabytes: int,
    judged: bool,
) -> None:
    # As if each model took 8 GB and reading one batch 2 GB; nine tenths of memory are used.
    monkeypatch.setattr("mappers.fitting.inputs.checkpoint_bytes", lambda folder: 4 * 10**9)
    monkeypatch.setattr("mappers.fitting.passes.reserve_bytes", lambda *shapes: 2 * 10**9)
    report, heard = run(models, tmp_path / "out", memory_bytes=gigabytes * 10**9)
    assert "one model after the other" in heard
    assert (report.manifest.score is not None) == judged
    assert min(report.manifest.heldout_r2.k) > 0.1
