"""Checks that hold for every sound mapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from mappers.geometry import rope_spec
from mappers.judging.structure import turned
from mappers.rope import Rope

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (LlamaConfig(**SIZES), LlamaForCausalLM),
        (LlamaConfig(**SIZES, rope_parameters=YARN), LlamaForCausalLM),
        (GPTNeoXConfig(**SIZES), GPTNeoXForCausalLM),  # turns a quarter of every head
    ],
    ids=["default", "yarn", "partial"],
)
def test_keys_are_turned_as_the_model_turns_them(config: PreTrainedConfig, make: Any) -> None:
    model = make(config).eval()
    rope = Rope(rope_spec(config.to_dict()))
    generator = torch.Generator().manual_seed(0)
    free_LTHD = torch.randn(2, 8, 4, 16, generator=generator)
    here, there = rope.positions(0, 8), rope.positions(100, 8)
    moved = turned(model, rope.apply(free_LTHD, here), 100)
    torch.testing.assert_close(moved, rope.apply(free_LTHD, there), rtol=1e-4, atol=1e-4)
    assert (moved - rope.apply(free_LTHD, here)).abs().max() > 0.5
