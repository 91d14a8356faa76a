"""Plans of passes: arithmetic on shapes, and that every plan solves the same mapper."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import MapperError
from mappers.fitting.accumulate import PassState, solve_all
from mappers.fitting.blocks import PairMoments
from mappers.fitting.passes import batch_tokens, empty_moments, plan_fit, reserve_bytes
from mappers.fitting.ridge import solve_layers
from mappers.fitting.select import choose_layers, probe_SL, single_source_r2_SL
from mappers.fitting.spool import Observed
from mappers.geometry import KVGeometry
from mappers.manifest import Ridge, Support

QWEN3_14B, QWEN3_32B = KVGeometry(40, 8, 128), KVGeometry(64, 8, 128)
SMALL, LARGE = KVGeometry(4, 2, 8), KVGeometry(5, 2, 4)


def observed(seed: int, source: KVGeometry = SMALL, target: KVGeometry = LARGE) -> Observed:
    """30 sequences of 10 tokens; outputs follow the inputs of one layer, with noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs, outputs = source.layers * source.width, target.layers * target.width
    mix_FO = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(9))

    def part() -> tuple[torch.Tensor, torch.Tensor]:
        x_NF = torch.randn(300, inputs, generator=generator) + 2
        noise_NO = torch.randn(300, outputs, generator=generator)
        return x_NF.double(), (x_NF @ mix_FO + noise_NO).double()

    (k_x, k_y), (v_x, v_y) = part(), part()
    return Observed(x=(k_x, v_x), y=(k_y, v_y), relevance=None)


def accumulated(moments: PairMoments) -> PairMoments:
    state = PassState(moments)
    for seed in range(3):
        state.add(observed(seed, moments.source, moments.target), 10, 8)
    return moments


def test_qwen3_14b_to_32b_fits_into_23_gb_in_three_passes() -> None:
    plan = plan_fit(QWEN3_14B, QWEN3_32B, "full", 8, 23_000_000_000)
    assert [step.purpose for step in plan.first + plan.solve] == ["choose", "solve", "solve"]
    # The products of all source layers serve all target layers: keys first, then values.
    assert [step.shared_gram for step in plan.solve] == [True, True]
    assert plan.solve[0].of("keys") == tuple(range(64)) and plan.solve[0].of("values") == ()
    assert plan.first[0].moments_bytes == pytest.approx(7.38e9, rel=1e-2)
    assert plan.solve[0].moments_bytes == pytest.approx(11.18e9, rel=1e-2)
    # 4.29 GB of fp32 weights, 1.61 GB for one factor, 3 GB for a batch.
    assert plan.reserve_bytes == pytest.approx(8.90e9, rel=1e-2)
    assert plan.peak_bytes == pytest.approx(20.08e9, rel=1e-2)
    assert "2 passes to fit the chosen layers: up to 20.08 GB of 23.00 GB" in plan.describe()


def test_memory_decides_how_many_passes() -> None:
    def passes(gigabytes: int, support: Support, weighted: bool = False) -> tuple[int, int]:
        plan = plan_fit(QWEN3_14B, QWEN3_32B, support, 8, gigabytes * 10**9, weighted=weighted)
        assert plan.peak_bytes <= plan.memory_bytes
        return len(plan.first), len(plan.solve)

    assert passes(128, "full") == (1, 0)
    assert passes(40, "full") == (1, 1)
    assert passes(12, "full")[1] > 2
    assert passes(12, "head_local") == (1, 0)
    # Weights make the products of features each target layer's own.
    assert passes(23, "full", weighted=True) == (1, 4)
    assert passes(23, "head_local", weighted=True) == (1, 1)


def test_a_pair_of_which_no_layer_fits_is_refused_with_both_sizes() -> None:
    with pytest.raises(MapperError, match=r"takes 9\.\d GB .* only 9\.0 GB is free"):
        plan_fit(QWEN3_14B, QWEN3_32B, "full", 8, 9_000_000_000)
    with pytest.raises(MapperError, match="a sweep needs all at once"):
        plan_fit(QWEN3_14B, QWEN3_32B, "full", 8, 23_000_000_000, sweep=True)
    with pytest.raises(MapperError, match="source has 2 and the target 4"):
        plan_fit(KVGeometry(2, 2, 8), KVGeometry(2, 4, 8), "head_local", 1, 10**9)


def test_batches_depend_on_shapes_alone() -> None:
    assert batch_tokens(KVGeometry(15, 3, 64), KVGeometry(30, 3, 64)) == 4_096
    wide = batch_tokens(QWEN3_14B, QWEN3_32B)
    assert wide * 8 * (40 + 64) * 1_024 <= 1_000_000_000 < (wide + 1) * 8 * (40 + 64) * 1_024


@pytest.mark.parametrize("support", ["full", "head_local"])
@pytest.mark.parametrize("room", [40_000, 90_000, 10**6])
def test_slices_give_the_weights_of_one_pass(support: Support, room: int) -> None:
    k, ridge = 2, Ridge()
    whole = accumulated(PairMoments(SMALL, LARGE))
    expected_chosen = choose_layers(single_source_r2_SL(whole), k)
    expected = solve_all(whole, expected_chosen, support, ridge)
    memory = reserve_bytes(SMALL, LARGE, support, k) + room
    plan = plan_fit(SMALL, LARGE, support, k, memory)
    assert (len(plan.solve) == 0) == (room > 70_000 if support == "head_local" else room > 10**5)
    score_SL = torch.zeros(4, 5, dtype=torch.float64)
    for step in plan.first:
        moments = accumulated(empty_moments(step, None, SMALL, LARGE))
        heads = range(2) if step.group_count == 1 else None
        for unit, group in step.units:
            part = moments.k if unit == "keys" else moments.v
            for head in heads or (group,):
                score_SL += probe_SL(part, head) / 4
    assert choose_layers(score_SL, k) == expected_chosen
    if not plan.solve:
        actual = solve_all(moments, expected_chosen, support, ridge)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one.weight_LGFO, other.weight_LGFO, rtol=1e-6, atol=1e-9)
    for step in plan.solve:
        moments = accumulated(empty_moments(step, expected_chosen, SMALL, LARGE))
        for part, whole_fit, name in zip(
            (moments.k, moments.v), expected, ("keys", "values"), strict=True
        ):
            layers = [layer for unit, layer in step.units if unit == name]
            if layers:
                fit = solve_layers(part, expected_chosen, support, ridge, layers)
                torch.testing.assert_close(
                    fit.weight_LGFO, whole_fit.weight_LGFO[layers], rtol=1e-6, atol=1e-9
                )
                torch.testing.assert_close(
                    fit.bias_LGO, whole_fit.bias_LGO[layers], rtol=1e-6, atol=1e-9
                )


def test_one_shard_equals_four() -> None:
    plan = plan_fit(SMALL, LARGE, "full", 2, 10**8)
    (step,) = plan.first
    batches = [observed(seed) for seed in range(8)]

    def read(seeds: range) -> PassState:
        state = PassState(empty_moments(step, None, SMALL, LARGE))
        for seed in seeds:
            state.add(batches[seed], 10, 8)
        return state

    whole = read(range(8)).tensors()
    merged = read(range(2))
    for begin in (2, 4, 6):
        merged.merge(read(range(begin, begin + 2)).tensors())
    for name, tensor in merged.tensors().items():
        scale = whole[name].abs().max()
        assert (tensor - whole[name]).abs().max() < 1e-10 * scale, name
