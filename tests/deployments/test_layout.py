"""Paged blocks to plain tensors and back, plain and packed, over one worker and over two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.layout import (
    BlockCodec,
    EngineCodec,
    descriptors,
    measure_permutation,
    permutation_bytes,
    strided_run,
)
from deployments.messages import EngineLayout, WorkerLayout

N, D = 32, 8


def worker(
    *, rank: int = 0, kv_heads: int = 2, permutation: bytes | None = None, dtype: str = "bfloat16"
) -> WorkerLayout:
    return WorkerLayout(
        rank=rank,
        agent_name=f"w{rank}",
        agent_metadata=b"",
        memory="DRAM",
        device_id=0,
        dtype=dtype,  # type: ignore[arg-type]
        layer_addresses=(1_000_000, 2_000_000, 3_000_000),
        num_blocks=10,
        block_stride_bytes=kv_heads * N * 2 * D * (4 if dtype == "float32" else 2),
        block_size_tokens=N,
        kv_heads=kv_heads,
        head_dim=D,
        permutation=permutation,
    )


def transposed_keys(cache_BHNC: torch.Tensor, block_ids: torch.Tensor) -> None:
    """A packer like vLLM's on AVX-512: keys as [D, N], values as they are, halves of the slab."""
    for block in block_ids.tolist():
        plain = cache_BHNC[block].clone()
        k, v = plain[..., :D], plain[..., D:]
        flat = torch.cat((k.transpose(1, 2).flatten(1), v.flatten(1)), dim=1)
        cache_BHNC[block] = flat.view_as(cache_BHNC[block])


@pytest.fixture(scope="module")
def packed() -> bytes:
    found = permutation_bytes(measure_permutation(transposed_keys, torch.bfloat16, N, D))
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_permutation_is_read_off_the_packer_exactly(dtype: torch.dtype) -> None:
    permutation_S = measure_permutation(transposed_keys, dtype, N, D)
    # Packed element 1 is the first dimension of the second token; plain rows are 2·D wide.
    assert permutation_S[:3].tolist() == [0, 2 * D, 4 * D]
    assert permutation_S[N * D : N * D + 2].tolist() == [D, D + 1]


def test_a_packer_that_changes_nothing_costs_no_permutation() -> None:
    permutation_S = measure_permutation(lambda cache, ids: None, torch.float32, N, D)
    assert permutation_bytes(permutation_S) is None


def decoded(codec: BlockCodec, chunk_LBHS: Tensor) -> Tensor:
    """K and V of a chunk, [2, L, T, H, D]."""
    layers, blocks, heads, _ = chunk_LBHS.shape
    both = chunk_LBHS.new_empty(2, layers, blocks * N, heads, D)
    codec.decode(chunk_LBHS, *both)
    return both


@pytest.mark.parametrize("gather", [False, True])
def test_decode_undoes_what_the_packer_did(packed: bytes, gather: bool) -> None:
    cache_LBHNC = torch.randn(3, 4, 2, N, 2 * D).bfloat16()
    plain_LBHNC = cache_LBHNC.clone()
    for layer in cache_LBHNC:
        transposed_keys(layer, torch.arange(4))
    codec = BlockCodec(worker(permutation=packed), torch.device("cpu"), gather=gather)
    k_LTHD, v_LTHD = decoded(codec, cache_LBHNC.flatten(3))
    assert torch.equal(k_LTHD[2, 1 * N + 5, 1], plain_LBHNC[2, 1, 1, 5, :D])
    assert torch.equal(v_LTHD[0, 3 * N + 31, 0], plain_LBHNC[0, 3, 0, 31, D:])


def test_the_strided_path_equals_the_gather_path(packed: bytes) -> None:
    k_LTHD, v_LTHD = torch.randn(2, 3, 2 * N, 2, D).bfloat16().unbind(0)
    outs = []
    for gather in (False, True):
        out_LBHS = torch.empty(3, 2, 2, N * 2 * D, dtype=torch.bfloat16)
        codec = BlockCodec(worker(permutation=packed), torch.device("cpu"), gather=gather)
        codec.encode(k_LTHD, v_LTHD, out_LBHS)
        outs.append(out_LBHS)
        back_k, back_v = decoded(codec, out_LBHS)
        assert torch.equal(back_k, k_LTHD) and torch.equal(back_v, v_LTHD)
    assert torch.equal(outs[0], outs[1])


def test_a_permutation_without_strides_is_gathered() -> None:
    shuffled_S = torch.randperm(N * 2 * D, generator=torch.Generator().manual_seed(0))
    assert strided_run(shuffled_S[: N * D]) is None
    codec = BlockCodec(worker(permutation=permutation_bytes(shuffled_S)), torch.device("cpu"))
    k_LTHD, v_LTHD = torch.randn(2, 3, N, 2, D).bfloat16().unbind(0)
    out_LBHS = torch.empty(3, 1, 2, N * 2 * D, dtype=torch.bfloat16)
    codec.encode(k_LTHD, v_LTHD, out_LBHS)
    back_k, _ = decoded(codec, out_LBHS)
    assert torch.equal(back_k, k_LTHD)


def test_heads_of_two_workers_join_in_rank_order(packed: bytes) -> None:
    layout = EngineLayout(
        engine="e",
        generation="g",
        control_address="tcp://127.0.0.1:1",
        workers=tuple(worker(rank=r, kv_heads=1, permutation=packed) for r in (0, 1)),
    )
    codec = EngineCodec(layout, torch.device("cpu"))
    k_LTHD, v_LTHD = torch.randn(2, 3, 2 * N, 2, D).bfloat16().unbind(0)
    buffers = [torch.empty(3, 2, 1, N * 2 * D, dtype=torch.bfloat16) for _ in range(2)]
    codec.encode(k_LTHD, v_LTHD, buffers)
    k_of_second, _ = decoded(codec.codecs[1], buffers[1])
    assert torch.equal(k_of_second[:, :, 0], k_LTHD[:, :, 1])
    out = torch.empty(2 * k_LTHD.numel() * 2 + 100, dtype=torch.uint8)
    back_k, back_v = codec.decode(buffers, out)
    assert torch.equal(back_k, k_LTHD) and torch.equal(back_v, v_LTHD)
    assert back_k.data_ptr() == out.data_ptr()


def test_neighbouring_blocks_become_one_descriptor() -> None:
    w = worker()
    remote, local = descriptors(w, (4, 5, 6, 2), buffer_address=500)
    # Two runs in each of three layers.
    assert remote.shape == (6, 3)
    assert remote[0].tolist() == [1_000_000 + 4 * w.block_bytes, 3 * w.block_bytes, 0]
    assert remote[1].tolist() == [1_000_000 + 2 * w.block_bytes, w.block_bytes, 0]
    assert remote[2][0] == 2_000_000 + 4 * w.block_bytes
    assert local[0].tolist() == [500, 3 * w.block_bytes, 0]
    assert local[1][0] == 500 + 3 * w.block_bytes
    assert local[2][0] == 500 + 4 * w.block_bytes
    assert np.array_equal(local[:, 1], remote[:, 1])


@pytest.mark.parametrize("block_ids", [(), (-1,), (3, 10)])
def test_a_block_outside_the_pool_is_refused(block_ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="outside the pool of 10"):
        descriptors(worker(), block_ids, buffer_address=0)
