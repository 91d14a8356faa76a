"""`kvcascade validate-pair` with tiny models, and scores of the quickstart pair if prepared."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cluster.cli import app
from cluster.errors import MapperError, ModelError
from cluster.model_files import locate_model
from cluster.quickstart.text import heldout_texts
from cluster.sources import quickstart_mapper_folder
from mappers.capture import load_model, windows
from mappers.fingerprint import fingerprint
from mappers.judging.score import score_mapper
from mappers.manifest import DataRecord, LayerR2, MapperManifest, Ridge, read_manifest
from mappers.mapper import LinearMapper, LinearWeights
from mappers.store import load_mapper, save_mapper
from tests.mappers.oracle import identity_weights
from tests.mappers.tiny import sentences, write_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, the exact mapper to itself in two folders, and texts of 200 words."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("validate_pair")
    model = fingerprint(write_model(folder / "model", layers=3, seed=1))
    weights = identity_weights(model)
    data = DataRecord(tokens=1, texts=1, sequence_tokens=1, sha256="0" * 64)
    manifest = MapperManifest(
        source=model,
        target=model,
        support="full",
        k=1,
        source_layers=weights.source_layers,
        ridge=Ridge(),
        first_token_weight=1,
        calibration=data,
        heldout=data,
        heldout_r2=LayerR2(k=(1.0,) * 3, v=(1.0,) * 3),
        score=None,
        weights_sha256="",
        created_by="a test",
    )
    for name in ("there", "back"):
        save_mapper(folder / name, weights, manifest)
    parts = sentences(8, seed=3)
    texts = [" ".join(parts[at : at + 2]) for at in range(0, 8, 2)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def run(files: Path, *words: str) -> Any:
    model = str(files / "model")
    given = ["--source", model, "--target", model, "--text", str(files / "text.jsonl")]
    sizes = ["--prefix-tokens", "32", "--tokens", "192"]
    return CliRunner().invoke(app, ["validate-pair", *given, *sizes, *words])


@pytest.fixture(scope="module")
def both_ways(files: Path) -> Any:
    out = ["--out", str(files / "report"), "--json"]
    folders = ["--mapper", str(files / "there"), "--reverse", str(files / "back")]
    return run(files, *folders, *out)


def test_report_and_page_are_written_beside_the_verdicts(files: Path, both_ways: Any) -> None:
    # Random models predict noise, so that even the exact mapper recovers no gap.
    assert both_ways.exit_code == 3, both_ways.stderr
    printed = json.loads(both_ways.stdout)
    assert printed == json.loads((files / "report" / "report.json").read_text())
    assert (files / "report" / "report.html").read_text().startswith("<!doctype html>")
    assert printed["forward"]["score"]["windows"] == 3
    assert len(printed["drift"]["kept"]) == 10
    # Weights are bf16 and so are the models here, yet the exact mapper stays exact.
    assert printed["drift"]["kept"][-1]["kl_to_native"] < 1e-3
    assert printed["notes"] == []
    for name in ("there", "back"):
        score = read_manifest(files / name).score
        assert score is not None and score.verdict == "refuse"
        assert score.thresholds is not None and score.structure is not None
        assert score.structure.misplaced == ()
        assert sorted(path.name for path in (files / name).iterdir()) == [
            "manifest.json",
            "mapper.safetensors",
        ]


def test_serving_refuses_what_was_judged_unfit_unless_told_otherwise(
    files: Path, both_ways: Any
) -> None:
    model = fingerprint(files / "model")
    with pytest.raises(MapperError, match="judged unfit: the held-out text is predicted no better"):
        load_mapper(files / "there", model, model)
    load_mapper(files / "there", model, model, allow_refused=True)


def test_without_a_way_back_the_report_says_what_is_missing(files: Path) -> None:
    result = run(files, "--mapper", "identity", "--out", str(files / "one-way"))
    assert result.exit_code == 3, result.stderr
    assert "Alternating handoffs were not run" in result.stdout
    assert "planted facts recalled, of 24: native 0" in result.stdout
    assert "greedy continuations share 32.0 of 32 tokens" in result.stdout
    written = json.loads((files / "one-way" / "report.json").read_text())
    assert written["reverse"] is None and written["drift"] is None
    assert "--reverse" in written["notes"][0]
    mapped = next(r for r in written["forward"]["score"]["rows"] if r["name"] == "mapped")
    assert mapped["kl_to_native"] == 0.0


def test_a_report_never_goes_into_a_mapper_folder(files: Path) -> None:
    result = run(files, "--mapper", str(files / "there"), "--out", str(files / "there"))
    assert result.exit_code == 2
    assert "which holds nothing else; give another" in result.stderr
    assert not (files / "there" / "report.json").exists()


def test_two_swapped_layers_are_found_in_the_quickstart_mapper_and_nothing_else() -> None:
    """Two windows of the prepared pair; half a minute on two idle cores."""
    small, large = (_prepared(name) for name in ("small", "large"))
    try:
        mapper = LinearMapper.load(quickstart_mapper_folder())
    except MapperError as error:
        pytest.skip(f"the quickstart mapper is not prepared: {error}")
    w, order = mapper.weights, list(range(mapper.target.layers))
    order[12], order[20] = 20, 12
    swapped = LinearWeights(
        tuple(w.source_layers[at] for at in order),
        w.k_weight_LGFO[order],
        w.k_bias_LGO[order],
        w.v_weight_LGFO[order],
        w.v_bias_LGO[order],
    )
    models = [load_model(at, torch.bfloat16, "cpu") for at in (small, large)]
    unseen = windows(random.Random(0).sample(heldout_texts(), 8), small, 256, 512)
    report = score_mapper(*models, mapper.with_weights(swapped), unseen, prefix_tokens=128)
    assert report.verdict == "refuse" and report.injection_exact
    assert "layer 12 holds keys and values that belong to layer 20" in report.reasons
    assert "layer 20 holds keys and values that belong to layer 12" in report.reasons
    structure, local = report.structure, report.local_attention
    assert structure is not None and local is not None
    assert {one.layer for one in structure.misplaced} == {12, 20}
    assert structure.shift_error_keys is not None and structure.shift_error_keys < 0.01
    share_L = local.layer_share_L
    assert sorted(range(len(share_L)), key=share_L.__getitem__)[:2] in ([12, 20], [20, 12])


def _prepared(name: str) -> Path:
    try:
        return locate_model(f"quickstart:{name}")
    except ModelError as error:
        pytest.skip(f"the quickstart pair is not prepared: {error}")
