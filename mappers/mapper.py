"""Turning one model's cached keys and values into another's.

`IdentityMapper` is the readable specification, `LinearMapper` the fitted map; its fast paths are in
`torch_map` (processors) and `triton_map` (CUDA). Knows plain tensors only: paged blocks are decoded
and packed elsewhere. The number of CPU threads is the caller's.

Shapes: S source layers, L target layers, T tokens, H KV heads, D head_dim, G head groups (1 for
support `full`, H for `head_local`), F features: all elements of one group of every chosen source
layer, O elements of one group of one target layer, X of all its groups.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster.errors import MapperError
from mappers.fingerprint import ModelFingerprint
from mappers.geometry import KVGeometry
from mappers.manifest import WEIGHTS_FILE, read_manifest
from mappers.rope import Rope
from mappers.torch_map import TorchMap
from mappers.weights import LinearWeights

if TYPE_CHECKING:
    from mappers.triton_map import TritonMap

__all__ = ["IdentityMapper", "LinearMapper", "LinearWeights", "Mapper", "require_shape"]


class Mapper(Protocol):
    """One directed map between KV caches. Stateless: any chunk, any order, any start."""

    source: KVGeometry
    target: KVGeometry
    dtype: torch.dtype

    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        """Map T consecutive tokens whose first absolute position is `start_position`.

        Takes the source's keys (with RoPE) and values [S, T, H, D] of any float dtype; gives the
        target's keys (with RoPE) and values [L, T, H, D] of `dtype`.
        """
        ...


class IdentityMapper:
    """Between a model and itself: hands its input back, bit for bit."""

    def __init__(self, geometry: KVGeometry, dtype: torch.dtype = torch.bfloat16) -> None:
        self.source = geometry
        self.target = geometry
        self.dtype = dtype

    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        """See `Mapper.apply`."""
        require_shape(self.source, k_STHD, v_STHD)
        return k_STHD.to(self.dtype), v_STHD.to(self.dtype)


class LinearMapper:
    """The affine map of arXiv 2608.03893 on position-free keys, and on values.

    `apply` multiplies in `compute_dtype`; RoPE, biases and sums of products are fp32.
    `apply_reference` says the same plainly, in fp32 throughout, one layer at a time.
    """

    def __init__(
        self,
        source: ModelFingerprint,
        target: ModelFingerprint,
        weights: LinearWeights,
        *,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.source = source.geometry
        self.target = target.geometry
        self.dtype = dtype
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        self._source_rope = Rope(source.rope, device)
        self._target_rope = Rope(target.rope, device)
        self._set(weights)

    def _set(self, weights: LinearWeights) -> None:
        self.weights = weights.placed(self.device, self.compute_dtype)
        self.fast: TorchMap | TritonMap = TorchMap(*self.parts)
        if self.device.type == "cuda":
            # Triton comes with CUDA builds of torch only.
            from mappers.triton_map import TritonMap, suits

            if suits(self.compute_dtype, self.source, self.target):
                self.fast = TritonMap(*self.parts)

    @property
    def parts(self) -> tuple[LinearWeights, KVGeometry, KVGeometry, Rope, Rope]:
        """What a fast path is made of: weights, then shapes and RoPE of source and target."""
        return (self.weights, self.source, self.target, self._source_rope, self._target_rope)

    def with_weights(self, weights: LinearWeights) -> LinearMapper:
        """The same mapper with other weights of the same shapes."""
        twin = copy.copy(self)
        twin._set(weights)
        return twin

    def shard(self, heads: range) -> LinearMapper:
        """A mapper that makes only these neighbouring KV heads of the target.

        With support `full` it takes the source's whole cache, with `head_local` only the source's
        heads of the same numbers. Shards side by side are the whole, as tensor-parallel ranks of
        the engines hold them. MapperError for heads that the target does not have.
        """
        twin = copy.copy(self)
        twin.target = replace(self.target, kv_heads=len(heads))
        if self.weights.groups > 1:
            twin.source = replace(self.source, kv_heads=len(heads))
        twin._set(self.weights.shard(heads, self.target.kv_heads))
        return twin

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> LinearMapper:
        """Read a mapper folder without checking which models are running (`load_mapper` does)."""
        manifest = read_manifest(folder)
        path = folder / WEIGHTS_FILE
        if not path.is_file():
            raise MapperError(f"{path} is missing: refit with `kvcascade fit`")
        tensors = load_file(path)
        weights = LinearWeights(
            manifest.source_layers,
            tensors["k_weight_LGFO"],
            tensors["k_bias_LGO"],
            tensors["v_weight_LGFO"],
            tensors["v_bias_LGO"],
        )
        return cls(
            manifest.source,
            manifest.target,
            weights,
            device=device,
            compute_dtype=compute_dtype,
            dtype=dtype,
        )

    @property
    def flops_per_token(self) -> int:
        """Floating point operations of the matrix products for one token."""
        return 2 * self.weights.parameters

    @torch.no_grad()
    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        """See `Mapper.apply`."""
        require_shape(self.source, k_STHD, v_STHD)
        shape = (self.target.layers, k_STHD.shape[1], self.target.kv_heads, self.target.head_dim)
        out_k_LTHD = torch.empty(shape, dtype=self.dtype, device=k_STHD.device)
        out_v_LTHD = torch.empty(shape, dtype=self.dtype, device=k_STHD.device)
        self.fast.run(k_STHD, v_STHD, start_position, out_k_LTHD, out_v_LTHD)
        return out_k_LTHD, out_v_LTHD

    @torch.no_grad()
    def apply_reference(
        self, k_STHD: Tensor, v_STHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor]:
        """`apply`, written to be read: fp32, one target layer and head group at a time."""
        w = self.weights
        positions = self._source_rope.positions(start_position, k_STHD.shape[1])
        free_STHD = self._source_rope.strip(k_STHD, positions)
        keys, values = [], []
        for layer, chosen in enumerate(w.source_layers):
            k_THD = self._one_layer(free_STHD, chosen, w.k_weight_LGFO[layer], w.k_bias_LGO[layer])
            v_THD = self._one_layer(v_STHD, chosen, w.v_weight_LGFO[layer], w.v_bias_LGO[layer])
            keys.append(self._target_rope.apply(k_THD, positions).to(self.dtype))
            values.append(v_THD.to(self.dtype))
        return torch.stack(keys), torch.stack(values)

    def _one_layer(
        self, x_STHD: Tensor, chosen: tuple[int, ...], weight_GFO: Tensor, bias_GO: Tensor
    ) -> Tensor:
        """One target layer, one head group after the other, in fp32."""
        parts = []
        share = self.source.kv_heads // len(bias_GO)
        for group, bias_O in enumerate(bias_GO):
            heads = slice(group * share, (group + 1) * share)
            x_TF = torch.cat([x_STHD[s, :, heads].float().flatten(1) for s in chosen], dim=1)
            parts.append(x_TF @ weight_GFO[group].float() + bias_O)
        y_TX = torch.cat(parts, dim=1)
        return y_TX.view(-1, self.target.kv_heads, self.target.head_dim)


def require_shape(geometry: KVGeometry, k_STHD: Tensor, v_STHD: Tensor) -> None:
    """MapperError, naming both shapes, unless keys and values are [S, T, H, D] of `geometry`."""
    expected = (geometry.layers, k_STHD.shape[1], geometry.kv_heads, geometry.head_dim)
    for name, tensor in (("keys", k_STHD), ("values", v_STHD)):
        if tuple(tensor.shape) != expected:
            raise MapperError(
                f"{name} of shape {tuple(tensor.shape)} given to a mapper from "
                f"{geometry.layers} layers, {geometry.kv_heads} KV heads and head_dim "
                f"{geometry.head_dim}; expected [layers, tokens, heads, head_dim]"
            )
