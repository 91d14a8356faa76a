"""Turning one model's cached keys and values into another's.

`IdentityMapper` is the readable specification, `LinearMapper` the fitted map. Knows plain tensors
only: paged blocks are decoded and packed elsewhere. The number of CPU threads is the caller's.

Shapes: S source layers, L target layers, T tokens, H KV heads, D head_dim, G head groups (1 for
support `full`, H for `head_local`), w elements of one group of one source layer, F features: w of
every chosen source layer, O elements of one group of one target layer, X of all its groups, N
designs (distinct choices of source layers: 1 or L), M = L / N target layers of a design, P = M x O.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster.errors import MapperError
from mappers.fingerprint import ModelFingerprint
from mappers.geometry import KVGeometry
from mappers.manifest import WEIGHTS_FILE, read_manifest
from mappers.rope import Rope

# Tokens per matrix product: large enough for full speed, small enough for the gathered features of
# all target layers to stay near the processor.
_TOKENS_PER_STEP = 256


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
        _require_shape(self.source, k_STHD, v_STHD)
        return k_STHD.to(self.dtype), v_STHD.to(self.dtype)


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Fitted weights [L, G, F, O] and biases [L, G, O], and the layers [L][K] they read."""

    source_layers: tuple[tuple[int, ...], ...]
    k_weight_LGFO: Tensor
    k_bias_LGO: Tensor
    v_weight_LGFO: Tensor
    v_bias_LGO: Tensor


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
        self._source_rope = Rope(source.rope, device)
        self._target_rope = Rope(target.rope, device)
        self._device = torch.device(device)
        self._source_layers = weights.source_layers
        # Target layers that all read the same source layers are one design with wider outputs.
        one_design = len(set(weights.source_layers)) == 1
        self._designs = weights.source_layers[:1] if one_design else weights.source_layers
        self._k_weight_NGFP = self._by_design(weights.k_weight_LGFO)
        self._v_weight_NGFP = self._by_design(weights.v_weight_LGFO)
        self._k_bias_LX = weights.k_bias_LGO.flatten(1).to(device, torch.float32)
        self._v_bias_LX = weights.v_bias_LGO.flatten(1).to(device, torch.float32)

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
        return 2 * (self._k_weight_NGFP.numel() + self._v_weight_NGFP.numel())

    @torch.no_grad()
    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        """See `Mapper.apply`."""
        _require_shape(self.source, k_STHD, v_STHD)
        tokens = k_STHD.shape[1]
        shape = (self.target.layers, tokens, self.target.kv_heads, self.target.head_dim)
        out_k_LTHD = torch.empty(shape, dtype=self.dtype, device=k_STHD.device)
        out_v_LTHD = torch.empty(shape, dtype=self.dtype, device=k_STHD.device)
        for begin in range(0, tokens, _TOKENS_PER_STEP):
            step = slice(begin, min(begin + _TOKENS_PER_STEP, tokens))
            positions = self._source_rope.positions(start_position + begin, step.stop - begin)
            free_STHD = self._source_rope.strip(k_STHD[:, step], positions)
            mapped_LTHD = self._product(free_STHD, self._k_weight_NGFP, self._k_bias_LX)
            out_k_LTHD[:, step] = self._target_rope.apply(mapped_LTHD, positions)
            out_v_LTHD[:, step] = self._product(
                v_STHD[:, step], self._v_weight_NGFP, self._v_bias_LX
            )
        return out_k_LTHD, out_v_LTHD

    def _product(self, x_STHD: Tensor, weight_NGFP: Tensor, bias_LX: Tensor) -> Tensor:
        """Gather the features of every design and multiply all in one batched product; fp32."""
        designs, groups, features, _ = weight_NGFP.shape
        tokens, layers = x_STHD.shape[1], self.target.layers
        x_STGw = x_STHD.to(self.compute_dtype).reshape(
            self.source.layers, tokens, groups, self.source.width // groups
        )
        x_SGTw = x_STGw.transpose(1, 2)
        x_NGTF = x_SGTw.new_empty(designs, groups, tokens, features)
        for chosen, x_GTF in zip(self._designs, x_NGTF, strict=True):
            torch.cat([x_SGTw[layer] for layer in chosen], dim=-1, out=x_GTF)
        y_BTP = torch.bmm(x_NGTF.flatten(0, 1), weight_NGFP.flatten(0, 1))
        y_NGTMO = y_BTP.view(designs, groups, tokens, layers // designs, -1)
        y_LTX = y_NGTMO.permute(0, 3, 2, 1, 4).float().reshape(layers, tokens, -1)
        y_LTX += bias_LX[:, None]
        return y_LTX.view(layers, tokens, self.target.kv_heads, self.target.head_dim)

    def _by_design(self, weight_LGFO: Tensor) -> Tensor:
        """[L, G, F, O] -> [N, G, F, P], in the compute dtype."""
        layers, groups, features, outputs = weight_LGFO.shape
        shape = (len(self._designs), layers // len(self._designs), groups, features, outputs)
        weight_NGFMO = weight_LGFO.view(shape).permute(0, 2, 3, 1, 4)
        return weight_NGFMO.flatten(3).to(self._device, self.compute_dtype).contiguous()

    @torch.no_grad()
    def apply_reference(
        self, k_STHD: Tensor, v_STHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor]:
        """`apply`, written to be read: fp32, one target layer and head group at a time."""
        positions = self._source_rope.positions(start_position, k_STHD.shape[1])
        free_STHD = self._source_rope.strip(k_STHD, positions)
        keys, values = [], []
        for layer, chosen in enumerate(self._source_layers):
            k_THD = self._one_layer(free_STHD, layer, chosen, self._k_weight_NGFP, self._k_bias_LX)
            v_THD = self._one_layer(v_STHD, layer, chosen, self._v_weight_NGFP, self._v_bias_LX)
            keys.append(self._target_rope.apply(k_THD, positions).to(self.dtype))
            values.append(v_THD.to(self.dtype))
        return torch.stack(keys), torch.stack(values)

    def _one_layer(
        self,
        x_STHD: Tensor,
        layer: int,
        chosen: tuple[int, ...],
        weight_NGFP: Tensor,
        bias_LX: Tensor,
    ) -> Tensor:
        """One target layer, one head group after the other, in fp32."""
        designs, groups = weight_NGFP.shape[:2]
        design, member = (0, layer) if designs == 1 else (layer, 0)
        outputs = self.target.width // groups
        parts = []
        for group in range(groups):
            share = self.source.kv_heads // groups
            heads = slice(group * share, (group + 1) * share)
            x_TF = torch.cat([x_STHD[s, :, heads].float().flatten(1) for s in chosen], dim=1)
            columns = slice(member * outputs, (member + 1) * outputs)
            parts.append(x_TF @ weight_NGFP[design, group, :, columns].float())
        y_TX = torch.cat(parts, dim=1) + bias_LX[layer]
        return y_TX.view(-1, self.target.kv_heads, self.target.head_dim)


def _require_shape(geometry: KVGeometry, k_STHD: Tensor, v_STHD: Tensor) -> None:
    expected = (geometry.layers, k_STHD.shape[1], geometry.kv_heads, geometry.head_dim)
    for name, tensor in (("keys", k_STHD), ("values", v_STHD)):
        if tuple(tensor.shape) != expected:
            raise MapperError(
                f"{name} of shape {tuple(tensor.shape)} given to a mapper from "
                f"{geometry.layers} layers, {geometry.kv_heads} KV heads and head_dim "
                f"{geometry.head_dim}; expected [layers, tokens, heads, head_dim]"
            )
