"""Shape and rotary position embedding of a model's KV cache, read from its HF `config.json`.

Free of torch and transformers. Knows neither weights nor tokenizers. Anything the mappers cannot
treat exactly (sliding windows, partial or interleaved rotation, other RoPE scalings) is refused by
name here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from cluster.errors import MapperError

RopeType = Literal["default", "llama3", "yarn"]

# Model families whose attention is dense and whose RoPE rotates halves of the head ("neox" style).
SUPPORTED_MODEL_TYPES = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one token's KV: `layers` x `kv_heads` x `head_dim`, for keys and for values."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of one token's keys in one layer."""
        return self.kv_heads * self.head_dim


class RopeSpec(BaseModel):
    """All that decides the rotation of a key. Names follow transformers' `rope_parameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: RopeType
    rope_theta: float
    head_dim: int
    max_position: int
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def parameters(self) -> dict[str, Any]:
        """The `rope_parameters` dictionary that transformers would hold for this spec."""
        return self.model_dump(exclude={"head_dim", "max_position"}, exclude_none=True)


def read_config(model_dir: Path) -> dict[str, Any]:
    """`config.json` of the text model in `model_dir`. MapperError when missing or unsupported."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise MapperError(f"{path} is missing: give the folder of a downloaded HF model")
    config = cast(dict[str, Any], json.loads(path.read_text()))
    return cast(dict[str, Any], config.get("text_config", config))


def kv_geometry(config: Mapping[str, Any]) -> KVGeometry:
    """Geometry from a config mapping (`config.json` or `PreTrainedConfig.to_dict()`)."""
    heads = int(config["num_attention_heads"])
    return KVGeometry(
        layers=int(config["num_hidden_layers"]),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
    )


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """RoPE of a config mapping, in transformers 4 (`rope_theta`, `rope_scaling`) or 5 form.

    Raises MapperError that names the model type, layer type, rope type or key that is unsupported.
    """
    _require_dense_neox_attention(config)
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type not in _REQUIRED:
        raise MapperError(
            f"rope_type {rope_type!r} is not supported; mappers know {', '.join(_REQUIRED)}"
        )
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise MapperError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    theta = parameters.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise MapperError("rope_theta is missing from config.json; add it to rope_parameters")
    for key in _REQUIRED[rope_type]:
        if parameters.get(key) is None:
            raise MapperError(f"rope_parameters of type {rope_type!r} lack {key!r}")
    unknown = sorted(set(parameters) - set(RopeSpec.model_fields))
    if unknown:
        raise MapperError(f"rope_parameters {', '.join(unknown)} are not supported")
    max_position = int(config["max_position_embeddings"])
    if rope_type == "default":
        parameters = {}
    else:
        parameters.setdefault("original_max_position_embeddings", max_position)
    return RopeSpec(
        rope_type=rope_type,
        rope_theta=float(theta),
        head_dim=kv_geometry(config).head_dim,
        max_position=max_position,
        **parameters,
    )


def _require_dense_neox_attention(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise MapperError(
            f"model_type {model_type!r} is not supported; mappers know "
            f"{', '.join(sorted(SUPPORTED_MODEL_TYPES))}"
        )
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise MapperError(f"layer_types {', '.join(other)} are not supported; only full_attention")
    # Qwen configs carry a window that `use_sliding_window: false` switches off.
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise MapperError(f"sliding_window {config['sliding_window']} is not supported")
