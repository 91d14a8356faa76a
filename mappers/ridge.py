"""Ridge regression from moments: one factorisation per (target layer, keys or values, group).

A *group* is the set of heads that share a design: with support `full` all heads of a layer (width
k x all source heads), with `head_local` one head (width k x head_dim; arXiv 2609.00891).

Shapes: L target layers, G groups, F features of a group, O outputs of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.geometry import KVGeometry
from mappers.manifest import Ridge, Support
from mappers.moments import Moments

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Weights and biases of keys or of values, fp64 as solved."""

    weight_LGFO: Tensor
    bias_LGO: Tensor


def groups(support: Support, source: KVGeometry, target: KVGeometry) -> int:
    """Number of head groups; MapperError for head_local between unequal head counts."""
    if support == "full":
        return 1
    if source.kv_heads != target.kv_heads:
        raise MapperError(
            f"support head_local needs equal KV heads, but the source has {source.kv_heads} and "
            f"the target {target.kv_heads}; use support full"
        )
    return target.kv_heads


def feature_width(support: Support, k: int, source: KVGeometry, target: KVGeometry) -> int:
    """Features of one group when `k` source layers are used."""
    return k * source.width // groups(support, source, target)


def solve_layers(
    part: Moments,
    source: KVGeometry,
    target: KVGeometry,
    source_layers: tuple[tuple[int, ...], ...],
    support: Support,
    ridge: Ridge,
) -> LinearFit:
    """Fit every target layer on its chosen source layers."""
    weights, biases = [], []
    factors = _LastDesign(
        lambda rows_F: EquilibratedCholesky(_block(part.xx_FF, rows_F, rows_F) / part.count, ridge)
    )
    number = groups(support, source, target)
    for layer, chosen in enumerate(source_layers):
        per_group = []
        for group in range(number):
            rows_F = feature_index(chosen, group, number, source)
            columns_O = output_index(layer, group, number, target)
            factor = factors.get(chosen, group, rows_F)
            cross_FO = _block(part.xy_FO, rows_F, columns_O) / part.count
            weight_FO = factor.solve(cross_FO)
            bias_O = part.mean_y_O[columns_O] - part.mean_x_F[rows_F] @ weight_FO
            per_group.append((weight_FO, bias_O))
        weights.append(torch.stack([weight for weight, _ in per_group]))
        biases.append(torch.stack([bias for _, bias in per_group]))
    return LinearFit(torch.stack(weights), torch.stack(biases))


def r2_L(
    part: Moments,
    fit: LinearFit,
    source: KVGeometry,
    target: KVGeometry,
    source_layers: tuple[tuple[int, ...], ...],
) -> Tensor:
    """R2 [L] of a fit on other observations, of which only the moments `part` are known.

    Pooled over heads and dimensions of a target layer: 1 - residual / total variance.
    """
    number = fit.weight_LGFO.shape[1]
    grams = _LastDesign(lambda rows_F: _block(part.xx_FF, rows_F, rows_F))
    scores = []
    for layer, chosen in enumerate(source_layers):
        residual, total = 0.0, 0.0
        for group in range(number):
            rows_F = feature_index(chosen, group, number, source)
            columns_O = output_index(layer, group, number, target)
            weight_FO = fit.weight_LGFO[layer, group]
            xx_FF = grams.get(chosen, group, rows_F)
            xy_FO = _block(part.xy_FO, rows_F, columns_O)
            offset_O = part.mean_x_F[rows_F] @ weight_FO + fit.bias_LGO[layer, group]
            offset_O -= part.mean_y_O[columns_O]
            yy = part.yy_O[columns_O].sum()
            quadratic = ((xx_FF @ weight_FO) * weight_FO).sum() - 2 * (xy_FO * weight_FO).sum()
            residual += float(yy + quadratic + part.count * offset_O.square().sum())
            total += float(yy)
        scores.append(1.0 - residual / total)
    return torch.tensor(scores, dtype=torch.float64)


class EquilibratedCholesky:
    """Factor of covariance + ridge, scaled to unit diagonal first.

    Dimensions of a cache differ by orders of magnitude in variance; without the scaling the normal
    equations of real caches are numerically singular in fp32 and poorly conditioned in fp64.
    """

    def __init__(self, covariance_FF: Tensor, ridge: Ridge) -> None:
        diagonal_F = covariance_FF.diagonal()
        penalty = ridge.value * float(diagonal_F.mean()) if ridge.relative else ridge.value
        self._scale_F = (diagonal_F + penalty).rsqrt()
        scaled_FF = covariance_FF * self._scale_F * self._scale_F[:, None]
        scaled_FF.diagonal().fill_(1.0)
        self._chol_FF, info = torch.linalg.cholesky_ex(scaled_FF)
        if int(info) != 0 or not bool(torch.isfinite(self._chol_FF).all()):
            raise MapperError(
                "the features are linearly dependent at this ridge; raise ridge or calibrate on "
                "more tokens"
            )

    def solve(self, cross_FO: Tensor) -> Tensor:
        """(covariance + ridge)^-1 cross."""
        scaled_FO = cross_FO * self._scale_F[:, None]
        return torch.cholesky_solve(scaled_FO, self._chol_FF) * self._scale_F[:, None]


class _LastDesign(Generic[T]):
    """Keeps what `make` gave for the feature columns of each group of the last choice of layers.

    With all layers chosen, every target layer shares one design; otherwise choices seldom recur.
    """

    def __init__(self, make: Callable[[Tensor], T]) -> None:
        self._make = make
        self._chosen: tuple[int, ...] | None = None
        self._made: dict[int, T] = {}

    def get(self, chosen: tuple[int, ...], group: int, rows_F: Tensor) -> T:
        if chosen != self._chosen:
            self._chosen, self._made = chosen, {}
        if group not in self._made:
            self._made[group] = self._make(rows_F)
        return self._made[group]


def _block(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return matrix[rows[:, None], columns]


def feature_index(chosen: tuple[int, ...], group: int, number: int, geometry: KVGeometry) -> Tensor:
    """Columns of the feature vector that a group reads, layer by layer in the order of `chosen`."""
    span = geometry.width // number
    start_k = torch.tensor(chosen) * geometry.width + group * span
    return (start_k[:, None] + torch.arange(span)).flatten()


def output_index(layer: int, group: int, number: int, geometry: KVGeometry) -> Tensor:
    """Columns of the output vector that a group of one target layer writes."""
    return feature_index((layer,), group, number, geometry)
