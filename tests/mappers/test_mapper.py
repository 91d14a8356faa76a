"""Applying mappers: the fast path, chunks, identity, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import MapperError
from mappers.geometry import KVGeometry, RopeType
from mappers.manifest import Support
from mappers.mapper import IdentityMapper, LinearMapper, LinearWeights
from mappers.rope import Rope
from tests.mappers.tiny import print_of, rope

SOURCE = {"layers": 3, "kv_heads": 2}


MIXED = ((0, 1), (0, 2), (1, 2), (0, 2))
SHARED = ((0, 2),) * 4


def random_mapper(
    support: Support = "full",
    target_heads: int = 2,
    compute_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    rope_type: RopeType = "default",
    source_layers: tuple[tuple[int, ...], ...] = MIXED,
) -> LinearMapper:
    generator = torch.Generator().manual_seed(0)
    source = print_of(**SOURCE, rope=rope("llama3"))
    target = print_of(layers=4, kv_heads=target_heads, rope=rope(rope_type))
    groups = 1 if support == "full" else 2
    shape = (4, groups, 2 * 32 // groups, target_heads * 16 // groups)

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / 8

    weights = LinearWeights(
        source_layers,
        tensor(*shape),
        tensor(4, groups, shape[-1]),
        tensor(*shape),
        tensor(4, groups, shape[-1]),
    )
    return LinearMapper(source, target, weights, compute_dtype=compute_dtype, dtype=dtype)


def cached(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    k_STHD = torch.randn(3, tokens, 2, 16, generator=generator)
    v_STHD = torch.randn(3, tokens, 2, 16, generator=generator)
    return k_STHD, v_STHD


@pytest.mark.parametrize("support", ["full", "head_local"])
@pytest.mark.parametrize("rope_type", ["default", "yarn"])
@pytest.mark.parametrize("source_layers", [MIXED, SHARED])
def test_fast_path_equals_the_reference(
    support: Support, rope_type: RopeType, source_layers: tuple[tuple[int, ...], ...]
) -> None:
    mapper = random_mapper(support, rope_type=rope_type, source_layers=source_layers)
    fast, slow = mapper.apply(*cached(40), 1_000), mapper.apply_reference(*cached(40), 1_000)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_fast_path_in_bf16_stays_within_bf16_rounding_of_the_reference() -> None:
    mapper = random_mapper(compute_dtype=torch.bfloat16, dtype=torch.bfloat16)
    fast, slow = mapper.apply(*cached(40), 7), mapper.apply_reference(*cached(40), 7)
    for a, b in zip(fast, slow, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert (a.float() - b.float()).abs().max() < 2**-6 * b.float().abs().max()


def test_the_reference_is_the_formula_of_the_paper() -> None:
    """W and b as stored, applied to one head of one token by hand."""
    source, target = print_of(2, 1), print_of(1, 1)
    generator = torch.Generator().manual_seed(0)
    weight_LGFO = torch.randn(1, 1, 32, 16, generator=generator)
    bias_LGO = torch.randn(1, 1, 16, generator=generator)
    weights = LinearWeights(((0, 1),), weight_LGFO, bias_LGO, 2 * weight_LGFO, bias_LGO)
    mapper = LinearMapper(source, target, weights, compute_dtype=torch.float32, dtype=torch.float32)
    k_STHD = torch.randn(2, 1, 1, 16, generator=generator)
    turn, at = Rope(source.rope), torch.tensor([77])
    free_F = turn.strip(k_STHD, at).flatten()
    k_LTHD, v_LTHD = mapper.apply_reference(k_STHD, k_STHD, 77)
    expected_THD = turn.apply((free_F @ weight_LGFO[0, 0] + bias_LGO[0, 0]).view(1, 1, 16), at)
    torch.testing.assert_close(k_LTHD[0], expected_THD, rtol=1e-4, atol=1e-4)
    expected_O = 2 * k_STHD.flatten() @ weight_LGFO[0, 0] + bias_LGO[0, 0]
    torch.testing.assert_close(v_LTHD.flatten(), expected_O, rtol=1e-4, atol=1e-4)


def test_unequal_head_counts_map_with_full_support() -> None:
    mapper = random_mapper(target_heads=4)
    k_LTHD, v_LTHD = mapper.apply(*cached(5), 0)
    assert k_LTHD.shape == v_LTHD.shape == (4, 5, 4, 16)
    slow_LTHD, _ = mapper.apply_reference(*cached(5), 0)
    torch.testing.assert_close(k_LTHD, slow_LTHD, rtol=1e-4, atol=1e-5)


@st.composite
def splits(draw: st.DrawFn) -> list[int]:
    """Sizes of up to five neighbouring chunks, some beyond one step of the fast path."""
    return draw(st.lists(st.integers(1, 700), min_size=1, max_size=5))


@pytest.mark.parametrize("support", ["full", "head_local"])
@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=15, deadline=None)
@given(sizes=splits(), start=st.integers(0, 120_000))
def test_any_split_gives_the_same_bytes(
    support: Support, threads: int, sizes: list[int], start: int
) -> None:
    torch.set_num_threads(threads)
    mapper = random_mapper(support, compute_dtype=torch.bfloat16, dtype=torch.bfloat16)
    k_STHD, v_STHD = cached(sum(sizes))
    whole = mapper.apply(k_STHD, v_STHD, start)
    parts, begin = [], 0
    for size in sizes:
        step = slice(begin, begin + size)
        parts.append(mapper.apply(k_STHD[:, step], v_STHD[:, step], start + begin))
        begin += size
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts], dim=1), whole[index])


@pytest.mark.parametrize("cuts", [[1, 32, 7, 560], [600]])
def test_chunks_with_their_start_positions_equal_the_reference(cuts: list[int]) -> None:
    mapper = random_mapper()
    k_STHD, v_STHD = cached(600)
    whole = mapper.apply_reference(k_STHD, v_STHD, 100)
    parts, begin = [], 0
    for size in cuts:
        step = slice(begin, begin + size)
        parts.append(mapper.apply(k_STHD[:, step], v_STHD[:, step], 100 + begin))
        begin += size
    for index in range(2):
        joined_LTHD = torch.cat([part[index] for part in parts], dim=1)
        torch.testing.assert_close(joined_LTHD, whole[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("support", ["full", "head_local"])
@settings(max_examples=10, deadline=None)
@given(tokens=st.integers(1, 600), cut=st.integers(1, 3))
def test_shards_of_heads_side_by_side_are_the_whole(
    support: Support, tokens: int, cut: int
) -> None:
    """Bit for bit: an output's sum does not depend on how many others are computed with it."""
    heads = 4 if support == "full" else 2
    cut = min(cut, heads - 1)
    mapper = random_mapper(
        support, target_heads=heads, compute_dtype=torch.bfloat16, dtype=torch.bfloat16
    )
    k_STHD, v_STHD = cached(tokens)
    whole = mapper.apply(k_STHD, v_STHD, 11)
    parts = []
    for shard in (range(cut), range(cut, heads)):
        own = slice(shard.start, shard.stop) if support == "head_local" else slice(None)
        parts.append(mapper.shard(shard).apply(k_STHD[:, :, own], v_STHD[:, :, own], 11))
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts], dim=2), whole[index])


def test_a_shard_of_heads_that_the_target_lacks_is_refused() -> None:
    with pytest.raises(MapperError, match="2 KV heads"):
        random_mapper().shard(range(1, 3))
    with pytest.raises(MapperError, match=r"range\(0, 0\)"):
        random_mapper().shard(range(0))


def test_features_of_one_run_of_layers_are_read_in_place() -> None:
    chosen = ((0, 1), (1, 2), (0, 1), (1, 2))
    mapper = random_mapper(source_layers=chosen)
    for a, b in zip(
        mapper.apply(*cached(70), 3), mapper.apply_reference(*cached(70), 3), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_mapped_keys_do_not_depend_on_where_the_text_stands_but_for_rotation() -> None:
    mapper = random_mapper()
    source_rope, target_rope = Rope(rope("llama3")), Rope(rope("default"))
    free_STHD, v_STHD = cached(4)
    results = []
    for start in (0, 5_000):
        positions = torch.arange(start, start + 4)
        k_LTHD, _ = mapper.apply(source_rope.apply(free_STHD, positions), v_STHD, start)
        results.append(target_rope.strip(k_LTHD, positions))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)


def test_identity_hands_back_every_bit() -> None:
    mapper = IdentityMapper(KVGeometry(3, 2, 16))
    k_STHD, v_STHD = (kv.bfloat16() for kv in cached(9))
    k_out, v_out = mapper.apply(k_STHD, v_STHD, 12_345)
    assert torch.equal(k_out, k_STHD) and torch.equal(v_out, v_STHD)


def test_a_cache_of_another_shape_is_refused_with_both_shapes() -> None:
    k_STHD, v_STHD = cached(4)
    with pytest.raises(MapperError, match=r"\(2, 4, 2, 16\).*3 layers"):
        random_mapper().apply(k_STHD[:2], v_STHD[:2], 0)
    with pytest.raises(MapperError, match="values of shape"):
        IdentityMapper(KVGeometry(3, 2, 16)).apply(k_STHD, v_STHD[:, :3], 0)
