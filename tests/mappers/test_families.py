"""Every supported family caches keys as the mappers believe, and all else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cluster.errors import MapperError
from mappers.capture import cache_to_kv
from mappers.families import FAMILIES, require_plain_cache
from mappers.fingerprint import fingerprint
from mappers.geometry import kv_geometry, read_config, rope_spec
from mappers.rope import Rope
from tests.mappers.tiny import write_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """A `config.json` of a family, grouped queries where it has them."""
    family = FAMILIES[model_type]
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 24 if "head_dim" in family.explicit else 16,
        "max_position_embeddings": 131_072,
        family.theta_key: 500_000.0,
    }
    if model_type != "gpt_neox":
        config["num_key_value_heads"] = 2
    if "sliding_window" in family.explicit:
        config["sliding_window"] = None
    return config | changes


def resolved(config: dict[str, Any]) -> Any:
    """What transformers makes of a config, with the sizes that have no say in attention cut."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = CONFIG_MAPPING[config["model_type"]]
    return made(**{k: v for k, v in (sizes | config).items() if k != "model_type"})


def read(config: dict[str, Any]) -> tuple[Any, Any]:
    return kv_geometry(config), rope_spec(config)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim", "sliding_window"])
def test_a_key_that_is_left_out_is_refused_or_read_as_transformers_reads_it(
    model_type: str, key: str
) -> None:
    config = tiny(model_type)
    assert read(config) == read(resolved(config).to_dict())
    config.pop(key, None)
    if key in FAMILIES[model_type].explicit:
        with pytest.raises(MapperError, match=f"{key} is missing"):
            rope_spec(config)
    else:
        assert read(config) == read(resolved(config).to_dict())


def scaled(model_type: str) -> list[dict[str, Any]]:
    """Configs of a family: its default RoPE, and YaRN where it has it, on a part if it can."""
    family = FAMILIES[model_type]
    configs = [tiny(model_type)]
    if "yarn" in family.rope_types:
        configs.append(tiny(model_type, rope_parameters=YARN | {"rope_theta": 1e6}))
    if family.partial is not None:
        configs.append(tiny(model_type, **{family.partial_key: 0.75}))
    return configs


def keys_of_one_token(config: dict[str, Any], position: int) -> torch.Tensor:
    """Cached keys [L, 1, 1, H, D] of one token alone, from a model of always the same weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(resolved(config)).eval()
    output = model.base_model(
        input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[position]]), use_cache=True
    )
    return cache_to_kv(output.cache)[0]


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_one_token_alone_has_the_same_stripped_keys_wherever_it_stands(model_type: str) -> None:
    """It sees only itself, so rotation and scaling are all that change its keys, in every layer."""
    expected = keys_of_one_token(tiny(model_type), 0)
    size = expected.abs().amax(dim=(1, 2, 3, 4))
    for config in scaled(model_type):
        turn, geometry = Rope(rope_spec(config)), kv_geometry(config)
        assert expected.shape == (geometry.layers, 1, 1, geometry.kv_heads, geometry.head_dim)
        for position in (0, 1, 8_191, 131_071):
            k_LBTHD = keys_of_one_token(config, position)
            free_LBTHD = turn.strip(k_LBTHD, torch.tensor([position]))
            off = (free_LBTHD - expected).abs().amax(dim=(1, 2, 3, 4))
            assert (off < 1e-6 * size).all(), (config, position)
            moved = (k_LBTHD - expected).abs().amax(dim=(1, 2, 3, 4))
            assert position == 0 or (moved > 1e-3 * size).all()
            assert torch.equal(
                k_LBTHD[..., turn.spec.rotary_dim :], expected[..., turn.spec.rotary_dim :]
            )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "smollm3"}, "no_rope_layers"),
        ({"model_type": "cohere"}, "neighbouring elements"),
        ({"model_type": "a_new_one"}, "a_new_one.*has not been examined"),
        ({"model_type": None}, "model_type None"),
        ({"no_rope_layers": [1, 1, 0, 1]}, "no_rope_layers"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type"),
        ({"hybrid_override_pattern": "M*-"}, "hybrid_override_pattern"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        # Only Qwen can switch a window off.
        ({"sliding_window": 4096, "use_sliding_window": False}, "sliding_window 4096"),
    ],
)
def test_other_attention_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(MapperError, match=named):
        rope_spec(tiny("llama") | changes)


def test_keys_of_other_attention_that_are_off_do_not_refuse() -> None:
    config = tiny("llama", kv_lora_rank=None, num_kv_shared_layers=0, layer_types=None)
    assert rope_spec(config) == rope_spec(tiny("llama"))


def test_a_window_that_qwen_switches_on_is_refused() -> None:
    config = tiny("qwen2", sliding_window=4096)
    assert rope_spec(config) == rope_spec(tiny("qwen2"))
    with pytest.raises(MapperError, match="sliding_window 4096"):
        rope_spec(config | {"use_sliding_window": True})


FP8 = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}, "kv_cache_scheme"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "quantization.kv_cache_quant_algo"),
        ({"export": {"kv_cache_group": ["*k_proj"]}}, "export.kv_cache_group"),
    ],
)
def test_a_quantised_cache_is_refused_by_its_key(quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(MapperError, match=rf"quantization_config\.{named} quantises"):
        rope_spec(tiny("llama", quantization_config=quantization))


def test_quantised_weights_alone_are_accepted() -> None:
    require_plain_cache({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}})
    require_plain_cache({"quantization_config": {"export": {"kv_cache_group": []}}})
    require_plain_cache({"quantization_config": None})


def test_a_model_folder_with_a_quantised_cache_has_no_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=1)
    plain = fingerprint(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    beside = folder / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    with pytest.raises(MapperError, match="kv_cache_quant_algo"):
        fingerprint(folder)
    beside.unlink()
    # A multimodal checkpoint says it beside its text model's config.
    wrapper = {"model_type": "llava", "text_config": config}
    path.write_text(json.dumps(wrapper))
    assert fingerprint(folder) == plain
    path.write_text(json.dumps(wrapper | {"quantization_config": {"kv_cache_scheme": FP8}}))
    with pytest.raises(MapperError, match="kv_cache_scheme"):
        fingerprint(folder)
    assert read_config(folder)["model_type"] == "llama"
