"""Between paged KV blocks, as engines keep them, and plain tensors, as mappers want them.

Shapes: L layers, B blocks, H KV heads, N tokens of one block, T tokens, D head_dim, S = N·2·D the
elements of one head's slab of one block. Knows the byte layout, not what the numbers mean.

vLLM keeps `[B, H, N, K‖V]` per layer (layout LBHNC). Its CPU attention permutes the elements
inside each slab, the same way for every block and head; `measure_permutation` reads that
permutation off vLLM's own writer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deployments.messages import EngineLayout, WorkerLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_DIGIT = 128
"""Numbers below this are exact in every dtype, bfloat16 (8 bits of significand) included."""


def measure_permutation(
    pack: Callable[[Tensor, Tensor], None], dtype: torch.dtype, block_tokens: int, head_dim: int
) -> Tensor:
    """int64 [S] with packed[j] = plain[permutation[j]], read off `pack`.

    `pack(cache_BHNC, block_ids)` rewrites plain blocks in place (vLLM's
    `current_platform.pack_kv_cache`). The slab is filled with its own element numbers, one base-128
    digit at a time, and read back.
    """
    size = block_tokens * 2 * head_dim
    numbers_S = torch.arange(size)
    permutation_S = torch.zeros(size, dtype=torch.int64)
    scale = 1
    while scale < size:
        digit_S = (numbers_S // scale) % _DIGIT
        cache_BHNC = digit_S.to(dtype).reshape(1, 1, block_tokens, 2 * head_dim).contiguous()
        pack(cache_BHNC, torch.zeros(1, dtype=torch.int64))
        permutation_S += cache_BHNC.flatten().to(torch.int64) * scale
        scale *= _DIGIT
    assert torch.equal(permutation_S.sort().values, numbers_S), "the packing is not a permutation"
    return permutation_S


def permutation_bytes(permutation_S: Tensor) -> bytes | None:
    """The wire form; None for the identity, so that plain layouts cost nothing."""
    if torch.equal(permutation_S, torch.arange(len(permutation_S))):
        return None
    return permutation_S.numpy().astype("<i4").tobytes()


@dataclass(frozen=True)
class StridedRun:
    """Half of a packing, told as a tensor: element (i, j, ...) of the packed half, whose shape is
    `sizes`, is the plain slab's element `offset + i·strides[0] + j·strides[1] + ...`."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def strided_run(permutation_S: Tensor) -> StridedRun | None:
    """The permutation as sizes and strides, or None when it has no such form."""
    offset = int(permutation_S[0])
    sizes: list[int] = []
    strides: list[int] = []
    rest = permutation_S
    while len(rest) > 1:
        stride = int(rest[1] - rest[0])
        for size in range(len(rest), 1, -1):
            if len(rest) % size == 0 and bool((rest.view(-1, size).diff(dim=1) == stride).all()):
                break
        else:
            return None
        sizes.insert(0, size)
        strides.insert(0, stride)
        rest = rest.view(-1, size)[:, 0]
    return StridedRun(offset, tuple(sizes), tuple(strides))


class BlockCodec:
    """Decodes and encodes chunks of whole blocks of one worker.

    A chunk is a contiguous buffer `[L, B, H, S]` in the worker's dtype, the same bytes that a READ
    of these blocks delivers and a WRITE takes. Where a packing allows (vLLM's known ones do:
    transposed keys, plain values), keys and values go straight between plain tensor and packed slab
    as strided copies; `gather=True` is the plain statement of what packing means, and much slower.
    """

    def __init__(self, worker: WorkerLayout, device: torch.device, *, gather: bool = False) -> None:
        self.worker = worker
        self._to_packed_S: Tensor | None = None
        self._to_plain_S: Tensor | None = None
        self._runs: tuple[StridedRun, ...] = ()
        if worker.permutation is not None:
            raw = np.frombuffer(worker.permutation, dtype="<i4").astype(np.int64)
            packed_S = torch.from_numpy(raw)
            self._to_packed_S = packed_S.to(device)
            self._to_plain_S = torch.argsort(packed_S).to(device)
            # Of a plain slab's [N, K‖V] each half has to hold one of the two alone.
            columns = packed_S % (2 * worker.head_dim) // worker.head_dim
            apart = all(bool((part == half).all()) for half, part in enumerate(columns.chunk(2)))
            halves = [strided_run(half) for half in packed_S.chunk(2)]
            if not gather and apart and None not in halves:
                self._runs = tuple(half for half in halves if half is not None)

    def _halves(
        self, k_LTHD: Tensor, v_LTHD: Tensor, chunk_LBHS: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """K and V, each beside its half of the packed slabs, both in the packed order."""
        w = self.worker
        layers, blocks, heads, size = chunk_LBHS.shape
        for half, (x_LTHD, run) in enumerate(zip((k_LTHD, v_LTHD), self._runs, strict=True)):
            per_layer, per_token, per_head, per_dim = x_LTHD.stride()

            def step(plain: int, per_token: int = per_token, per_dim: int = per_dim) -> int:
                tokens, dims = divmod(plain, 2 * w.head_dim)
                return tokens * per_token + dims * per_dim

            shape = (layers, blocks, heads, *run.sizes)
            outer = (per_layer, w.block_size_tokens * per_token, per_head)
            x = x_LTHD.as_strided(
                shape,
                (*outer, *map(step, run.strides)),
                x_LTHD.storage_offset() + step(run.offset - half * w.head_dim),
            )
            inner = [math.prod(run.sizes[i + 1 :]) for i in range(len(run.sizes))]
            packed = chunk_LBHS.as_strided(
                shape,
                (*chunk_LBHS.stride()[:3], *inner),
                chunk_LBHS.storage_offset() + half * size // 2,
            )
            yield x, packed

    def decode(self, chunk_LBHS: Tensor, k_LTHD: Tensor, v_LTHD: Tensor) -> None:
        """Fill K and V, T = B·N and both of the worker's dtype, from a chunk."""
        w = self.worker
        if self._runs:
            for x, packed in self._halves(k_LTHD, v_LTHD, chunk_LBHS):
                x.copy_(packed)
            return
        layers, blocks, heads, _ = chunk_LBHS.shape
        plain_LBHS = chunk_LBHS
        if self._to_plain_S is not None:
            plain_LBHS = chunk_LBHS.index_select(-1, self._to_plain_S)
        kv_LBHNC = plain_LBHS.view(layers, blocks, heads, w.block_size_tokens, 2 * w.head_dim)
        for x_LTHD, part_LBHND in zip(
            (k_LTHD, v_LTHD), kv_LBHNC.split(w.head_dim, dim=-1), strict=True
        ):
            x_LBNHD = x_LTHD.unflatten(1, (blocks, w.block_size_tokens))
            x_LBNHD.copy_(part_LBHND.transpose(2, 3))

    def encode(self, k_LTHD: Tensor, v_LTHD: Tensor, out_LBHS: Tensor) -> None:
        """Write K and V, T a multiple of N, into the chunk buffer `out_LBHS`."""
        w = self.worker
        layers, tokens, heads, _ = k_LTHD.shape
        blocks = tokens // w.block_size_tokens
        assert blocks * w.block_size_tokens == tokens, "only whole blocks can be packed"
        if self._runs:
            for x, packed in self._halves(k_LTHD, v_LTHD, out_LBHS):
                packed.copy_(x)
            return
        plain_LBHS = torch.empty_like(out_LBHS) if w.permutation is not None else out_LBHS
        plain_LBHNC = plain_LBHS.view(layers, blocks, heads, w.block_size_tokens, 2 * w.head_dim)
        shape = (layers, blocks, w.block_size_tokens, heads, w.head_dim)
        plain_LBHNC[..., : w.head_dim] = k_LTHD.reshape(shape).permute(0, 1, 3, 2, 4)
        plain_LBHNC[..., w.head_dim :] = v_LTHD.reshape(shape).permute(0, 1, 3, 2, 4)
        if self._to_packed_S is not None:
            torch.index_select(plain_LBHS, -1, self._to_packed_S, out=out_LBHS)


class EngineCodec:
    """The same over all workers of an engine, whose KV heads are split evenly in rank order."""

    def __init__(self, layout: EngineLayout, device: torch.device) -> None:
        self.layout = layout
        self.dtype = DTYPES[layout.workers[0].dtype]
        self.codecs = [BlockCodec(worker, device) for worker in layout.workers]

    def decode(self, chunks: list[Tensor], out: Tensor) -> tuple[Tensor, Tensor]:
        """One `[L, B, H/ranks, S]` buffer per rank in; K and V `[L, T, H, D]` out, in the memory
        of `out`, which is of one dimension and large enough."""
        layers, blocks, _, _ = chunks[0].shape
        worker = self.layout.workers[0]
        shape = (
            *(2, layers, blocks * worker.block_size_tokens),
            *(self.layout.kv_heads, worker.head_dim),
        )
        k_LTHD, v_LTHD = out.view(self.dtype)[: math.prod(shape)].view(shape)
        first = 0
        for codec, chunk in zip(self.codecs, chunks, strict=True):
            last = first + codec.worker.kv_heads
            codec.decode(chunk, k_LTHD[:, :, first:last], v_LTHD[:, :, first:last])
            first = last
        return k_LTHD, v_LTHD

    def encode(self, k_LTHD: Tensor, v_LTHD: Tensor, outs: list[Tensor]) -> None:
        """K and V `[L, T, H, D]` in; fills one `[L, B, H/ranks, S]` buffer per rank."""
        first = 0
        for codec, out in zip(self.codecs, outs, strict=True):
            last = first + codec.worker.kv_heads
            codec.encode(k_LTHD[:, :, first:last], v_LTHD[:, :, first:last], out)
            first = last


def descriptors(
    worker: WorkerLayout, block_ids: tuple[int, ...], buffer_address: int
) -> tuple[np.ndarray, np.ndarray]:
    """Remote and local NIXL descriptors (uint64 [n, 3]: address, bytes, device) for some blocks.

    The local side is a chunk buffer `[L, B, H, S]` at `buffer_address`. Neighbouring blocks become
    one descriptor: fewer, larger pieces are what a network wants. Raises ValueError for a block
    outside the worker's pool, because NIXL checks nothing inside a registered region.
    """
    ids_B = np.asarray(block_ids, dtype=np.int64)
    if len(ids_B) == 0 or ids_B.min() < 0 or ids_B.max() >= worker.num_blocks:
        raise ValueError(f"block ids outside the pool of {worker.num_blocks} blocks")
    starts_R = np.flatnonzero(np.r_[True, np.diff(ids_B) != 1])
    lengths_R = np.diff(np.r_[starts_R, len(ids_B)])
    if worker.block_stride_bytes != worker.block_bytes:
        starts_R, lengths_R = np.arange(len(ids_B)), np.ones(len(ids_B), dtype=np.int64)
    layers_L1 = np.asarray(worker.layer_addresses, dtype=np.uint64)[:, None]
    remote_LR = layers_L1 + (ids_B[starts_R] * worker.block_stride_bytes).astype(np.uint64)
    layer_bytes = len(ids_B) * worker.block_bytes
    offsets_L1 = (np.arange(len(layers_L1)) * layer_bytes)[:, None]
    local_LR = buffer_address + offsets_L1 + starts_R * worker.block_bytes
    sizes_LR = np.broadcast_to(lengths_R * worker.block_bytes, remote_LR.shape)

    def stack(addresses_LR: np.ndarray, device_id: int) -> np.ndarray:
        columns = (addresses_LR.ravel(), sizes_LR.ravel(), np.full(sizes_LR.size, device_id))
        return np.stack([np.asarray(c, dtype=np.uint64) for c in columns], axis=1)

    return stack(remote_LR, worker.device_id), stack(local_LR.astype(np.uint64), 0)
