"""Tiny random Llama pairs on disk, with one word-level tokenizer, for the mappers' tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from mappers.fingerprint import ModelFingerprint
from mappers.geometry import RopeSpec, RopeType

VOCABULARY = 64


def rope(rope_type: RopeType = "default", head_dim: int = 16) -> RopeSpec:
    """A RoPE like those of Llama 2, Llama 3.1 and Qwen3 with YaRN."""
    scaling: dict[str, dict[str, Any]] = {
        "default": {},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    }
    return RopeSpec(
        rope_type=rope_type,
        rope_theta=500_000.0,
        head_dim=head_dim,
        max_position=131_072,
        **scaling[rope_type],
    )


def print_of(layers: int, kv_heads: int, head_dim: int = 16, **changes: Any) -> ModelFingerprint:
    """A made-up fingerprint of the given geometry."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "weights_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "template_sha256": None,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": 64,
        "max_position": 131_072,
        "rope": rope(head_dim=head_dim),
    }
    return ModelFingerprint(**(values | changes))


def write_model(folder: Path, *, layers: int, kv_heads: int = 2, seed: int = 0) -> Path:
    """A random Llama of hidden size 64 with a tokenizer of 60 words, as an HF folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    folder.mkdir(parents=True)
    save_file(
        {name: t.contiguous() for name, t in model.state_dict().items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    words = ["<unk>", "<s>", "</s>"] + [f"w{i}" for i in range(VOCABULARY - 3)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )
    return folder


def sentences(count: int, seed: int) -> list[str]:
    """Texts of 100 random words each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY - 3, (count, 100), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in row) for row in ids]
