"""The fast path of linear maps on CUDA: one kernel from cached source to finished target.

Three launches a chunk. `strip_kernel` makes the source's keys position-free once, in bf16.
`map_kernel` runs twice, for keys and values: it gathers features by address inside its k-loop (no
copy), multiplies with fp32 sums, and adds the bias, rotates, rounds and stores in one go, to plain
tensors or straight into paged blocks.

Why keys are stripped first. For Qwen3 14B to 32B and 32,768 tokens, stripping reads and writes the
source's keys once: 2 x 2.7 GB, 1.3 ms of an H200. Inside the k-loop every source element would be
rotated again for each target layer that reads it (64 x 8 / 40 = 12.8 times) and each tile of heads
(4): 51 rotations in fp32 in place of one, between the loads and the tensor cores, which then could
no longer be fed by asynchronous copies. Passes over memory, with support `full`: keys read twice
and written once as bf16, values read once and both outputs written once; what the products read
again (537 MB a target layer) is 7 ms of traffic for keys, under 45 ms of products.

Knows addresses and arithmetic, no models. Under `TRITON_INTERPRET=1` it runs on CPU tensors.

Shapes: S source layers, L target layers, T tokens, H KV heads, D head_dim, R turned elements of a
head, B blocks, N tokens of one block, C = 2 * D (K‖V), G head groups, K chosen layers of a target
layer, F features of a group, O outputs of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mappers.geometry import KVGeometry
from mappers.rope import Rope
from mappers.triton_kernels import map_kernel, strip_kernel
from mappers.weights import LinearWeights


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Where one tensor of keys or of values stands: element (l, t, h, d) is at
    `l·layer + block(u // N)·block + (u % N)·token + h·head + d` with u = first + t."""

    data: Tensor
    layer: int
    block: int
    token: int
    head: int
    block_tokens: int
    blocks: Tensor | None
    first: int

    @classmethod
    def plain(cls, x_LTHD: Tensor) -> KVMemory:
        """A tensor [L, T, H, D]; a view will do when its last dimension is dense."""
        assert x_LTHD.stride(3) == 1, "the elements of a head must be neighbours"
        layer, token, head, _ = x_LTHD.stride()
        return cls(x_LTHD, layer, token, 0, head, 1, None, 0)

    @classmethod
    def paged(
        cls, cache_LBHNC: Tensor, blocks: Tensor | None = None, first: int = 0
    ) -> tuple[KVMemory, KVMemory]:
        """Keys and values in blocks [L, B, H, N, K‖V], vLLM's plain layout.

        `blocks`: int32 numbers of the blocks in the order of the text, on the same device; None
        for 0, 1, 2, ... `first`: the slot of the first token within the first block.
        """
        layer, block, head, token, _ = cache_LBHNC.stride()
        block_tokens, both = cache_LBHNC.shape[3:]
        keys, values = cache_LBHNC.split(both // 2, dim=-1)
        assert cache_LBHNC.stride(4) == 1, "the elements of a head must be neighbours"
        parts = (layer, block, token, head, block_tokens, blocks, first)
        return cls(keys, *parts), cls(values, *parts)

    def arguments(self) -> tuple[Any, ...]:
        """As the kernels take them; without a block table any pointer will do."""
        table = self.data if self.blocks is None else self.blocks
        strides = (self.layer, self.block, self.token, self.head)
        return (self.data, table, *strides, self.block_tokens, self.first)


class Tiles(NamedTuple):
    """What one program multiplies: `tokens` x `heads` whole target heads, `k` features at a time.

    `near_tokens`: tokens over which all target layers of a head group are made before the next
    ones, so that they find the source in the L2 cache; None for all.
    """

    tokens: int
    heads: int
    k: int
    warps: int
    stages: int
    near_tokens: int | None


def suits(compute_dtype: torch.dtype, source: KVGeometry, target: KVGeometry) -> bool:
    """Whether the kernels can do it: 16-bit products, heads of a power of two from 32 to 256."""
    dims = (source.head_dim, target.head_dim)
    return compute_dtype.itemsize == 2 and all(dim in (32, 64, 128, 256) for dim in dims)


def tiles_for(tokens: int, groups: int, heads: int, head_dim: int, source_dim: int) -> Tiles:
    """Tiles by size of the chunk, and of `heads` target heads that read the same features.

    Features are summed in the same order in all of them.
    """
    k = min(64, source_dim)
    if tokens <= 64:
        # Reading the weights is all the work: small tiles, many loads on the way.
        return Tiles(64, 1, k, 4, 4 if head_dim <= 128 else 3, None)
    if groups > 1:
        # Source and weights of one head group for 1,024 tokens of Qwen3-14B are 27 MB.
        return Tiles(128, 1, k, 4, 3, 1024)
    wide = heads % 2 == 0 and head_dim <= 128
    return Tiles(128, 2 if wide else 1, k, 8 if wide else 4, 3, None)


class TritonMap:
    """Keeps the weights, and nothing between calls. For what `suits` says."""

    def __init__(
        self,
        weights: LinearWeights,
        source: KVGeometry,
        target: KVGeometry,
        source_rope: Rope,
        target_rope: Rope,
        *,
        tiles: Tiles | None = None,
    ) -> None:
        self._weights = weights
        self._source, self._target = source, target
        self._source_rope, self._target_rope = source_rope, target_rope
        self._tiles = tiles
        device = weights.k_weight_LGFO.device
        self._chosen_LK = torch.tensor(weights.source_layers, dtype=torch.int32, device=device)
        # The interpreter multiplies the bit patterns of bf16 (triton 3.9): widen them before.
        self._widen = device.type == "cpu"

    def run(
        self, k_STHD: Tensor, v_STHD: Tensor, start: int, out_k_LTHD: Tensor, out_v_LTHD: Tensor
    ) -> None:
        """Fill the outputs, in their dtype, from cached keys and values of consecutive tokens."""
        positions = self._source_rope.positions(start, k_STHD.shape[1])
        source = KVMemory.plain(k_STHD), KVMemory.plain(v_STHD)
        self.launch(source, positions, (KVMemory.plain(out_k_LTHD), KVMemory.plain(out_v_LTHD)))

    def launch(
        self,
        source: tuple[KVMemory, KVMemory],
        positions: Tensor,
        target: tuple[KVMemory, KVMemory],
    ) -> None:
        """Map tokens at `positions` [T] from where the source's keys and values stand to where the
        target's belong. Asynchronous; on the current CUDA stream."""
        if len(positions) == 0:
            return
        w = self._weights
        free = KVMemory.plain(self._strip(source[0], positions))
        self._map(free, w.k_weight_LGFO, w.k_bias_LGO, target[0], positions, turn=True)
        self._map(source[1], w.v_weight_LGFO, w.v_bias_LGO, target[1], positions, turn=False)

    def _strip(self, keys: KVMemory, positions: Tensor) -> Tensor:
        """Position-free keys [S, T, H, D] in the compute dtype."""
        source, tokens = self._source, len(positions)
        shape = (source.layers, tokens, source.kv_heads, source.head_dim)
        free_STHD = self._weights.k_weight_LGFO.new_empty(shape)
        cos, sin = self._source_rope.cos_sin(positions, inverse=True)
        block = 64
        grid = (triton.cdiv(tokens, block), source.layers * source.kv_heads)
        strip_kernel[grid](
            *keys.arguments(),
            cos.contiguous(),
            sin.contiguous(),
            free_STHD,
            tokens,
            source.kv_heads,
            HAS_TABLE=keys.blocks is not None,
            HEAD_DIM=source.head_dim,
            TURNED=2 * cos.shape[-1],
            BLOCK_T=block,
        )
        return free_STHD

    def _map(
        self,
        x: KVMemory,
        weight_LGFO: Tensor,
        bias_LGO: Tensor,
        out: KVMemory,
        positions: Tensor,
        *,
        turn: bool,
    ) -> None:
        tokens, head_dim = len(positions), self._target.head_dim
        layers, groups, features, outputs = weight_LGFO.shape
        group_heads = outputs // head_dim
        tiles = self._tiles or tiles_for(
            tokens, groups, group_heads, head_dim, self._source.head_dim
        )
        token_tiles = triton.cdiv(tokens, tiles.tokens)
        near = token_tiles
        if tiles.near_tokens is not None:
            near = min(near, tiles.near_tokens // tiles.tokens)
        head_tiles = group_heads // tiles.heads
        grid = (groups * triton.cdiv(token_tiles, near) * layers * near * head_tiles,)
        cos, sin = self._target_rope.cos_sin(positions) if turn else (bias_LGO, bias_LGO)
        map_kernel[grid](
            *x.arguments(),
            self._chosen_LK,
            weight_LGFO,
            bias_LGO,
            cos.contiguous(),
            sin.contiguous(),
            *out.arguments(),
            tokens,
            layers,
            groups,
            near,
            x.blocks is not None,
            out.blocks is not None,
            SOURCE_DIM=self._source.head_dim,
            SOURCE_HEADS=self._source.kv_heads // groups,
            CHOSEN=features * groups // self._source.width,
            HEAD_DIM=head_dim,
            GROUP_HEADS=group_heads,
            TURNED=2 * cos.shape[-1] if turn else 0,
            HEADS=tiles.heads,
            BLOCK_T=tiles.tokens,
            BLOCK_K=tiles.k,
            WIDEN=self._widen,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
