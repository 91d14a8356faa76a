"""Model families whose KV cache the mappers can treat exactly, and what makes a model refused.

Every family here was compared with transformers 5.24 (`modeling_<model_type>.py`) and vLLM 0.29:
dense causal attention, one key and one value per token, layer and KV head, and a rotation of the
first part of each head by halves ("neox" style), after any normalisation or clipping of keys.
What a family does to queries alone is of no account. Free of torch; knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import MapperError


@dataclass(frozen=True, slots=True)
class Family:
    """How transformers reads the config of one model type.

    `partial` is the share of a head that is turned when the config does not say; None for a family
    that turns whole heads whatever its config says. `explicit` names keys for which transformers
    has a default that the others have not, so that a config without them would be misread.
    """

    explicit: tuple[str, ...] = ()
    partial: float | None = None
    rope_types: tuple[str, ...] = ("default", "llama3", "yarn")
    theta_key: str = "rope_theta"
    partial_key: str = "partial_rotary_factor"
    window_switch: bool = False


_KV_HEADS = "num_key_value_heads"

FAMILIES: dict[str, Family] = {
    "arcee": Family(),
    "glm4_moe": Family(explicit=(_KV_HEADS,), partial=0.5),
    "gpt_neox": Family(partial=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct"),
    "granite": Family(),
    "granitemoe": Family(),
    "llama": Family(),
    "mistral": Family(explicit=(_KV_HEADS, "sliding_window")),
    "mixtral": Family(explicit=(_KV_HEADS,)),
    "nemotron": Family(partial=0.5),
    "olmo": Family(),
    "olmo2": Family(),
    "olmoe": Family(),
    "phi": Family(partial=0.5),
    # transformers turns every scaled RoPE of Phi-3 into longrope.
    "phi3": Family(partial=1.0, rope_types=("default",)),
    "qwen2": Family(explicit=(_KV_HEADS,), window_switch=True),
    "qwen2_moe": Family(explicit=(_KV_HEADS,), window_switch=True),
    "qwen3": Family(explicit=(_KV_HEADS, "head_dim"), window_switch=True),
    "qwen3_moe": Family(explicit=(_KV_HEADS,), window_switch=True),
    "seed_oss": Family(explicit=(_KV_HEADS, "head_dim")),
    "stablelm": Family(explicit=(_KV_HEADS,), partial=0.25),
}

_INTERLEAVED = "it rotates neighbouring elements of a head, not halves"
_WINDOWS = "some of its layers attend to a sliding window"
_HYBRID = "some of its layers keep a recurrent state instead of a KV cache"
_LATENT = "it caches one compressed vector per token instead of keys and values"

# Of well-known families outside the list, the reason.
_REFUSED_TYPES: dict[str, str] = {
    "cohere": _INTERLEAVED,
    "cohere2": _INTERLEAVED,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "ernie4_5": _INTERLEAVED,
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "glm": _INTERLEAVED,
    "glm4": _INTERLEAVED,
    "gpt_oss": _WINDOWS,
    "ministral": _WINDOWS,
    "ministral3": "vLLM ignores mscale and llama_4_scaling_beta of its config.json",
    "olmo3": _WINDOWS,
    "phimoe": "its scaled RoPE depends on the length of the text",
    "qwen3_next": _HYBRID,
    "smollm3": "its no_rope_layers do not rotate keys",
}

# Keys that mean another kind of cache when they are set, whatever the family.
_REFUSED_KEYS: dict[str, str] = {
    "attention_chunk_size": "some layers attend to chunks",
    "attn_layer_period": _HYBRID,
    "block_types": _HYBRID,
    "dual_chunk_attention_config": "vLLM rotates keys by their position within a chunk",
    "full_attention_interval": _HYBRID,
    "full_attn_idxs": _HYBRID,
    "hybrid_override_pattern": _HYBRID,
    "kv_lora_rank": _LATENT,
    "layers_block_type": _HYBRID,
    "mamba_d_state": _HYBRID,
    "no_rope_layers": "some layers do not rotate keys",
    "num_kv_shared_layers": "some layers read the cache of others",
}


def require_supported(config: Mapping[str, Any]) -> Family:
    """The family of a model whose every layer has a plain, fully causal, rotated KV cache.

    Raises MapperError that names the key, or the model type, which says otherwise.
    """
    for key, reason in _REFUSED_KEYS.items():
        if config.get(key):
            raise MapperError(f"{key} in config.json is not supported: {reason}")
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise MapperError(f"layer_types {', '.join(other)} are not supported; only full_attention")
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        why = _REFUSED_TYPES.get(str(model_type), "it has not been examined")
        raise MapperError(
            f"model_type {model_type!r} is not supported: {why}; mappers know {', '.join(FAMILIES)}"
        )
    for key in family.explicit:
        if key not in config:
            raise MapperError(
                f"{key} is missing from config.json, and transformers then uses a default of "
                f"{model_type}; add it"
            )
    # A window may be written down though `use_sliding_window: false` switches it off.
    on = config.get("use_sliding_window", False) if family.window_switch else True
    if on and config.get("sliding_window"):
        raise MapperError(f"sliding_window {config['sliding_window']} is not supported")
    return family


def require_plain_cache(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that makes vLLM keep keys and values in fewer bits, with scales.

    Looks for any `kv_cache...` key in `quantization_config`, as compressed-tensors
    (`kv_cache_scheme`), ModelOpt (`kv_cache_quant_algo`) and Quark (`export.kv_cache_group`) write
    it. Quantised weights are no obstacle. Raises MapperError that names the key.
    """
    found = _find_kv_cache(config.get("quantization_config") or {}, "quantization_config")
    if found is not None:
        raise MapperError(
            f"{found} quantises the KV cache, which mappers cannot read; use a checkpoint without"
        )


def _find_kv_cache(values: Mapping[str, Any], path: str) -> str | None:
    for key, value in values.items():
        where = f"{path}.{key}"
        if key.startswith("kv_cache") and value:
            return where
        deeper = _find_kv_cache(value, where) if isinstance(value, Mapping) else None
        if deeper is not None:
            return deeper
    return None
