"""Rotation agrees with transformers and its inverse undoes it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mappers.geometry import RopeType
from mappers.rope import Rope
from tests.mappers.tiny import rope

TYPES: list[RopeType] = ["default", "llama3", "yarn"]


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize("position", [0, 1, 8_191, 131_071])
def test_strip_undoes_apply(rope_type: RopeType, position: int) -> None:
    turn = Rope(rope(rope_type))
    k_LTHD = torch.randn(3, 1, 2, 16, generator=torch.Generator().manual_seed(0)) * 10
    positions = turn.positions(position, 1)
    back_LTHD = turn.strip(turn.apply(k_LTHD, positions), positions)
    assert (back_LTHD - k_LTHD).abs().max() < 1e-4


@pytest.mark.parametrize("rope_type", TYPES)
def test_apply_is_the_rotation_of_transformers(rope_type: RopeType) -> None:
    spec = rope(rope_type)
    config = LlamaConfig(
        head_dim=16,
        max_position_embeddings=spec.max_position,
        rope_parameters=spec.parameters(),
    )
    k_BHTD = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(70_000, 70_005)
    cos, sin = LlamaRotaryEmbedding(config)(k_BHTD, positions[None])
    _, expected_BHTD = apply_rotary_pos_emb(k_BHTD, k_BHTD, cos, sin)
    actual_BTHD = Rope(spec).apply(k_BHTD.transpose(1, 2), positions)
    torch.testing.assert_close(actual_BTHD, expected_BHTD.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_yarn_scales_keys_once_and_strip_takes_it_back_once() -> None:
    turn = Rope(rope("yarn"))
    assert turn.attention_scaling == pytest.approx(1.1386, abs=1e-4)
    k_THD = torch.ones(1, 1, 16)
    at_zero = turn.positions(0, 1)
    assert turn.apply(k_THD, at_zero)[0, 0, 0].item() == pytest.approx(1.1386, abs=1e-4)
    assert turn.strip(k_THD, at_zero)[0, 0, 0].item() == pytest.approx(1 / 1.1386, abs=1e-4)
