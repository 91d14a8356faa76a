"""Shape and rotary position embedding of a model's KV cache, read from its HF `config.json`.

Free of torch and transformers. Knows neither weights nor tokenizers. A RoPE that the mappers cannot
treat exactly is refused by name here; other kinds of attention and cache are in `families`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from cluster.errors import MapperError
from mappers.families import require_plain_cache, require_supported

RopeType = Literal["default", "llama3", "yarn"]

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

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.width * element_bytes


class RopeSpec(BaseModel):
    """All that decides the rotation of a key. Names follow transformers' `rope_parameters`.

    Only the first `rotary_dim` elements of each head are turned.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: RopeType
    rope_theta: float
    head_dim: int
    max_position: int
    partial_rotary_factor: float = 1.0
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

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are turned, rounded as transformers and vLLM do."""
        return int(self.head_dim * self.partial_rotary_factor)

    def parameters(self) -> dict[str, Any]:
        """The `rope_parameters` dictionary that transformers would hold for this spec."""
        return self.model_dump(exclude={"head_dim", "max_position"}, exclude_defaults=True)


def read_config(model_dir: Path) -> dict[str, Any]:
    """`config.json` of the text model in `model_dir`, with the whole model's `quantization_config`.

    As vLLM does, takes the latter from `hf_quant_config.json` when config.json has none.
    MapperError when the file is missing.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise MapperError(f"{path} is missing: give the folder of a downloaded HF model")
    config = cast(dict[str, Any], json.loads(path.read_text()))
    quantization = config.get("quantization_config")
    beside = model_dir / "hf_quant_config.json"
    if quantization is None and beside.is_file():
        quantization = json.loads(beside.read_text())
    text = cast(dict[str, Any], config.get("text_config", config))
    return text if quantization is None else text | {"quantization_config": quantization}


def kv_geometry(config: Mapping[str, Any]) -> KVGeometry:
    """Geometry from a config mapping (`config.json` or `PreTrainedConfig.to_dict()`)."""
    heads = _whole(config, "num_attention_heads")
    return KVGeometry(
        layers=_whole(config, "num_hidden_layers"),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or _whole(config, "hidden_size") // heads),
    )


def _whole(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise MapperError(f"{key} is missing from config.json; add it")
    return int(config[key])


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """RoPE of a config mapping, in transformers 4 (`rope_theta`, `rope_scaling`) or 5 form.

    Raises MapperError that names the model type, layer type, rope type or key that is unsupported;
    also for a quantised KV cache, and where vLLM would rotate otherwise than transformers.
    """
    family = require_supported(config)
    require_plain_cache(config)
    if config.get("rope_parameters") and config.get("rope_scaling"):
        raise MapperError("rope_parameters and rope_scaling are both in config.json; keep one")
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type not in family.rope_types:
        raise MapperError(
            f"rope_type {rope_type!r} is not supported for {config['model_type']}; mappers know "
            f"{', '.join(family.rope_types)}"
        )
    theta = parameters.pop("rope_theta", config.get(family.theta_key))
    if not theta:
        raise MapperError(
            f"{family.theta_key} is missing from config.json or 0; add it to rope_parameters"
        )
    partial = parameters.pop("partial_rotary_factor", config.get(family.partial_key))
    if partial is None:
        partial = family.partial or 1.0
    elif family.partial is None and partial != 1:
        raise MapperError(
            f"partial_rotary_factor {partial} is not supported for {config['model_type']}: "
            "transformers turns its whole heads"
        )
    for key in _REQUIRED[rope_type]:
        if parameters.get(key) is None:
            raise MapperError(f"rope_parameters of type {rope_type!r} lack {key!r}")
    known = {name for name, field in RopeSpec.model_fields.items() if not field.is_required()}
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise MapperError(f"rope_parameters {', '.join(unknown)} are not supported")
    spec = RopeSpec(
        rope_type=rope_type,
        rope_theta=float(theta),
        head_dim=kv_geometry(config).head_dim,
        max_position=_whole(config, "max_position_embeddings"),
        partial_rotary_factor=float(partial),
        **_scaling(rope_type, parameters, config),
    )
    if spec.rotary_dim < 2 or spec.rotary_dim % 2 or spec.rotary_dim > spec.head_dim:
        raise MapperError(
            f"partial_rotary_factor {spec.partial_rotary_factor} of head_dim {spec.head_dim} is "
            f"{spec.rotary_dim} elements, which cannot be turned in pairs"
        )
    return spec


def _scaling(
    rope_type: str, parameters: dict[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """What of `rope_parameters` a scaled RoPE needs, with the original length filled in."""
    if rope_type == "default":
        return {}
    key = "original_max_position_embeddings"
    original = parameters.get(key) or config["max_position_embeddings"]
    if config.get(key) not in (None, original):
        raise MapperError(
            f"{key} is {original} in rope_parameters but {config[key]} beside them; keep one"
        )
    if rope_type == "yarn":
        _require_engine_scaling(parameters)
    return parameters | {key: original}


def _require_engine_scaling(yarn: Mapping[str, Any]) -> None:
    """Refuse a YaRN whose keys vLLM scales otherwise than transformers, where mappers are fitted.

    vLLM 0.29 (`get_rope`) derives the scale from `factor` alone; transformers prefers
    `attention_factor`, then the quotient of `mscale` and `mscale_all_dim`.
    """
    engine = _yarn_scale(yarn["factor"], 1.0)
    scale, keys = engine, ""
    if yarn.get("attention_factor") is not None:
        scale, keys = float(yarn["attention_factor"]), "attention_factor"
    elif yarn.get("mscale") and yarn.get("mscale_all_dim"):
        over = _yarn_scale(yarn["factor"], yarn["mscale_all_dim"])
        scale, keys = _yarn_scale(yarn["factor"], yarn["mscale"]) / over, "mscale, mscale_all_dim"
    if not math.isclose(scale, engine, rel_tol=1e-6):
        raise MapperError(
            f"{keys} of rope_parameters scale keys by {scale:.4f}, but vLLM ignores them and "
            f"scales by {engine:.4f}; such a model is not supported"
        )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
