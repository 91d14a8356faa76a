"""Applying networks: the fast path, chunks, positions, saving, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import MapperError
from mappers.geometry import KVGeometry
from mappers.manifest import Support
from mappers.mlp import (
    MlpMapper,
    MlpPart,
    MlpWeights,
    mlp_from_tensors,
    mlp_tensors,
    network_parameters,
)
from mappers.rope import Rope
from tests.mappers.tiny import print_of, rope

CHOSEN = ((0, 1), (0, 2), (1, 2), (0, 2))
HIDDEN = 24


def random_weights(
    support: Support = "full", target_heads: int = 2, residual: bool = False
) -> MlpWeights:
    generator = torch.Generator().manual_seed(0)
    features = 2 * (32 if support == "full" else 16)

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / size[-2] ** 0.5

    def part() -> MlpPart:
        heads = (4, target_heads)
        return MlpPart(
            tensor(3, 2, 16),
            1 + torch.rand(3, 2, 16, generator=generator),
            tensor(*heads, features, HIDDEN),
            tensor(*heads, HIDDEN),
            tensor(*heads, HIDDEN, HIDDEN),
            tensor(*heads, HIDDEN),
            tensor(*heads, HIDDEN, 16),
            tensor(*heads, 16),
            tensor(*heads, features, 16) if residual else None,
        )

    return MlpWeights(CHOSEN, part(), part())


def mapper_of(
    weights: MlpWeights, target_heads: int = 2, dtype: torch.dtype = torch.float32
) -> MlpMapper:
    source = print_of(layers=3, kv_heads=2, rope=rope("llama3"))
    target = print_of(layers=4, kv_heads=target_heads, rope=rope("yarn"))
    return MlpMapper(source, target, weights, compute_dtype=dtype, dtype=dtype)


def cached(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    k_STHD = torch.randn(3, tokens, 2, 16, generator=generator)
    v_STHD = torch.randn(3, tokens, 2, 16, generator=generator)
    return k_STHD, v_STHD


@pytest.mark.parametrize(
    ("support", "target_heads"), [("full", 2), ("head_local", 2), ("full", 4), ("full", 1)]
)
@pytest.mark.parametrize("residual", [False, True])
def test_fast_path_equals_the_reference(
    support: Support, target_heads: int, residual: bool
) -> None:
    mapper = mapper_of(random_weights(support, target_heads, residual), target_heads)
    fast, slow = mapper.apply(*cached(40), 1_000), mapper.apply_reference(*cached(40), 1_000)
    assert fast[0].shape == fast[1].shape == (4, 40, target_heads, 16)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_fast_path_in_bf16_stays_within_bf16_rounding_of_the_reference() -> None:
    mapper = mapper_of(random_weights(residual=True), dtype=torch.bfloat16)
    fast, slow = mapper.apply(*cached(40), 7), mapper.apply_reference(*cached(40), 7)
    for a, b in zip(fast, slow, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert (a.float() - b.float()).abs().max() < 2**-5 * b.float().abs().max()


def test_the_reference_is_two_hidden_relu_layers_written_by_hand() -> None:
    weights = random_weights("head_local")
    _, v_STHD = cached(1)
    _, v_LTHD = mapper_of(weights).apply_reference(*cached(1), 0)
    part, layer, head = weights.v, 1, 1
    scaled_SD = ((v_STHD[:, 0] - part.mean_SHD) / part.scale_SHD)[:, head]
    hidden_U = scaled_SD[[0, 2]].flatten() @ part.first_LHFU[layer, head]
    hidden_U = (hidden_U + part.first_bias_LHU[layer, head]).clamp(min=0)
    hidden_U = hidden_U @ part.second_LHUU[layer, head] + part.second_bias_LHU[layer, head]
    expected_D = hidden_U.clamp(min=0) @ part.last_LHUD[layer, head]
    expected_D += part.last_bias_LHD[layer, head]
    torch.testing.assert_close(v_LTHD[layer, 0, head], expected_D, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [[1, 32, 7, 660], [700]])
def test_chunks_with_their_start_positions_equal_the_whole(cuts: list[int]) -> None:
    mapper = mapper_of(random_weights())
    k_STHD, v_STHD = cached(700)
    whole = mapper.apply_reference(k_STHD, v_STHD, 100)
    parts, begin = [], 0
    for size in cuts:
        step = slice(begin, begin + size)
        parts.append(mapper.apply(k_STHD[:, step], v_STHD[:, step], 100 + begin))
        begin += size
    for index in range(2):
        joined_LTHD = torch.cat([part[index] for part in parts], dim=1)
        torch.testing.assert_close(joined_LTHD, whole[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", [5_000, 100_000])
def test_mapped_keys_do_not_depend_on_where_the_text_stands_but_for_rotation(start: int) -> None:
    mapper = mapper_of(random_weights())
    source_rope, target_rope = Rope(rope("llama3")), Rope(rope("yarn"))
    free_STHD, v_STHD = cached(4)
    results = []
    for begin in (0, start):
        positions = torch.arange(begin, begin + 4)
        k_LTHD, _ = mapper.apply(source_rope.apply(free_STHD, positions), v_STHD, begin)
        results.append(target_rope.strip(k_LTHD, positions))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("residual", [False, True])
def test_a_saved_mapper_maps_as_the_one_that_was_saved(residual: bool, tmp_path: Path) -> None:
    weights = random_weights(residual=residual)
    save_file(mlp_tensors(weights), tmp_path / "mapper.safetensors")
    loaded = mlp_from_tensors(load_file(tmp_path / "mapper.safetensors"), CHOSEN)
    assert (loaded.k.skip_LHFD is None) == (not residual)
    before = mapper_of(weights, dtype=torch.bfloat16).apply(*cached(9), 3)
    after = mapper_of(loaded, dtype=torch.bfloat16).apply(*cached(9), 3)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)


def test_missing_tensors_are_named() -> None:
    tensors = mlp_tensors(random_weights())
    del tensors["v_second_bias_LHU"]
    with pytest.raises(MapperError, match="v_second_bias_LHU"):
        mlp_from_tensors(tensors, CHOSEN)


def test_operations_count_every_matrix_of_every_head() -> None:
    weights = random_weights(residual=True)
    per_head = 64 * HIDDEN + HIDDEN * HIDDEN + HIDDEN * 16 + 64 * 16
    assert mapper_of(weights).flops_per_token == 2 * 2 * 4 * 2 * per_head
    geometry = KVGeometry(3, 2, 16)
    one_layer = network_parameters(geometry, geometry, 2, "full", HIDDEN, residual=True)
    assert 4 * one_layer == weights.k.parameters + weights.v.parameters


def test_networks_of_another_pair_are_refused() -> None:
    with pytest.raises(MapperError, match="do not lead from"):
        mapper_of(random_weights(target_heads=4), target_heads=2)
    mixed = replace(random_weights("full"), v=random_weights("head_local").v)
    with pytest.raises(MapperError, match="do not lead from"):
        mapper_of(mixed)


def test_a_cache_of_another_shape_is_refused() -> None:
    k_STHD, v_STHD = cached(4)
    with pytest.raises(MapperError, match=r"\(2, 4, 2, 16\).*3 layers"):
        mapper_of(random_weights()).apply(k_STHD[:2], v_STHD[:2], 0)
