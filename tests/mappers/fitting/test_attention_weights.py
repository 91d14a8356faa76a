"""Attention weights: what is watched, how relevance is computed, and how far it may spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mappers.attention import Attended, watched_attention
from mappers.capture import cache_to_kv, load_model
from mappers.fitting.accumulate import PassState
from mappers.fitting.attention_weights import (
    RelevanceSums,
    blended,
    boundaries,
    grouped,
    kish_alpha,
    relevance,
    relevance_reference,
    softened,
)
from mappers.fitting.blocks import BlockSpec, PairMoments
from mappers.fitting.spool import Observed
from mappers.geometry import KVGeometry
from tests.mappers.tiny import write_model


def qkv(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two sequences of 20 tokens, 4 query heads on 2 KV heads."""
    generator = torch.Generator().manual_seed(seed)
    q_BQTD = torch.randn(2, 4, 20, 8, generator=generator)
    k_BHTD, v_BHTD = torch.randn(2, 2, 2, 20, 8, generator=generator)
    return q_BQTD, k_BHTD, v_BHTD


def llama(folder: Path) -> Any:
    return load_model(write_model(folder / "model", layers=2, seed=1), torch.float32, "cpu")


def qwen3(folder: Path) -> Any:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def gpt_neox(folder: Path) -> Any:
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, qwen3, gpt_neox])
@torch.inference_mode()
def test_a_watched_model_predicts_what_it_did_and_shows_its_cache(
    make: Any, tmp_path: Path
) -> None:
    model = make(tmp_path)
    ids_BT = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    plain = model(input_ids=ids_BT, use_cache=True)
    seen: list[Attended] = []
    with watched_attention(model, seen.append):
        watched = model(input_ids=ids_BT, use_cache=True)
    assert torch.equal(plain.logits, watched.logits)
    assert len(seen) == 2 and model.config._attn_implementation == "sdpa"
    k_LBTHD, v_LBTHD = cache_to_kv(plain.cache)
    for layer, one in enumerate(seen):
        assert torch.equal(one.k_BHPD.transpose(1, 2), k_LBTHD[layer])
        assert torch.equal(one.v_BHPD.transpose(1, 2), v_LBTHD[layer])
        assert one.scale == pytest.approx(one.q_BQTD.shape[-1] ** -0.5)
        # The first token sees nothing but itself.
        first_BHD = one.v_BHPD[:, :, 0]
        shared = one.q_BQTD.shape[1] // first_BHD.shape[1]
        torch.testing.assert_close(
            one.output_BTQD[:, 0], first_BHD.repeat_interleave(shared, dim=1)
        )


def test_boundaries_are_log_spaced_from_token_12_to_the_last() -> None:
    asked = boundaries(1_024)
    assert asked[0] == 12 and asked[-1] == 1_023 and len(asked) == 32
    ratios = [b / a for a, b in zip(asked, asked[1:], strict=False)]
    assert max(ratios[8:]) < 1.05 * min(ratios[8:])
    assert boundaries(16) == (12, 13, 14, 15) and boundaries(4) == (3,)


def test_relevance_equals_its_plain_reading() -> None:
    for fast, plain in zip(relevance(*qkv(), 0.35), relevance_reference(*qkv(), 0.35), strict=True):
        assert fast.shape == (2, 40)
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fast.unflatten(1, (2, 20)).mean(-1), torch.ones(2, 2))


def test_softened_relevance_keeps_its_order_and_mean_and_loses_its_peaks() -> None:
    for part in relevance(*qkv(), 0.35):
        assert torch.allclose(softened(part, 20, 1.0), part, rtol=1e-5)
        soft = softened(part, 20, 0.5)
        torch.testing.assert_close(soft.unflatten(1, (2, 20)).mean(-1), torch.ones(2, 2))
        by_sequence = part.unflatten(1, (2, 20)).argsort(stable=True)
        assert torch.equal(soft.unflatten(1, (2, 20)).argsort(stable=True), by_sequence)
        assert soft.max() < part.max()


def test_a_token_that_no_query_sees_has_no_relevance() -> None:
    q_BQTD, k_BHTD, v_BHTD = qkv()
    for part in relevance(q_BQTD, k_BHTD, v_BHTD, 0.35):
        assert torch.equal(part.unflatten(1, (2, 20))[..., -1], torch.zeros(2, 2))
    # A key that all queries shun matters to none of them.
    k_BHTD[:, :, 5] = -10_000 * q_BQTD.mean((1, 2), keepdim=True)[:, :, 0]
    q_BQTD = q_BQTD.mean((1, 2), keepdim=True).expand_as(q_BQTD)
    for part in relevance(q_BQTD, k_BHTD, v_BHTD, 0.35):
        assert part.unflatten(1, (2, 20))[..., 5].abs().max() < 1e-6


def test_relevance_of_values_ignores_values_and_that_of_keys_their_common_shift() -> None:
    q_BQTD, k_BHTD, v_BHTD = qkv()
    keys, values = relevance(q_BQTD, k_BHTD, v_BHTD, 0.35)
    moved_keys, moved_values = relevance(q_BQTD, k_BHTD, v_BHTD + 3.0, 0.35)
    torch.testing.assert_close(moved_keys, keys, rtol=1e-3, atol=1e-4)
    assert torch.equal(moved_values, values)
    scaled_keys, _ = relevance(q_BQTD, k_BHTD, 7 * v_BHTD, 0.35)
    torch.testing.assert_close(scaled_keys, keys, rtol=1e-4, atol=1e-5)


def kish(weight_N: torch.Tensor) -> float:
    return float(weight_N.sum() ** 2 / weight_N.square().sum())


@pytest.mark.parametrize("least", [40, 300, 790, 800])
def test_alpha_is_the_largest_that_keeps_the_effective_sample(least: int) -> None:
    generator = torch.Generator().manual_seed(0)
    r_N = torch.rand(800, generator=generator, dtype=torch.float64) ** 6
    r_N /= r_N.mean()
    square = r_N.square().sum()
    alpha = float(kish_alpha(square, 800, least))
    tried = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    kept = [float(a) for a in tried if kish(1 + a * (r_N - 1)) >= least]
    assert alpha == pytest.approx(max(kept), abs=2e-4)
    assert alpha == 1 or kish(1 + alpha * (r_N - 1)) == pytest.approx(least, rel=1e-9)


def test_sums_give_every_layer_and_group_its_alpha() -> None:
    generator = torch.Generator().manual_seed(0)
    r_LHN = torch.rand(3, 2, 500, generator=generator) ** 4
    r_LHN /= r_LHN.mean(-1, keepdim=True)
    sums, one, other = (RelevanceSums(3, 2) for _ in range(3))
    sums.add((r_LHN, r_LHN.flip(0)))
    one.add((r_LHN[..., :200], r_LHN.flip(0)[..., :200]))
    other.add((r_LHN[..., 200:], r_LHN.flip(0)[..., 200:]))
    one.merge(other.tensors())
    for groups in (1, 2):
        keys, values = sums.alphas(groups, 100)
        assert keys.shape == values.shape == (3, groups)
        torch.testing.assert_close(values, keys.flip(0))
        torch.testing.assert_close(one.alphas(groups, 100)[0], keys)
        weight_LGN = blended(grouped(r_LHN, groups).double(), keys)
        for row_N in weight_LGN.flatten(0, 1):
            assert kish(row_N) >= 200 * (1 - 1e-6)
            assert row_N.mean() == pytest.approx(1.0, abs=1e-5)


def test_weighted_moments_count_each_head_by_its_own_tokens() -> None:
    """Two sequences of three tokens; the first tokens count 5 times or more."""
    generator = torch.Generator().manual_seed(0)
    geometry = KVGeometry(1, 2, 2)
    x_NF, y_NO = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    r_LHN = torch.tensor([[[8.0, 0.5, 0.5, 2.0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]])
    alphas = torch.ones(1, 2), torch.full((1, 2), 0.5)
    specs = [BlockSpec((0,), (0,), group, 2) for group in range(2)]
    state = PassState(PairMoments(geometry, geometry, specs, specs))
    seen = Observed((x_NF, x_NF), (y_NO, y_NO), (r_LHN, r_LHN))
    state.add(seen, 3, first_token_weight=5, alphas=alphas)
    weights = {
        (0, 0): [8.0, 0.5, 0.5, 5.0, 0.5, 0.5],
        (0, 1): [5.0, 1.0, 1.0, 5.0, 1.0, 1.0],
        (1, 0): [5.0, 0.75, 0.75, 5.0, 0.75, 0.75],
        (1, 1): [5.0, 1.0, 1.0, 5.0, 1.0, 1.0],
    }
    for (at, head), weight in weights.items():
        part = (state.moments.k, state.moments.v)[at]
        weight_N = torch.tensor(weight, dtype=torch.float64)
        columns = slice(2 * head, 2 * head + 2)
        gram, count = part.gram((0,), 0, head, 2)
        assert count == pytest.approx(sum(weight))
        expected = torch.cov(x_NF[:, columns].T, correction=0, aweights=weight_N)
        torch.testing.assert_close(gram / count, expected)
        mean_y = part.cross((0,), (0,), head, 2).mean_y_O
        torch.testing.assert_close(mean_y, weight_N @ y_NO[:, columns] / weight_N.sum())
