"""Layer choice and ridge solution from moments."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import MapperError
from mappers.fitting.accumulate import solve_all
from mappers.fitting.blocks import PairMoments
from mappers.fitting.ridge import EquilibratedCholesky, StreamedR2, r2_L
from mappers.fitting.select import choose_layers, single_source_r2_SL
from mappers.geometry import KVGeometry
from mappers.manifest import LayerR2, Ridge, Support
from mappers.mapper import LinearWeights
from mappers.supports import feature_width, groups

TINY_RIDGE = Ridge(value=1e-10, relative=True)


def solve(
    moments: PairMoments, unseen: PairMoments, k: int, support: Support, ridge: Ridge
) -> tuple[LinearWeights, LayerR2]:
    """Weights from `moments`, and their R2 on `unseen` moments."""
    chosen = choose_layers(single_source_r2_SL(moments), k)
    keys, values = solve_all(moments, chosen, support, ridge)
    r2 = LayerR2(
        k=tuple(r2_L(unseen.k, keys, chosen).tolist()),
        v=tuple(r2_L(unseen.v, values, chosen).tolist()),
    )
    return LinearWeights(
        chosen, keys.weight_LGFO, keys.bias_LGO, values.weight_LGFO, values.bias_LGO
    ), r2


def linear_pair(
    source: KVGeometry, target: KVGeometry, tokens: int = 2_000, seed: int = 0
) -> tuple[PairMoments, torch.Tensor, torch.Tensor]:
    """Moments of a target whose layer l is an exact affine map of source layer l // 2."""
    generator = torch.Generator().manual_seed(0)
    weight_LFO = torch.randn(
        target.layers, source.width, target.width, generator=generator, dtype=torch.float64
    )
    bias_LO = torch.randn(target.layers, target.width, generator=generator, dtype=torch.float64)
    generator.manual_seed(seed)
    moments = PairMoments(source, target)
    for part in (moments.k, moments.v):
        x_NSw = torch.randn(
            tokens, source.layers, source.width, generator=generator, dtype=torch.float64
        )
        y_NLO = torch.stack(
            [
                x_NSw[:, layer // 2] @ weight_LFO[layer] + bias_LO[layer]
                for layer in range(target.layers)
            ],
            dim=1,
        )
        part.update(x_NSw.flatten(1), y_NLO.flatten(1))
    return moments, weight_LFO, bias_LO


@pytest.mark.parametrize("target_heads", [2, 4])
def test_an_exactly_linear_target_is_recovered(target_heads: int) -> None:
    source, target = KVGeometry(2, 2, 8), KVGeometry(4, target_heads, 8)
    moments, weight_LFO, bias_LO = linear_pair(source, target)
    unseen, _, _ = linear_pair(source, target, seed=1)
    weights, r2 = solve(moments, unseen, 1, "full", TINY_RIDGE)
    assert weights.source_layers == ((0,), (0,), (1,), (1,))
    assert (weights.k_weight_LGFO[:, 0] - weight_LFO).abs().max() < 1e-4
    assert (weights.v_bias_LGO[:, 0] - bias_LO).abs().max() < 1e-4
    assert min(r2.k + r2.v) > 1 - 1e-6


def test_head_local_reads_only_the_matching_head() -> None:
    source = target = KVGeometry(2, 2, 4)
    moments = PairMoments(source, target)
    x_NSHD = torch.randn(
        1_000, 2, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    y_NLHD = torch.stack([x_NSHD[:, 0] + 2 * x_NSHD[:, 1], -x_NSHD[:, 1]], dim=1)
    for part in (moments.k, moments.v):
        part.update(x_NSHD.flatten(1), y_NLHD.flatten(1))
    weights, r2 = solve(moments, moments, 2, "head_local", TINY_RIDGE)
    assert weights.k_weight_LGFO.shape == (2, 2, 8, 4)
    eye = torch.eye(4, dtype=torch.float64)
    for head in range(2):
        torch.testing.assert_close(
            weights.k_weight_LGFO[0, head], torch.cat([eye, 2 * eye]), rtol=0, atol=1e-6
        )
    assert min(r2.v) > 1 - 1e-6


def test_head_local_is_refused_between_unequal_head_counts() -> None:
    with pytest.raises(MapperError, match="source has 2 and the target 4"):
        groups("head_local", KVGeometry(2, 2, 8), KVGeometry(2, 4, 8))


def test_feature_width_counts_what_one_output_reads() -> None:
    geometry = KVGeometry(40, 8, 128)
    assert feature_width("full", 8, geometry, geometry) == 8_192
    assert feature_width("head_local", 8, geometry, geometry) == 1_024


def test_heldout_r2_from_moments_equals_r2_from_observations() -> None:
    source, target = KVGeometry(2, 2, 4), KVGeometry(2, 2, 4)
    generator = torch.Generator().manual_seed(0)

    def noisy(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        x_NF = torch.randn(tokens, 16, generator=generator, dtype=torch.float64) + 1
        noise_NO = torch.randn(tokens, 16, generator=generator, dtype=torch.float64)
        return x_NF, x_NF.flip(1) + noise_NO + 3

    fitted, unseen = PairMoments(source, target), PairMoments(source, target)
    x_NF, y_NO = noisy(300)
    for part in (fitted.k, fitted.v):
        part.update(x_NF, y_NO)
    x_NF, y_NO = noisy(100)
    for part in (unseen.k, unseen.v):
        part.update(x_NF, y_NO)
    weights, r2 = solve(fitted, unseen, 2, "full", Ridge())
    for layer in range(2):
        y_N8 = y_NO[:, layer * 8 : layer * 8 + 8]
        mapped_N8 = x_NF @ weights.k_weight_LGFO[layer, 0] + weights.k_bias_LGO[layer, 0]
        expected = 1 - (y_N8 - mapped_N8).square().sum() / (y_N8 - y_N8.mean(0)).square().sum()
        assert r2.k[layer] == pytest.approx(float(expected), abs=1e-9)


@pytest.mark.parametrize("support", ["full", "head_local"])
def test_r2_streamed_over_observations_equals_r2_from_their_moments(support: Support) -> None:
    source, target = KVGeometry(3, 2, 4), KVGeometry(2, 2, 4)
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(300, 24, generator=generator, dtype=torch.float64) + 1
    y_NO = x_NF[:, :16].flip(1) + torch.randn(300, 16, generator=generator, dtype=torch.float64)
    moments = PairMoments(source, target)
    for part in (moments.k, moments.v):
        part.update(x_NF, y_NO)
    chosen = ((0, 2), (1, 2))
    fit, _ = solve_all(moments, chosen, support, Ridge())
    streamed = StreamedR2(source, target, fit, chosen)
    for rows in torch.arange(300).split(90):
        streamed.update(x_NF[rows], y_NO[rows])
    torch.testing.assert_close(streamed.r2_L(), r2_L(moments.k, fit, chosen))


def test_absolute_and_relative_ridge_shrink_a_known_slope() -> None:
    variance = torch.tensor([[4.0]], dtype=torch.float64)
    cross = torch.tensor([[4.0]], dtype=torch.float64)
    absolute = EquilibratedCholesky(variance, Ridge(value=1.0)).solve(cross)
    relative = EquilibratedCholesky(variance, Ridge(value=1.0, relative=True)).solve(cross)
    assert absolute.item() == pytest.approx(4 / 5)
    assert relative.item() == pytest.approx(4 / 8)


def test_features_of_very_different_scale_are_solved_accurately() -> None:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(500, 8, generator=generator, dtype=torch.float64)
    x_NF = x_NF * torch.logspace(-3, 3, 8, dtype=torch.float64)
    weight_FO = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    solved = EquilibratedCholesky(x_NF.T @ x_NF, Ridge(value=0.0)).solve(
        x_NF.T @ (x_NF @ weight_FO)
    )
    torch.testing.assert_close(solved, weight_FO, rtol=1e-6, atol=1e-6)


def test_dependent_features_without_ridge_are_refused() -> None:
    with pytest.raises(MapperError, match="linearly dependent"):
        EquilibratedCholesky(torch.ones(2, 2, dtype=torch.float64), Ridge(value=0.0))


def test_layer_scores_find_the_layer_that_explains_the_target() -> None:
    moments, _, _ = linear_pair(KVGeometry(3, 1, 8), KVGeometry(6, 1, 8))
    score_SL = single_source_r2_SL(moments)
    assert score_SL.argmax(0).tolist() == [0, 0, 1, 1, 2, 2]
    assert score_SL.max(0).values.min() > 0.999


def test_chosen_layers_come_in_ascending_order() -> None:
    score_SL = torch.tensor([[0.1, 0.9], [0.5, 0.2], [0.7, 0.3]])
    assert choose_layers(score_SL, 2) == ((1, 2), (0, 2))
    with pytest.raises(MapperError, match="3 layers, not 4"):
        choose_layers(score_SL, 4)
