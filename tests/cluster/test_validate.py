from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import IMPORT_PATH
from cluster.validate import Finding, validate
from mappers.geometry import rope_spec
from mappers.manifest import DataRecord, LayerR2, MapperManifest, ModelFingerprint, Ridge

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 16_384,
    "rope_theta": 1_000_000.0,
}
VOCABULARY = {"a": 0, "b": 1, "ab": 2}


def write_model(folder: Path, vocabulary: dict[str, int] = VOCABULARY, **changes: Any) -> Path:
    """A model folder without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL | changes))
    tokenizer = {"model": {"vocab": vocabulary, "merges": ["a b"]}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


class Pair:
    """Two model folders and the Serve config that names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.small: dict[str, Any] = {"name": "s", "source": str(folder / "small")}
        self.large: dict[str, Any] = {"name": "l", "source": str(folder / "large")}
        self.mapper: dict[str, Any] = {"small_to_large": str(folder / "mapper")}
        self.deployments: list[dict[str, Any]] = [{"name": "mapper", "num_replicas": 1}]

    def findings(self, **top_level: Any) -> list[Finding]:
        application = {
            "name": "cascade",
            "route_prefix": "/",
            "import_path": IMPORT_PATH,
            "args": {"small": self.small, "large": self.large, "mapper": self.mapper},
            "deployments": self.deployments,
        }
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump({"applications": [application]} | top_level))
        return validate(path)

    def problems(self, **top_level: Any) -> list[str]:
        found = self.findings(**top_level)
        return [f"{one.key}: {one.text}" for one in found if one.level == "problem"]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    write_model(tmp_path / "small")
    write_model(tmp_path / "large", num_hidden_layers=6)
    return Pair(tmp_path)


def test_a_good_pair_without_a_mapper_has_one_open_check(pair: Pair) -> None:
    findings = pair.findings()
    assert [one.key for one in findings if one.level != "ok"] == ["mapper.small_to_large"]
    texts = [one.text for one in findings]
    assert "KV heads: 4 and 4" in texts
    assert "both read and write the same tokens" in texts


def test_a_sliding_window_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "small", layer_types=["sliding_attention", "full_attention"] * 2)
    write_model(tmp_path / "large")
    (problem,) = Pair(tmp_path).problems()
    assert problem.startswith("small.source: layer_types sliding_attention are not supported")


def test_tensor_parallelism_must_divide_the_kv_heads(pair: Pair) -> None:
    pair.large["tensor_parallel_size"] = 8
    (problem,) = pair.problems()
    assert problem.startswith(
        "large.tensor_parallel_size: 8 does not divide the model's 4 KV heads"
    )
    pair.large["tensor_parallel_size"] = 4
    assert pair.problems() == []


def test_the_context_is_bounded_by_the_models_positions(pair: Pair) -> None:
    pair.large["max_model_len_tokens"] = 16_385
    assert pair.problems() == [
        "large.max_model_len_tokens: 16385 exceeds the model's 16384 positions; lower it"
    ]


def test_yarn_raises_the_bound_by_its_factor(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16_384}
    write_model(tmp_path / "small")
    write_model(tmp_path / "large", rope_scaling=yarn)
    pair = Pair(tmp_path)
    pair.large["max_model_len_tokens"] = 65_536
    assert pair.problems() == []


def test_a_large_model_with_less_context_than_the_small_one_is_a_problem(pair: Pair) -> None:
    pair.small["max_model_len_tokens"] = 8_193
    (problem,) = pair.problems()
    assert problem.startswith("large.max_model_len_tokens: 8192 is less than")


def test_other_token_ids_are_a_problem(tmp_path: Path) -> None:
    write_model(tmp_path / "small")
    write_model(tmp_path / "large", vocabulary={"a": 0, "b": 2, "ab": 1})
    (problem,) = Pair(tmp_path).problems()
    assert "2 of 3 tokens have other ids" in problem


def test_a_tokenizer_written_in_another_style_is_the_same(pair: Pair) -> None:
    path = pair.folder / "large" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = [["a", "b"]]
    path.write_text(json.dumps(content, indent=2))
    assert pair.problems() == []


def test_identity_needs_one_model_twice(pair: Pair) -> None:
    pair.mapper["small_to_large"] = "identity"
    (problem,) = pair.problems()
    assert "`identity` needs one model twice" in problem
    pair.large["source"] = pair.small["source"]
    assert pair.problems() == []


def write_manifest(pair: Pair, **large_changes: Any) -> None:
    folder = Path(pair.mapper["small_to_large"])
    folder.mkdir()

    def fingerprint(layers: int, **changes: Any) -> ModelFingerprint:
        values = {
            "model_type": "qwen3",
            "weights_sha256": "w",
            "tokenizer_sha256": "t",
            "template_sha256": None,
            "layers": layers,
            "kv_heads": 4,
            "head_dim": 16,
            "hidden_size": 64,
            "max_position": 16_384,
            "rope": rope_spec(MODEL),
        }
        return ModelFingerprint(**(values | changes))

    data = DataRecord(tokens=1, texts=1, sequence_tokens=1, sha256="d")
    manifest = MapperManifest(
        source=fingerprint(4),
        target=fingerprint(6, **large_changes),
        support="full",
        k=1,
        source_layers=((0,),) * 6,
        ridge=Ridge(),
        first_token_weight=1,
        calibration=data,
        heldout=data,
        heldout_r2=LayerR2(k=(1.0,), v=(1.0,)),
        score=None,
        weights_sha256="m",
        created_by="a test",
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())


def test_a_mapper_is_compared_with_both_models(pair: Pair) -> None:
    write_manifest(pair)
    assert pair.problems() == []
    open_checks = [one.text for one in pair.findings() if one.level == "unchecked"]
    assert len(open_checks) == 2
    assert "its weights are not here" in open_checks[1]


def test_a_mapper_for_another_model_is_refused_by_the_field(pair: Pair) -> None:
    write_manifest(pair, kv_heads=8)
    (problem,) = pair.problems()
    assert problem.startswith("mapper.small_to_large: target.kv_heads differs")


def test_auto_says_where_the_mapper_goes_and_why(pair: Pair) -> None:
    pair.mapper["place"] = "auto"
    (found,) = [one for one in pair.findings() if one.key == "mapper.place"]
    # 4 and 6 layers, keys and values, 4 KV heads of 16 elements of bf16.
    assert (found.level, found.text) == (
        "ok",
        "`auto` puts it beside the large model: 1,024 B of KV per token cross the network, not "
        "1,536 B",
    )
    pair.mapper["links"] = str(pair.folder / "links.json")
    (problem,) = pair.problems()
    assert problem.startswith("mapper.links: ") and "make it with `kvcascade links`" in problem


def test_keys_that_ray_serve_would_ignore_are_problems(pair: Pair) -> None:
    pair.deployments = [{"name": "mapper", "num_replica": 2}, {"name": "mappers"}]
    assert pair.problems(http_option={}) == [
        "http_option: Ray Serve knows no such key; correct its spelling",
        "applications.0.deployments.0.num_replica: Ray Serve knows no such key; "
        "correct its spelling",
        "applications.0.deployments.1.name: 'mappers' is no deployment; they are "
        "router, small, large, mapper, mapper_back, sessions",
    ]


def test_a_value_that_ray_serve_refuses_is_a_problem(pair: Pair) -> None:
    pair.deployments = [{"name": "mapper", "num_replicas": -1}]
    (problem,) = pair.problems()
    assert problem.startswith("applications.0.deployments.0.num_replicas: ")


def test_a_wrong_key_of_the_arguments_ends_the_checks(pair: Pair) -> None:
    pair.small["nam"] = pair.small.pop("name")
    assert [finding.level for finding in pair.findings()] == ["problem", "problem"]


@pytest.mark.parametrize(
    ("source", "level", "text"),
    [
        ("./nowhere", "unchecked", "no such folder on this machine"),
        ("qwen", "problem", "is no folder and no Hugging Face repository"),
        ("quickstart:medium", "problem", "there are only quickstart:small and quickstart:large"),
    ],
)
def test_a_source_that_is_not_found_is_reported(
    pair: Pair, source: str, level: str, text: str
) -> None:
    pair.small["source"] = source
    (finding,) = [one for one in pair.findings() if one.key == "small.source"]
    assert finding.level == level
    assert text in finding.text
