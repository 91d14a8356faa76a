"""The Triton path against the reference. Run by `test_triton_map` in a process of its own.

On CPU tensors under Triton's interpreter (TRITON_INTERPRET=1, which must be set before anything
imports triton), on a GPU where there is one.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from mappers.geometry import KVGeometry, RopeSpec
from mappers.mapper import LinearMapper, LinearWeights
from mappers.triton_map import KVMemory, Tiles, TritonMap, suits
from tests.mappers.tiny import print_of, rope

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
LAYERS, DIM, BLOCK = 3, 32, 16
CHOSEN = ((0, 2), (1, 2), (0, 2), (0, 1))


def partial_rope() -> RopeSpec:
    return rope(head_dim=DIM).model_copy(update={"partial_rotary_factor": 0.5})


def mapper_of(
    groups: int,
    *,
    heads: int = 2,
    target_heads: int = 2,
    source_dim: int = DIM,
    target_rope: RopeSpec | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> LinearMapper:
    generator = torch.Generator().manual_seed(groups)
    features, outputs = 2 * heads * source_dim // groups, target_heads * DIM // groups

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) / 8

    weights = LinearWeights(
        CHOSEN,
        normal(len(CHOSEN), groups, features, outputs),
        normal(len(CHOSEN), groups, outputs),
        normal(len(CHOSEN), groups, features, outputs),
        normal(len(CHOSEN), groups, outputs),
    )
    source = print_of(LAYERS, heads, source_dim, rope=rope("llama3", source_dim))
    target = print_of(len(CHOSEN), target_heads, DIM, rope=target_rope or rope("yarn", DIM))
    return LinearMapper(source, target, weights, device=DEVICE, compute_dtype=dtype, dtype=dtype)


def triton_map(mapper: LinearMapper, tiles: Tiles | None = None) -> TritonMap:
    return TritonMap(*mapper.parts, tiles=tiles)


def cached(
    tokens: int, heads: int = 2, dtype: torch.dtype = torch.bfloat16, dim: int = DIM
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shape = (LAYERS, tokens, heads, dim)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2)]


def require_close(fast: Tensor, slow: Tensor) -> None:
    """Within the rounding of features and result. The interpreter cuts bf16 off, twice as coarse;
    cases in fp32 hold it to more."""
    step = 2**-17
    if slow.dtype == torch.bfloat16:
        step = 2**-6 if INTERPRETED else 2**-7
    assert (fast.float() - slow.float()).abs().max() < step * slow.float().abs().max()


def outputs(mapper: LinearMapper, tokens: int) -> tuple[Tensor, Tensor]:
    shape = (len(CHOSEN), tokens, mapper.target.kv_heads, DIM)
    nan = torch.full(shape, float("nan"), dtype=mapper.dtype, device=DEVICE)
    return nan, nan.clone()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tokens", [1, 17, 131])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_equals_the_reference(groups: int, tokens: int, dtype: torch.dtype) -> None:
    mapper = mapper_of(groups, dtype=dtype)
    out = outputs(mapper, tokens)
    triton_map(mapper).run(*cached(tokens, dtype=dtype), 1_000, *out)
    for fast, slow in zip(
        out, mapper.apply_reference(*cached(tokens, dtype=dtype), 1_000), strict=True
    ):
        require_close(fast, slow)


@pytest.mark.parametrize("turned", [rope("default", head_dim=DIM), partial_rope()])
def test_unequal_heads_and_a_partly_turned_head(turned: RopeSpec) -> None:
    mapper = mapper_of(1, heads=1, target_heads=4, target_rope=turned)
    out = outputs(mapper, 70)
    triton_map(mapper).run(*cached(70, heads=1), 5, *out)
    for fast, slow in zip(out, mapper.apply_reference(*cached(70, heads=1), 5), strict=True):
        require_close(fast, slow)


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_of_unequal_size(groups: int) -> None:
    mapper = mapper_of(groups, source_dim=64)
    out = outputs(mapper, 20)
    triton_map(mapper).run(*cached(20, dim=64), 5, *out)
    for fast, slow in zip(out, mapper.apply_reference(*cached(20, dim=64), 5), strict=True):
        require_close(fast, slow)


def test_heads_that_are_no_power_of_two_are_left_to_torch() -> None:
    good, odd = KVGeometry(1, 1, 128), KVGeometry(1, 1, 96)
    assert suits(torch.bfloat16, good, good)
    assert not suits(torch.bfloat16, good, odd) and not suits(torch.bfloat16, odd, good)
    assert not suits(torch.float32, good, good)


def test_a_partly_turned_source() -> None:
    mapper = mapper_of(2)
    source = print_of(LAYERS, 2, DIM, rope=partial_rope())
    target = print_of(len(CHOSEN), 2, DIM, rope=partial_rope())
    mapper = LinearMapper(source, target, mapper.weights, device=DEVICE)
    out = outputs(mapper, 20)
    triton_map(mapper).run(*cached(20), 300, *out)
    for fast, slow in zip(out, mapper.apply_reference(*cached(20), 300), strict=True):
        require_close(fast, slow)


@pytest.mark.parametrize("groups", [1, 2])
def test_every_token_has_the_same_bytes_in_any_tiles_and_chunks(groups: int) -> None:
    mapper, (k_STHD, v_STHD) = mapper_of(groups), cached(40)
    whole = outputs(mapper, 40)
    triton_map(mapper, Tiles(16, 1, 32, 4, 2, 32)).run(k_STHD, v_STHD, 40, *whole)
    parts = outputs(mapper, 40)
    for step in (slice(0, 17), slice(17, 18), slice(18, 40)):
        triton_map(mapper, Tiles(32, 1, 32, 4, 2, None)).run(
            k_STHD[:, step], v_STHD[:, step], 40 + step.start, *(part[:, step] for part in parts)
        )
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("groups", [1, 2])
def test_shards_side_by_side_are_the_whole(groups: int) -> None:
    mapper, (k_STHD, v_STHD) = mapper_of(groups), cached(20)
    whole, parts = outputs(mapper, 20), outputs(mapper, 20)
    triton_map(mapper).run(k_STHD, v_STHD, 9, *whole)
    for head in range(2):
        shard = mapper.shard(range(head, head + 1))
        own = slice(head, head + 1) if groups > 1 else slice(None)
        mine = [part[:, :, head : head + 1] for part in parts]
        triton_map(shard).run(k_STHD[:, :, own], v_STHD[:, :, own], 9, *mine)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("first", "tokens"), [(0, 32), (0, 21), (5, 40), (11, 3)])
def test_from_paged_blocks_straight_into_paged_blocks(groups: int, first: int, tokens: int) -> None:
    """The slots of no token keep what they held; each block goes where the table says."""
    mapper, (k_STHD, v_STHD) = mapper_of(groups), cached(tokens)
    slots = torch.arange(first, first + tokens, device=DEVICE)
    order = torch.tensor([3, 0, 4, 2], dtype=torch.int32, device=DEVICE)
    block, within = order.long()[slots // BLOCK], slots % BLOCK
    source_SBHNC = torch.zeros(LAYERS, 5, 2, BLOCK, 2 * DIM, dtype=torch.bfloat16, device=DEVICE)
    source_SBHNC[:, block, :, within] = torch.cat([k_STHD, v_STHD], dim=-1).transpose(0, 1)
    target_LBHNC = torch.full((len(CHOSEN), 5, 2, BLOCK, 2 * DIM), 7.0).to(source_SBHNC)
    positions = torch.arange(90, 90 + tokens, device=DEVICE)
    triton_map(mapper).launch(
        KVMemory.paged(source_SBHNC, order, first),
        positions,
        KVMemory.paged(target_LBHNC, order, first),
    )
    stored_LTHC = target_LBHNC[:, block, :, within].transpose(0, 1)
    slow = mapper.apply_reference(k_STHD, v_STHD, 90)
    for fast, expected in zip(stored_LTHC.split(DIM, dim=-1), slow, strict=True):
        require_close(fast, expected)
    target_LBHNC[:, block, :, within] = 7.0
    assert bool((target_LBHNC == 7.0).all())


@pytest.mark.skipif(INTERPRETED, reason="chooses the Triton path on CUDA only")
def test_the_mapper_uses_it_on_a_gpu() -> None:
    mapper = mapper_of(1)
    assert isinstance(mapper.fast, TritonMap)
    for fast, slow in zip(
        mapper.apply(*cached(77), 3), mapper.apply_reference(*cached(77), 3), strict=True
    ):
        require_close(fast, slow)
