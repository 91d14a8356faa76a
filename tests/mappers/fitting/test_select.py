"""Choosing source layers from moments: the paper's rule and forward selection."""

from __future__ import annotations

import itertools

import pytest
import torch

from cluster.errors import MapperError
from mappers.fitting.accumulate import solve_all
from mappers.fitting.blocks import BlockSpec, PairMoments
from mappers.fitting.ridge import r2_L
from mappers.fitting.select import choose_greedily, choose_layers, single_source_r2_SL
from mappers.geometry import KVGeometry
from mappers.manifest import Ridge

SOURCE, TARGET = KVGeometry(4, 2, 3), KVGeometry(2, 2, 5)


def redundant_pair() -> PairMoments:
    """Layers 0 and 1 say nearly the same, 2 little else than they leave open, 3 nothing."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    moments = PairMoments(SOURCE, TARGET)
    for part in (moments.k, moments.v):
        first, rest = noise(2_000, 2, 3), noise(2_000, 2, 3)
        layers = [first, first + 0.05 * noise(2_000, 2, 3), rest, noise(2_000, 2, 3)]
        mix = noise(2, 2, 2, 3, 5)
        y_NLHD = torch.einsum("nhd,lhde->nlhe", first, mix[0])
        y_NLHD = y_NLHD + 0.6 * torch.einsum("nhd,lhde->nlhe", rest, mix[1])
        part.update(torch.stack(layers, 1).flatten(1), y_NLHD.flatten(1))
    return moments


def test_forward_selection_passes_over_a_layer_that_repeats_another() -> None:
    moments = redundant_pair()
    assert choose_layers(single_source_r2_SL(moments), 2) == ((0, 1), (0, 1))
    assert choose_greedily(moments, 2) == ((0, 2), (0, 2))
    assert choose_greedily(moments, 2, [1]) == ((0, 2),)


def test_forward_selection_takes_the_step_that_a_full_search_would() -> None:
    generator = torch.Generator().manual_seed(3)
    moments = PairMoments(SOURCE, TARGET)
    for part in (moments.k, moments.v):
        x_NF = torch.randn(500, 24, generator=generator, dtype=torch.float64)
        x_NF = x_NF @ torch.randn(24, 24, generator=generator, dtype=torch.float64)
        mix = torch.randn(24, 20, generator=generator, dtype=torch.float64)
        part.update(x_NF, x_NF @ mix)

    def r2(layer: int, chosen: tuple[int, ...]) -> float:
        """Mean over heads, keys and values of head-matched OLS."""
        total = 0.0
        for part in (moments.k, moments.v):
            for head in range(2):
                gram, _ = part.gram(chosen, layer, head, 2)
                cross = part.cross(chosen, (layer,), head, 2)
                weight = torch.linalg.solve(gram, cross.xy_FO)
                total += float((weight * cross.xy_FO).sum() / cross.yy_O.sum()) / 4
        return total

    for k in (1, 2, 3):
        for layer, chosen in enumerate(choose_greedily(moments, k)):
            before = choose_greedily(moments, k - 1)[layer] if k > 1 else ()
            options = [tuple(sorted({*before, s})) for s in range(4) if s not in before]
            assert chosen == max(options, key=lambda option: r2(layer, option))


def test_all_layers_are_the_only_choice_of_four() -> None:
    moments = redundant_pair()
    everything = ((0, 1, 2, 3), (0, 1, 2, 3))
    assert choose_greedily(moments, 4) == choose_layers(torch.rand(4, 2), 4) == everything
    with pytest.raises(MapperError, match="4 layers, not 5"):
        choose_greedily(moments, 5)


def test_blocks_of_single_heads_score_as_the_block_of_everything() -> None:
    everything = redundant_pair()
    specs = [BlockSpec((0, 1, 2, 3), (0, 1), head, 2) for head in range(2)]
    heads = PairMoments(SOURCE, TARGET, specs, specs)
    generator = torch.Generator().manual_seed(1)
    x_NF = torch.randn(200, 24, generator=generator, dtype=torch.float64)
    y_NO = torch.randn(200, 20, generator=generator, dtype=torch.float64) + x_NF[:, 2:22]
    everything = PairMoments(SOURCE, TARGET)
    for part in (everything.k, everything.v, heads.k, heads.v):
        part.update(x_NF, y_NO)
    torch.testing.assert_close(single_source_r2_SL(heads), single_source_r2_SL(everything))
    for k in (1, 2, 3):
        assert choose_greedily(heads, k) == choose_greedily(everything, k)


def test_in_sample_r2_never_falls_with_more_layers() -> None:
    moments = redundant_pair()
    values = []
    for k in (1, 2, 3, 4):
        chosen = choose_layers(single_source_r2_SL(moments), k)
        fit, _ = solve_all(moments, chosen, "head_local", Ridge(value=1e-9))
        values.append(float(r2_L(moments.k, fit, chosen).mean()))
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(values))
