"""Reading geometry and RoPE from configs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from cluster.errors import MapperError
from mappers.geometry import KVGeometry, kv_geometry, rope_spec


def config(**changes: Any) -> dict[str, Any]:
    base = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2).to_dict()
    return base | changes


def test_geometry_derives_head_dim_and_counts_kv_heads() -> None:
    old = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    assert kv_geometry(old) == KVGeometry(layers=3, kv_heads=4, head_dim=16)
    assert kv_geometry(config(head_dim=32)).head_dim == 32


def test_transformers_4_and_5_forms_of_llama3_scaling_read_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = config(rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=131072)
    old.pop("rope_parameters")
    new = config(rope_parameters=scaling | {"rope_theta": 5e5}, max_position_embeddings=131072)
    assert rope_spec(old) == rope_spec(new)
    assert rope_spec(new).factor == 8.0 and rope_spec(new).rope_theta == 5e5


def test_qwen_window_that_is_switched_off_is_accepted() -> None:
    values = Qwen3Config(use_sliding_window=False, sliding_window=4096).to_dict()
    values["sliding_window"] = 4096
    assert rope_spec(values).rope_type == "default"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "mystery": 2}}, "mystery"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'factor'"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"model_type": "glm4"}, "glm4"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(MapperError, match=named):
        rope_spec(config(**changes))
