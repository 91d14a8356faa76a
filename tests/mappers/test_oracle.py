"""Two models of which the true map is known: 2 KV heads to 4, with different RoPE on both sides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mappers.capture import cache_to_kv, kv_to_cache
from mappers.geometry import rope_spec
from mappers.mapper import LinearMapper, LinearWeights
from tests.mappers.tiny import print_of

TOKENS = 40
SOURCE_THETA, TARGET_THETA = 10_000.0, 1_000_000.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def model(kv_heads: int, theta: float, **scaling: Any) -> Any:
    """A Llama of one layer, whose keys depend on single tokens."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131_072,
        attention_bias=True,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    torch.manual_seed(kv_heads)
    made = LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


class Pair:
    """A model of 2 KV heads, and one of 4 whose keys and values are affine in the former's."""

    @torch.no_grad()
    def __init__(self, **scaling: Any) -> None:
        self.small, self.large = model(2, SOURCE_THETA), model(4, TARGET_THETA, **scaling)
        generator = torch.Generator().manual_seed(0)
        self.k_FO, self.v_FO = torch.randn(2, 32, 64, generator=generator) / 8
        self.k_bias_O, self.v_bias_O = torch.randn(2, 64, generator=generator)
        source, target = (one.model.layers[0].self_attn for one in (self.small, self.large))
        for name, weight_FO, bias_O in (
            ("k_proj", self.k_FO, self.k_bias_O),
            ("v_proj", self.v_FO, self.v_bias_O),
        ):
            ours, theirs = getattr(source, name), getattr(target, name)
            theirs.weight.copy_(weight_FO.T @ ours.weight)
            theirs.bias.copy_(ours.bias @ weight_FO + bias_O)
        self.large.model.embed_tokens.weight.copy_(self.small.model.embed_tokens.weight)
        norms = [one.model.layers[0].input_layernorm.weight for one in (self.large, self.small)]
        norms[0].copy_(norms[1])

    def mapper(self) -> LinearMapper:
        """The true map, as a mapper of support `full`."""
        weights = LinearWeights(
            ((0,),),
            self.k_FO[None, None],
            self.k_bias_O[None, None],
            self.v_FO[None, None],
            self.v_bias_O[None, None],
        )
        source = print_of(1, 2, rope=rope_spec(self.small.config.to_dict()))
        target = print_of(1, 4, rope=rope_spec(self.large.config.to_dict()))
        fp32 = torch.float32
        return LinearMapper(source, target, weights, compute_dtype=fp32, dtype=fp32)


@torch.no_grad()
def cache_of(made: Any, ids_T: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Keys and values [L, T, H, D] that a model caches for a text that begins at `start`."""
    positions = torch.arange(start, start + len(ids_T))
    output = made.model(input_ids=ids_T[None], position_ids=positions[None], use_cache=True)
    k_LBTHD, v_LBTHD = cache_to_kv(output.cache)
    return k_LBTHD[:, 0], v_LBTHD[:, 0]


@pytest.mark.parametrize("scaling", [{}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("start", [0, 1, 8_191, 131_031])
def test_the_true_map_gives_the_cache_of_the_model_with_twice_the_heads(
    start: int, scaling: dict[str, Any]
) -> None:
    pair = Pair(**scaling)
    ids_T = torch.randint(0, 64, (TOKENS,), generator=torch.Generator().manual_seed(1))
    mapped = pair.mapper().apply(*cache_of(pair.small, ids_T, start), start)
    for actual, expected in zip(mapped, cache_of(pair.large, ids_T, start), strict=True):
        assert actual.shape == (1, TOKENS, 4, 16)
        assert (actual - expected).norm() < 1e-6 * expected.norm()


@torch.no_grad()
def test_the_large_model_goes_on_from_a_mapped_cache_as_from_its_own() -> None:
    pair = Pair(**YARN)
    ids_T = torch.randint(0, 64, (TOKENS,), generator=torch.Generator().manual_seed(2))
    native = pair.large(input_ids=ids_T[None]).logits[0, -1]
    k_LTHD, v_LTHD = pair.mapper().apply(*cache_of(pair.small, ids_T[:-1], 0), 0)
    cache = kv_to_cache(k_LTHD[:, None], v_LTHD[:, None])
    went_on = pair.large(input_ids=ids_T[None, -1:], cache=cache).logits[0, -1]
    assert (went_on - native).norm() < 1e-5 * native.norm()


def test_one_token_is_mapped_as_the_formula_says() -> None:
    """Turn back by the source's theta, multiply, add, turn by the target's theta."""
    pair, position = Pair(), 77
    k_HD = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))

    def turn(k_HD: Tensor, theta: float, at: int) -> Tensor:
        out_HD = torch.empty_like(k_HD)
        for head, k_D in enumerate(k_HD):
            for i in range(8):
                cos, sin = (f(at * theta ** (-i / 8)) for f in (math.cos, math.sin))
                out_HD[head, i] = k_D[i] * cos - k_D[8 + i] * sin
                out_HD[head, 8 + i] = k_D[8 + i] * cos + k_D[i] * sin
        return out_HD

    free_F = turn(k_HD, SOURCE_THETA, -position).flatten()
    expected_HD = turn((free_F @ pair.k_FO + pair.k_bias_O).view(4, 16), TARGET_THETA, position)
    actual, _ = pair.mapper().apply(k_HD[None, None], k_HD[None, None], position)
    torch.testing.assert_close(actual[0, 0], expected_HD, rtol=1e-4, atol=1e-4)
