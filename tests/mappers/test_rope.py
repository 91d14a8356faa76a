"""Rotation agrees with transformers and its inverse undoes it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen3Config, StableLmConfig
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.stablelm import modeling_stablelm as stablelm

from mappers.geometry import RopeSpec, RopeType
from mappers.rope import Rope
from tests.mappers.tiny import rope

TYPES: list[RopeType] = ["default", "llama3", "yarn"]
POSITIONS = torch.tensor([0, 1, 8_191, 70_000, 131_071])

# YaRN as Qwen3 has it, with a scale of its own, with DeepSeek's two, and with other ramps.
YARNS: list[dict[str, Any]] = [
    {},
    {"attention_factor": 0.9},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
]
SPECS = {name: rope(name) for name in TYPES} | {
    f"yarn {changes}": rope("yarn", head_dim=64).model_copy(update=changes) for changes in YARNS[1:]
}


def keys(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated_by(family: Any, embedding: Any, k_THD: Tensor, positions: Tensor) -> Tensor:
    """Keys as the family's own attention rotates them, with its own rotary module."""
    cos, sin = embedding(k_THD, positions[None])
    k_BHTD = k_THD.transpose(0, 1)[None]
    _, out_BHTD = family.apply_rotary_pos_emb(k_BHTD, k_BHTD, cos, sin)
    return torch.as_tensor(out_BHTD)[0].transpose(0, 1)


def assert_same_rotation(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit, which a fused multiply-add rounds once instead of twice."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=2**-23 * float(expected.abs().max()))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_strip_undoes_apply_at_every_position(spec: RopeSpec) -> None:
    turn = Rope(spec)
    k_LTHD = keys(3, len(POSITIONS), 2, spec.head_dim) * 10
    back_LTHD = turn.strip(turn.apply(k_LTHD, POSITIONS), POSITIONS)
    for index in range(len(POSITIONS)):
        off_LHD, k_LHD = (back_LTHD - k_LTHD)[:, index], k_LTHD[:, index]
        assert off_LHD.norm() < 3e-7 * k_LHD.norm()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_apply_is_the_rotation_of_llama(spec: RopeSpec) -> None:
    config = LlamaConfig(
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rope_parameters=spec.parameters(),
    )
    turn, embedding = Rope(spec), llama.LlamaRotaryEmbedding(config)
    assert turn.attention_scaling == embedding.attention_scaling
    k_THD = keys(len(POSITIONS), 2, spec.head_dim)
    # cos and sin of position p show in keys of ones and zeros, where nothing is rounded again.
    half = spec.head_dim // 2
    first_THD = torch.cat([torch.ones(5, 1, half), torch.zeros(5, 1, half)], dim=-1)
    assert torch.equal(
        turn.apply(first_THD, POSITIONS), rotated_by(llama, embedding, first_THD, POSITIONS)
    )
    assert_same_rotation(
        turn.apply(k_THD, POSITIONS), rotated_by(llama, embedding, k_THD, POSITIONS)
    )


def test_apply_is_the_rotation_of_qwen3_with_yarn() -> None:
    spec = rope("yarn", head_dim=128)
    config = Qwen3Config(
        head_dim=128, max_position_embeddings=131_072, rope_parameters=spec.parameters()
    )
    k_THD = keys(len(POSITIONS), 8, 128)
    expected = rotated_by(qwen3, qwen3.Qwen3RotaryEmbedding(config), k_THD, POSITIONS)
    assert_same_rotation(Rope(spec).apply(k_THD, POSITIONS), expected)


def partial_spec(**changes: Any) -> RopeSpec:
    """A quarter of 64 elements turned, as in Pythia and StableLM."""
    return rope(head_dim=64).model_copy(update={"partial_rotary_factor": 0.25} | changes)


PARTIAL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "max_position_embeddings": 131_072,
}


@pytest.mark.parametrize(
    "yarn", [{}, {"rope_type": "yarn", "factor": 4.0}], ids=["default", "yarn"]
)
def test_partial_rotation_is_that_of_gpt_neox_and_stablelm(yarn: dict[str, Any]) -> None:
    spec = partial_spec(original_max_position_embeddings=32_768 if yarn else None, **yarn)
    assert spec.rotary_dim == 16
    k_THD = keys(len(POSITIONS), 2, 64)
    actual = Rope(spec).apply(k_THD, POSITIONS)

    pythia = gpt_neox.GPTNeoXRotaryEmbedding(
        GPTNeoXConfig(rope_parameters=spec.parameters(), **PARTIAL)
    )
    assert_same_rotation(actual, rotated_by(gpt_neox, pythia, k_THD, POSITIONS))

    # StableLM's attention cuts the head itself.
    stable = stablelm.StableLmRotaryEmbedding(
        StableLmConfig(rope_parameters=spec.parameters(), **PARTIAL)
    )
    turned = rotated_by(stablelm, stable, k_THD[..., :16], POSITIONS)
    assert_same_rotation(actual, torch.cat([turned, k_THD[..., 16:]], dim=-1))
    assert torch.equal(actual[..., 16:], k_THD[..., 16:])

    back = Rope(spec).strip(actual, POSITIONS)
    assert (back - k_THD).norm() < 5e-7 * k_THD.norm()
    assert torch.equal(back[..., 16:], k_THD[..., 16:])


def test_partial_rotation_is_that_of_phi3() -> None:
    spec = partial_spec(partial_rotary_factor=0.75)
    embedding = phi3.Phi3RotaryEmbedding(
        Phi3Config(rope_parameters=spec.parameters(), pad_token_id=0, **PARTIAL)
    )
    k_THD = keys(len(POSITIONS), 2, 64)
    expected = rotated_by(phi3, embedding, k_THD, POSITIONS)
    assert_same_rotation(Rope(spec).apply(k_THD, POSITIONS), expected)


@pytest.mark.parametrize(
    ("yarn", "scale"), zip(YARNS, (1.1386, 0.9, 1.0648, 1.0, 1.1386), strict=True)
)
def test_yarn_scales_keys_once_and_strip_takes_it_back_once(
    yarn: dict[str, Any], scale: float
) -> None:
    turn = Rope(rope("yarn").model_copy(update=yarn))
    k_THD, at_zero = torch.ones(1, 1, 16), turn.positions(0, 1)
    once = turn.apply(k_THD, at_zero)
    assert once[0, 0, 0].item() == pytest.approx(scale, abs=1e-4)
    assert turn.strip(once, at_zero)[0, 0, 0].item() == pytest.approx(1.0, abs=1e-6)
    assert turn.strip(k_THD, at_zero)[0, 0, 0].item() == pytest.approx(1 / scale, abs=1e-4)
    # At any position lengths of keys grow by the scale, and shrink back.
    far = torch.tensor([131_071])
    length = float(turn.apply(k_THD, far).norm() / k_THD.norm())
    assert length == pytest.approx(scale, abs=1e-4)


@st.composite
def specs(draw: st.DrawFn) -> RopeSpec:
    """Any RoPE that the mappers accept."""
    head_dim = draw(st.sampled_from([16, 64, 80, 96, 128]))
    changes: dict[str, Any] = {
        "rope_theta": draw(st.floats(1e3, 1e8)),
        "partial_rotary_factor": draw(st.sampled_from([0.25, 0.5, 0.75, 1.0])),
    }
    rope_type = draw(st.sampled_from(TYPES))
    if rope_type != "default":
        changes["factor"] = draw(st.floats(1.0, 64.0))
    if rope_type == "yarn":
        changes["attention_factor"] = draw(st.none() | st.floats(0.5, 2.0))
    return rope(rope_type, head_dim).model_copy(update=changes)


@given(specs(), st.integers(0, 131_000), st.integers(1, 70), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_any_keys_come_back_from_any_rotation(
    spec: RopeSpec, start: int, tokens: int, seed: int
) -> None:
    turn = Rope(spec)
    positions, k_THD = turn.positions(start, tokens), keys(tokens, 2, spec.head_dim, seed=seed)
    back_THD = turn.strip(turn.apply(k_THD, positions), positions)
    assert (back_THD - k_THD).norm() < 1e-6 * k_THD.norm()
    forth_THD = turn.apply(turn.strip(k_THD, positions), positions)
    assert (forth_THD - k_THD).norm() < 1e-6 * k_THD.norm()


@given(specs(), st.integers(0, 131_000), st.lists(st.integers(1, 20), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_split_of_the_positions_gives_the_same_bytes(
    spec: RopeSpec, start: int, sizes: list[int]
) -> None:
    turn, tokens = Rope(spec), sum(sizes)
    k_LTHD = keys(2, tokens, 3, spec.head_dim)
    for operation in (turn.apply, turn.strip):
        whole = operation(k_LTHD, turn.positions(start, tokens))
        parts, begin = [], 0
        for size in sizes:
            part_LTHD = k_LTHD[:, begin : begin + size]
            parts.append(operation(part_LTHD, turn.positions(start + begin, size)))
            begin += size
        assert torch.equal(torch.cat(parts, dim=1), whole)


def turned_by_hand(k_D: Tensor, theta: float, position: int) -> Tensor:
    """A key turned pair by pair, as the definition of RoPE says, in float64."""
    half = len(k_D) // 2
    out = k_D.double().clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        a, b = float(k_D[i]), float(k_D[half + i])
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[half + i] = a * math.sin(angle) + b * math.cos(angle)
    return out.float()


@given(st.floats(1e3, 1e8), st.floats(1e3, 1e8), st.integers(0, 1_000))
@settings(max_examples=30, deadline=None)
def test_different_thetas_on_both_sides_have_one_position_free_key(
    source_theta: float, target_theta: float, position: int
) -> None:
    free_D, at = keys(16), torch.tensor([position])
    for theta in (source_theta, target_theta):
        turn = Rope(rope().model_copy(update={"rope_theta": theta}))
        cached_D = turned_by_hand(free_D, theta, position)
        stripped = turn.strip(cached_D.view(1, 1, 16), at).flatten()
        # Rounded to fp32, an angle of 1,000 rad is off by up to 6e-5.
        torch.testing.assert_close(stripped, free_D, rtol=0, atol=5e-4)
        applied = turn.apply(free_D.view(1, 1, 16), at).flatten()
        torch.testing.assert_close(applied, cached_D, rtol=0, atol=5e-4)
