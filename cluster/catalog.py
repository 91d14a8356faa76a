"""Architecture numbers of models, from the catalog beside this file or from a `config.json`.

`catalog.json` holds the part of public configs that sizes and costs follow from, the pairs of
arXiv 2608.03893 with their number of source layers, and data-sheet numbers of GPUs. Reads no
weights and no tokenizer; loads nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from cluster.config import QUICKSTART
from cluster.errors import ConfigError, MapperError, ModelError
from cluster.model_files import locate_model
from mappers.geometry import KVGeometry, kv_geometry, read_config, rope_spec

_CATALOG = Path(__file__).with_name("catalog.json")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Model types whose MLP has an up and a down matrix but no gate.
_PLAIN_MLP = frozenset({"apertus", "arcee", "gpt_neox", "nemotron", "phi"})
_SHORT = {"small": f"{QUICKSTART}small", "large": f"{QUICKSTART}large"}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Architecture(_Frozen):
    """What sizes and costs of a decoder follow from.

    Of a mixture of experts, `experts` counts all of a layer and `active_experts` those that read
    one token; both are 1 for a dense model. An MLP has a third matrix when it is gated. `refusal`
    is why mappers cannot treat the model.
    """

    name: str
    layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    attention_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_tokens: PositiveInt
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    gated_mlp: bool
    experts: PositiveInt = 1
    active_experts: PositiveInt = 1
    shared_intermediate_size: NonNegativeInt = 0
    rope_type: str
    rope_theta: float | None
    refusal: str | None

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(self.layers, self.kv_heads, self.head_dim)

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> Architecture:
        """From the mapping of a `config.json`, with keys as transformers names them.

        Raises ModelError when a key is missing or the cache has no KV heads.
        """
        if config.get("kv_lora_rank"):
            raise ModelError(
                f"{name} caches latent vectors (kv_lora_rank), not KV heads; name a model whose "
                "attention has KV heads"
            )
        try:
            geometry = kv_geometry(config)
            kind = config.get("model_type")
            experts = next((int(config[key]) for key in _EXPERT_KEYS if config.get(key)), 1)
            expert_size = int(config.get("moe_intermediate_size") or 0) if experts > 1 else 0
            shared_size = int(config.get("shared_expert_intermediate_size") or 0)
            rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
            theta = rope.get("rope_theta", config.get("rope_theta"))
            return cls(
                name=name,
                layers=geometry.layers,
                hidden_size=config["hidden_size"],
                intermediate_size=expert_size or config["intermediate_size"],
                attention_heads=config["num_attention_heads"],
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                vocab_size=config["vocab_size"],
                max_position_tokens=config["max_position_embeddings"],
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                qk_norm=kind in ("qwen3", "qwen3_moe"),
                qkv_bias=kind in ("qwen2", "qwen2_moe"),
                gated_mlp=kind not in _PLAIN_MLP,
                experts=experts,
                active_experts=int(config["num_experts_per_tok"]) if experts > 1 else 1,
                shared_intermediate_size=shared_size
                or expert_size * int(config.get("n_shared_experts") or 0),
                rope_type=rope.get("rope_type") or rope.get("type") or "default",
                rope_theta=None if theta is None else float(theta),
                refusal=_refusal(config),
            )
        except KeyError as error:
            raise ModelError(
                f"config.json of {name} lacks {error}; name a decoder in transformers' format"
            ) from None
        except MapperError as error:
            raise ModelError(f"{name}: {error}") from None


class CatalogModel(_Frozen):
    """A public model. `config` is the part of its `config.json` that is used here."""

    repository: str
    aliases: tuple[str, ...]
    config: dict[str, Any]


class CatalogPair(_Frozen):
    """An ordered pair of arXiv 2608.03893; `k` source layers feed every target layer."""

    source: str
    target: str
    k: PositiveInt


class GpuModel(_Frozen):
    """Data-sheet numbers of one GPU: dense bf16 arithmetic, memory bandwidth and memory."""

    name: str
    tflops: PositiveFloat
    memory_gb_s: PositiveFloat
    memory_gb: PositiveFloat


class Catalog(_Frozen):
    models: tuple[CatalogModel, ...]
    pairs: tuple[CatalogPair, ...]
    gpus: tuple[GpuModel, ...]

    def model(self, name: str) -> CatalogModel | None:
        """The model with this repository id or alias in any case; None when there is none."""
        wanted = name.lower()
        for one in self.models:
            if wanted in (one.repository.lower(), *(alias.lower() for alias in one.aliases)):
                return one
        return None

    def paper_k(self, source: str, target: str) -> int | None:
        """Source layers per target layer that the paper settled on for this ordered pair."""
        for pair in self.pairs:
            if (pair.source, pair.target) == (source, target):
                return pair.k
        return None

    def gpu(self, name: str) -> GpuModel:
        """A GPU by its name in any case; ConfigError names those that are known."""
        for one in self.gpus:
            if one.name.lower() == name.lower():
                return one
        known = ", ".join(one.name for one in self.gpus)
        raise ConfigError(
            f"GPU {name!r} is not in the catalog ({known}); give --gpu-tflops and "
            "--gpu-memory-gb-s of yours"
        )


@cache
def catalog() -> Catalog:
    """The catalog that comes with this package."""
    return Catalog.model_validate_json(_CATALOG.read_text())


def architecture(source: str) -> Architecture:
    """Architecture of a local folder, a catalog name, a hub repository, or `small` or `large`.

    The hub is asked only about repositories that the catalog lacks, and for small files only.
    Raises ConfigError or ModelError that says what to name instead.
    """
    source = _SHORT.get(source, source)
    is_folder = Path(source).expanduser().is_dir()
    entry = None if is_folder else catalog().model(source)
    if entry is not None:
        return Architecture.from_config(entry.repository, entry.config)
    if not is_folder and "/" not in source and not source.startswith((QUICKSTART, ".", "~")):
        known = ", ".join(one.aliases[0] for one in catalog().models)
        raise ConfigError(
            f"{source!r} is not in the catalog ({known}); give one of these, a Hugging Face "
            "repository (`owner/name`), a model's folder, `small` or `large`"
        )
    try:
        config = read_config(locate_model(source))
    except MapperError as error:
        raise ModelError(str(error)) from None
    except json.JSONDecodeError as error:
        raise ModelError(f"config.json of {source} is no JSON ({error}); fetch it again") from None
    return Architecture.from_config(source, config)


def _refusal(config: Mapping[str, Any]) -> str | None:
    try:
        rope_spec(config)
    except MapperError as error:
        return str(error)
    return None
