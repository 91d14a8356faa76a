"""Reading geometry and RoPE from configs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from cluster.errors import MapperError
from mappers.geometry import KVGeometry, RopeSpec, kv_geometry, rope_spec

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**changes: Any) -> dict[str, Any]:
    base = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2).to_dict()
    return base | changes


def test_geometry_derives_head_dim_and_counts_kv_heads() -> None:
    old = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    assert kv_geometry(old) == KVGeometry(layers=3, kv_heads=4, head_dim=16)
    assert kv_geometry(config(head_dim=32)).head_dim == 32
    with pytest.raises(MapperError, match="num_hidden_layers is missing"):
        kv_geometry(config(num_hidden_layers=None))


def test_transformers_4_and_5_forms_of_llama3_scaling_read_the_same() -> None:
    old = config(rope_theta=5e5, rope_scaling=LLAMA3, max_position_embeddings=131072)
    old.pop("rope_parameters")
    new = config(rope_parameters=LLAMA3 | {"rope_theta": 5e5}, max_position_embeddings=131072)
    assert rope_spec(old) == rope_spec(new)
    assert rope_spec(new).factor == 8.0 and rope_spec(new).rope_theta == 5e5


def test_qwen_window_that_is_switched_off_is_accepted() -> None:
    values = Qwen3Config(use_sliding_window=False, sliding_window=4096).to_dict()
    values["sliding_window"] = 4096
    assert rope_spec(values).rope_type == "default"


def pythia(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model_type": "gpt_neox",
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 10_000,
        "rotary_pct": 0.25,
    }
    return values | changes


def test_partial_rotation_is_read_in_every_spelling() -> None:
    old = rope_spec(pythia())
    assert (old.rotary_dim, old.head_dim, old.rope_theta) == (16, 64, 10_000.0)
    new = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    assert rope_spec(pythia(rope_parameters=new, rotary_pct=None, rotary_emb_base=None)) == old
    glm = config(model_type="glm4_moe", head_dim=128, partial_rotary_factor=0.5)
    assert rope_spec(glm).rotary_dim == 64
    # Phi-2 turns 0.4 of 80 elements.
    assert (
        rope_spec(config(model_type="phi", head_dim=80, partial_rotary_factor=0.4)).rotary_dim == 32
    )


@pytest.mark.parametrize("share", [0.0, 0.02, 1 / 64 * 3, 1.5])
def test_a_share_of_a_head_that_has_no_pairs_is_refused(share: float) -> None:
    with pytest.raises(MapperError, match="turned in pairs"):
        rope_spec(pythia(rotary_pct=share))


def test_a_rope_stored_before_partial_rotation_reads_as_whole_heads() -> None:
    stored = {"rope_type": "default", "rope_theta": 1e4, "head_dim": 64, "max_position": 2048}
    spec = RopeSpec.model_validate(stored)
    assert spec.rotary_dim == 64
    assert spec.parameters() == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 1.1386294361119891},
        {"attention_factor": None, "mscale": 1.0},
        {"mscale": 0.0, "mscale_all_dim": 1.0},
        {"beta_fast": 16.0, "truncate": False, "original_max_position_embeddings": 512},
    ],
)
def test_yarn_that_both_engines_scale_alike_is_accepted(extra: dict[str, Any]) -> None:
    spec = rope_spec(config(rope_parameters=YARN | extra))
    assert spec.original_max_position_embeddings == extra.get(
        "original_max_position_embeddings", 2048
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "linear"),
        ({"model_type": "phi3", "rope_parameters": YARN}, "'yarn' is not supported for phi3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "mystery": 2}}, "mystery"),
        ({"rope_parameters": {"rope_theta": 1e4, "head_dim": 2}}, "head_dim"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'factor'"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta"),
        ({"rope_scaling": LLAMA3}, "rope_parameters and rope_scaling"),
        (
            {"rope_parameters": YARN | {"attention_factor": 0.9}},
            r"attention_factor .*0\.9000, .*1\.1386",
        ),
        (
            {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
            r"mscale, mscale_all_dim .*1\.0000, .*1\.1386",
        ),
        (
            {
                "rope_parameters": YARN | {"original_max_position_embeddings": 512},
                "original_max_position_embeddings": 1024,
            },
            "is 512 in rope_parameters but 1024",
        ),
        ({"model_type": "glm4"}, "glm4"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(MapperError, match=named):
        rope_spec(config(**changes))
