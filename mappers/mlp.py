"""Applying the nonlinear map: for a pair on which the linear one fails (arXiv 2608.03893, 4.4).

Every (target layer, head, keys or values) has a network of its own with two hidden layers of ReLU
units, on the features a linear map would read. `MlpMapper` takes the place of `LinearMapper`
wherever a `Mapper` is asked for. Knows plain tensors only; training is `mlp_fit`'s.

Shapes: S source layers, L target layers, T tokens, H KV heads, D head_dim, F features of one head:
all elements of every chosen source layer (support `full`) or one head's (`head_local`), G distinct
sets of features in a layer (1 or H), U units of a hidden layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.fingerprint import ModelFingerprint
from mappers.geometry import KVGeometry
from mappers.manifest import Support
from mappers.mapper import require_shape
from mappers.rope import Rope
from mappers.supports import feature_width

HIDDEN_UNITS = 1024
"""Units of either hidden layer in the paper."""

# Tokens per step: bounds the hidden layers kept in fp32, and is enough for full speed.
_TOKENS_PER_STEP = 512

# Fields of MlpPart that are not networks, then those that are, in the order of MlpLayer.
_SCALING = ("mean_SHD", "scale_SHD")
_NETWORKS = (
    "first_LHFU",
    "first_bias_LHU",
    "second_LHUU",
    "second_bias_LHU",
    "last_LHUD",
    "last_bias_LHD",
    "skip_LHFD",
)


class MlpLayer(NamedTuple):
    """The networks of all heads of one target layer, of keys or of values."""

    first_HFU: Tensor
    first_bias_HU: Tensor
    second_HUU: Tensor
    second_bias_HU: Tensor
    last_HUD: Tensor
    last_bias_HD: Tensor
    skip_HFD: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> MlpLayer:
        """Every tensor changed by one function."""
        skip_HFD = None if self.skip_HFD is None else change(self.skip_HFD)
        return MlpLayer(*(change(tensor) for tensor in self[:6]))._replace(skip_HFD=skip_HFD)

    def forward(self, x_HTF: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """Outputs [H, T, D] in fp32: products in `compute_dtype`, biases and ReLU in fp32."""

        def product(a: Tensor, b: Tensor) -> Tensor:
            return torch.bmm(a.to(compute_dtype), b.to(compute_dtype)).float()

        hidden_HTU = torch.relu(product(x_HTF, self.first_HFU) + self.first_bias_HU[:, None])
        hidden_HTU = torch.relu(product(hidden_HTU, self.second_HUU) + self.second_bias_HU[:, None])
        y_HTD = product(hidden_HTU, self.last_HUD) + self.last_bias_HD[:, None]
        return y_HTD if self.skip_HFD is None else y_HTD + product(x_HTF, self.skip_HFD)


@dataclass(frozen=True, slots=True)
class MlpPart:
    """Networks of keys or of values.

    They read (x - mean) / scale of each source element and give position-free keys, or values, as
    they are. `skip_LHFD` is a linear map added to the networks' outputs, or None.
    """

    mean_SHD: Tensor
    scale_SHD: Tensor
    first_LHFU: Tensor
    first_bias_LHU: Tensor
    second_LHUU: Tensor
    second_bias_LHU: Tensor
    last_LHUD: Tensor
    last_bias_LHD: Tensor
    skip_LHFD: Tensor | None = None

    def layer(self, layer: int) -> MlpLayer:
        """The networks of one target layer; views."""
        return MlpLayer(
            self.first_LHFU[layer],
            self.first_bias_LHU[layer],
            self.second_LHUU[layer],
            self.second_bias_LHU[layer],
            self.last_LHUD[layer],
            self.last_bias_LHD[layer],
            None if self.skip_LHFD is None else self.skip_LHFD[layer],
        )

    @property
    def parameters(self) -> int:
        """Weights of all matrices; without biases and scaling."""
        matrices = (self.first_LHFU, self.second_LHUU, self.last_LHUD, self.skip_LHFD)
        return sum(matrix.numel() for matrix in matrices if matrix is not None)


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Networks of keys and of values, and the source layers [L][k] they read."""

    source_layers: tuple[tuple[int, ...], ...]
    k: MlpPart
    v: MlpPart

    @property
    def parameters(self) -> int:
        """Weights of all matrices; without biases and scaling."""
        return self.k.parameters + self.v.parameters


class MlpMapper:
    """A `Mapper` of networks; between equal heads also on features of the matching head alone.

    `apply` multiplies in `compute_dtype`, one target layer at a time; RoPE, scaling, biases and
    ReLU are fp32. `apply_reference` says the same plainly, in fp32 throughout, one head at a time.
    MapperError when the weights belong to other shapes than the two models have.
    """

    def __init__(
        self,
        source: ModelFingerprint,
        target: ModelFingerprint,
        weights: MlpWeights,
        *,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.source = source.geometry
        self.target = target.geometry
        self.dtype = dtype
        self.compute_dtype = compute_dtype
        self.weights = MlpWeights(
            weights.source_layers,
            _placed(weights.k, device, compute_dtype),
            _placed(weights.v, device, compute_dtype),
        )
        self._source_rope = Rope(source.rope, device)
        self._target_rope = Rope(target.rope, device)
        self._groups = _groups(weights, self.source, self.target)

    @property
    def flops_per_token(self) -> int:
        """Floating point operations of the matrix products for one token."""
        return 2 * self.weights.parameters

    @torch.no_grad()
    def apply(self, k_STHD: Tensor, v_STHD: Tensor, start_position: int) -> tuple[Tensor, Tensor]:
        """See `Mapper.apply`."""
        require_shape(self.source, k_STHD, v_STHD)
        tokens = k_STHD.shape[1]
        shape = (self.target.layers, tokens, self.target.kv_heads, self.target.head_dim)
        out_k_LTHD = torch.empty(shape, dtype=self.dtype, device=k_STHD.device)
        out_v_LTHD = torch.empty(shape, dtype=self.dtype, device=k_STHD.device)
        k, v = self.weights.k, self.weights.v
        for begin in range(0, tokens, _TOKENS_PER_STEP):
            step = slice(begin, min(begin + _TOKENS_PER_STEP, tokens))
            positions = self._source_rope.positions(start_position + begin, step.stop - begin)
            free_STHD = self._source_rope.strip(k_STHD[:, step], positions)
            scaled_k_STHD = self._scaled(k, free_STHD)
            scaled_v_STHD = self._scaled(v, v_STHD[:, step])
            for layer, chosen in enumerate(self.weights.source_layers):
                k_THD = self._one_layer(k.layer(layer), scaled_k_STHD, chosen)
                out_k_LTHD[layer, step] = self._target_rope.apply(k_THD, positions)
                out_v_LTHD[layer, step] = self._one_layer(v.layer(layer), scaled_v_STHD, chosen)
        return out_k_LTHD, out_v_LTHD

    def _scaled(self, part: MlpPart, x_STHD: Tensor) -> Tensor:
        x_STHD = (x_STHD.float() - part.mean_SHD[:, None]) / part.scale_SHD[:, None]
        return x_STHD.to(self.compute_dtype)

    def _one_layer(self, layer: MlpLayer, x_STHD: Tensor, chosen: tuple[int, ...]) -> Tensor:
        x_GTF = gather_features(x_STHD, chosen, self._groups)
        x_HTF = x_GTF.expand(self.target.kv_heads, -1, -1)
        return layer.forward(x_HTF, self.compute_dtype).transpose(0, 1)

    @torch.no_grad()
    def apply_reference(
        self, k_STHD: Tensor, v_STHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor]:
        """`apply`, written to be read: fp32, one head of one target layer at a time."""
        positions = self._source_rope.positions(start_position, k_STHD.shape[1])
        free_STHD = self._source_rope.strip(k_STHD, positions)
        keys, values = [], []
        for layer in range(self.target.layers):
            k_THD = self._layer_by_heads(self.weights.k, free_STHD, layer)
            v_THD = self._layer_by_heads(self.weights.v, v_STHD, layer)
            keys.append(self._target_rope.apply(k_THD, positions).to(self.dtype))
            values.append(v_THD.to(self.dtype))
        return torch.stack(keys), torch.stack(values)

    def _layer_by_heads(self, part: MlpPart, x_STHD: Tensor, layer: int) -> Tensor:
        heads = []
        for head in range(self.target.kv_heads):
            features = []
            for chosen in self.weights.source_layers[layer]:
                x_THD = (x_STHD[chosen].float() - part.mean_SHD[chosen]) / part.scale_SHD[chosen]
                features.append(x_THD.flatten(1) if self._groups == 1 else x_THD[:, head])
            x_TF = torch.cat(features, dim=1)
            hidden_TU = x_TF @ part.first_LHFU[layer, head].float()
            hidden_TU = (hidden_TU + part.first_bias_LHU[layer, head]).relu()
            hidden_TU = hidden_TU @ part.second_LHUU[layer, head].float()
            hidden_TU = (hidden_TU + part.second_bias_LHU[layer, head]).relu()
            y_TD = hidden_TU @ part.last_LHUD[layer, head].float() + part.last_bias_LHD[layer, head]
            if part.skip_LHFD is not None:
                y_TD = y_TD + x_TF @ part.skip_LHFD[layer, head].float()
            heads.append(y_TD)
        return torch.stack(heads, dim=1)


def gather_features(x_STHD: Tensor, chosen: tuple[int, ...], groups: int) -> Tensor:
    """Features [G, T, F] from the chosen source layers, in the order of `ridge.feature_index`."""
    layers, tokens = x_STHD.shape[:2]
    x_STGw = x_STHD.reshape(layers, tokens, groups, -1)
    return torch.cat([x_STGw[layer] for layer in chosen], dim=-1).transpose(0, 1)


def network_parameters(
    source: KVGeometry, target: KVGeometry, k: int, support: Support, hidden: int, residual: bool
) -> int:
    """Weights, without biases, of the networks of one target layer: its keys and its values."""
    features = feature_width(support, k, source, target)
    last = hidden * target.head_dim + (features * target.head_dim if residual else 0)
    return 2 * target.kv_heads * (features * hidden + hidden * hidden + last)


def mlp_tensors(weights: MlpWeights) -> dict[str, Tensor]:
    """Named tensors for a safetensors file: bf16 matrices, fp32 biases and scaling."""
    tensors: dict[str, Tensor] = {}
    for prefix, part in (("k", weights.k), ("v", weights.v)):
        for name in _SCALING + _NETWORKS:
            tensor = getattr(part, name)
            if tensor is not None:
                dtype = torch.bfloat16 if _is_matrix(name) else torch.float32
                tensors[f"{prefix}_{name}"] = tensor.to("cpu", dtype).contiguous()
    return tensors


def mlp_from_tensors(
    tensors: Mapping[str, Tensor], source_layers: tuple[tuple[int, ...], ...]
) -> MlpWeights:
    """Inverse of `mlp_tensors`; MapperError names a tensor that is missing."""

    def part(prefix: str) -> MlpPart:
        given = {}
        for name in _SCALING + _NETWORKS:
            if f"{prefix}_{name}" in tensors:
                given[name] = tensors[f"{prefix}_{name}"]
            elif name != "skip_LHFD":
                raise MapperError(f"the weights lack {prefix}_{name}: refit with `kvcascade fit`")
        return MlpPart(**given)

    return MlpWeights(source_layers, part("k"), part("v"))


def _is_matrix(name: str) -> bool:
    return name in _NETWORKS and "bias" not in name


def _placed(part: MlpPart, device: torch.device | str, compute_dtype: torch.dtype) -> MlpPart:
    placed: dict[str, Tensor] = {}
    for name in _SCALING + _NETWORKS:
        tensor = getattr(part, name)
        if tensor is not None:
            dtype = compute_dtype if _is_matrix(name) else torch.float32
            placed[name] = tensor.to(device, dtype).contiguous()
    return MlpPart(**placed)


def _groups(weights: MlpWeights, source: KVGeometry, target: KVGeometry) -> int:
    """1 or H, from the width of the features; MapperError when these are other models' weights."""
    k = len(weights.source_layers[0])
    shapes: dict[tuple[int, ...], int] = {}
    if source.kv_heads == target.kv_heads:
        shapes[target.layers, target.kv_heads, k * source.head_dim] = target.kv_heads
    shapes[target.layers, target.kv_heads, k * source.width] = 1
    found = tuple(weights.k.first_LHFU.shape[:3])
    if found not in shapes or tuple(weights.v.first_LHFU.shape[:3]) != found:
        raise MapperError(
            f"networks of shape {found} do not lead from {source} to {target}; use the mapper that "
            f"was made for these two models"
        )
    return shapes[found]
