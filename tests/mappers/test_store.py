"""Fingerprints, manifests and mapper folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import MapperError, MapperMismatch
from mappers.fingerprint import fingerprint
from mappers.judging.records import ScoreReport
from mappers.manifest import (
    DataRecord,
    LayerR2,
    MapperManifest,
    Ridge,
    read_manifest,
)
from mappers.mapper import IdentityMapper, LinearMapper, LinearWeights
from mappers.store import load_mapper, mapper_id, save_mapper
from tests.mappers.tiny import print_of, rope, write_model

SOURCE, TARGET = print_of(2, 2), print_of(3, 2, weights_sha256="c" * 64)


def saved(folder: Path, **changes: Any) -> MapperManifest:
    generator = torch.Generator().manual_seed(0)

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16().float()

    weights = LinearWeights(
        ((0,), (1,), (1,)),
        tensor(3, 1, 32, 32),
        tensor(3, 1, 32),
        tensor(3, 1, 32, 32),
        tensor(3, 1, 32),
    )
    data = DataRecord(tokens=10, texts=1, sequence_tokens=5, sha256="d" * 64)
    values: dict[str, Any] = {
        "source": SOURCE,
        "target": TARGET,
        "support": "full",
        "k": 1,
        "source_layers": weights.source_layers,
        "ridge": Ridge(),
        "first_token_weight": 1,
        "calibration": data,
        "heldout": data,
        "heldout_r2": LayerR2(k=(0.5, 0.6, 0.7), v=(0.1, 0.2, 0.3)),
        "score": None,
        "weights_sha256": "",
        "created_by": "test",
    }
    return save_mapper(folder, weights, MapperManifest(**(values | changes)))


def test_a_saved_mapper_loads_and_maps_the_same(tmp_path: Path) -> None:
    manifest = saved(tmp_path / "m")
    assert read_manifest(tmp_path / "m") == manifest
    mapper = load_mapper(
        tmp_path / "m", SOURCE, TARGET, compute_dtype=torch.float32, dtype=torch.float32
    )
    assert isinstance(mapper, LinearMapper)
    v_STHD = torch.ones(2, 1, 2, 16)
    _, v_LTHD = mapper.apply(v_STHD, v_STHD, 0)
    tensors = load_file(tmp_path / "m" / "mapper.safetensors")
    assert tensors["v_weight_LGFO"].dtype == torch.bfloat16
    expected = tensors["v_weight_LGFO"].float().sum(2) + tensors["v_bias_LGO"]
    torch.testing.assert_close(v_LTHD.reshape(3, 1, 32), expected)


@pytest.mark.parametrize(
    ("role", "changes", "named"),
    [
        ("source", {"weights_sha256": "e" * 64}, r"source\.weights_sha256 .*aaaaaaaaaaaa….*eeee"),
        ("target", {"tokenizer_sha256": "e" * 64}, r"target\.tokenizer_sha256"),
        ("target", {"template_sha256": "f" * 64}, r"target\.template_sha256 .*None.*ffff"),
        ("source", {"kv_heads": 4}, r"source\.kv_heads .* 2, .* 4;.*kvcascade fit"),
        ("target", {"rope": rope("llama3")}, r"target\.rope\.rope_type .*default.*llama3"),
    ],
)
def test_a_mapper_for_another_model_is_refused_by_field(
    tmp_path: Path, role: str, changes: dict[str, Any], named: str
) -> None:
    saved(tmp_path / "m")
    running = {"source": SOURCE, "target": TARGET}
    running[role] = running[role].model_copy(update=changes)
    with pytest.raises(MapperMismatch, match=named):
        load_mapper(tmp_path / "m", **running)


def test_identity_needs_the_same_weights_on_both_sides() -> None:
    assert isinstance(load_mapper("identity", SOURCE, SOURCE), IdentityMapper)
    other = SOURCE.model_copy(update={"weights_sha256": "e" * 64})
    with pytest.raises(MapperMismatch, match="weights_sha256"):
        load_mapper("identity", SOURCE, other)


def test_mapper_id_changes_with_manifest_and_with_weights(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    saved(tmp_path / "b")
    saved(tmp_path / "c", ridge=Ridge(value=0.5))
    assert mapper_id(tmp_path / "a") == mapper_id(tmp_path / "b") != mapper_id(tmp_path / "c")
    assert len(mapper_id(tmp_path / "a")) == 16
    assert mapper_id("identity") == "identity"


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    path = tmp_path / "m" / "mapper.safetensors"
    tensors = load_file(path)
    tensors["k_bias_LGO"][0, 0, 0] += 1
    save_file(tensors, path)
    with pytest.raises(MapperError, match="does not match its manifest"):
        load_mapper(tmp_path / "m", SOURCE, TARGET)


def test_a_refused_mapper_loads_only_on_request(tmp_path: Path) -> None:
    score = ScoreReport(
        rows=(),
        windows=1,
        prefix_tokens=2,
        scored_tokens=2,
        injection_exact=True,
        recovered_gap=0.1,
        verdict="refuse",
        reasons=("it recovers 10%",),
    )
    saved(tmp_path / "m", score=score)
    with pytest.raises(MapperError, match="judged unfit: it recovers 10%"):
        load_mapper(tmp_path / "m", SOURCE, TARGET)
    load_mapper(tmp_path / "m", SOURCE, TARGET, allow_refused=True)


def test_a_missing_or_malformed_manifest_says_so(tmp_path: Path) -> None:
    with pytest.raises(MapperError, match="kvcascade fit"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 2}')
    with pytest.raises(MapperError, match="version"):
        read_manifest(tmp_path)


def test_saving_replaces_a_mapper_but_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path / "m")
    saved(tmp_path / "m", ridge=Ridge(value=0.5))
    assert read_manifest(tmp_path / "m").ridge.value == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(MapperError, match="not a mapper folder"):
        saved(tmp_path / "m")
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine"


def test_fingerprint_sees_weights_tokenizer_and_template(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=2)
    before = fingerprint(folder)
    assert (before.layers, before.kv_heads, before.head_dim) == (2, 2, 16)
    assert before.template_sha256 is None and before.rope.rope_theta == 10_000.0
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert fingerprint(folder).template_sha256 is not None
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][-1] += 1
    save_file(tensors, folder / "model.safetensors")
    after = fingerprint(folder)
    assert after.weights_sha256 != before.weights_sha256
    assert after.tokenizer_sha256 == before.tokenizer_sha256


def test_weight_hash_does_not_depend_on_the_cut_into_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=1)
    before = fingerprint(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors").unlink()
    with pytest.raises(MapperError, match="as safetensors"):
        fingerprint(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert fingerprint(folder) == before
