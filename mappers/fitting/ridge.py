"""Ridge regression from moments: one factorisation per (target layer, keys or values, group).

A *group* is the set of heads that share a design: with support `full` all heads of a layer (width
k x all source heads), with `head_local` one head (width k x head_dim; arXiv 2609.00891).

Shapes: N observations, L target layers, G groups, F features of a group, O outputs of a group, C
outputs of all groups and target layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.fitting.blocks import PartMoments, span
from mappers.fitting.moments import Moments
from mappers.geometry import KVGeometry
from mappers.manifest import Ridge, Support
from mappers.supports import groups


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Weights and biases of keys or of values, as solved in fp64."""

    weight_LGFO: Tensor
    bias_LGO: Tensor


def solve_layers(
    part: PartMoments,
    source_layers: Sequence[tuple[int, ...]],
    support: Support,
    ridge: Ridge,
    layers: Sequence[int] | None = None,
) -> LinearFit:
    """Fit target layers on their chosen source layers.

    `source_layers` are the choices of all target layers; only `layers`, by default all, are fitted
    and returned. Raises MapperError when features are linearly dependent.
    """
    number = groups(support, part.source, part.target)
    weights, biases = [], []
    designs: dict[int, tuple[tuple[int, tuple[int, ...]], EquilibratedCholesky]] = {}
    for layer in range(len(source_layers)) if layers is None else layers:
        chosen = source_layers[layer]
        per_group = []
        for group in range(number):
            # With all layers chosen, every target layer shares one design.
            design = (part.gram_block(chosen, layer, group, number), chosen)
            if group not in designs or designs[group][0] != design:
                gram_FF, count = part.gram(chosen, layer, group, number)
                designs[group] = (design, EquilibratedCholesky(gram_FF.div_(count), ridge))
            cross = part.cross(chosen, (layer,), group, number)
            weight_FO = designs[group][1].solve(cross.xy_FO / cross.count)
            per_group.append((weight_FO, cross.mean_y_O - cross.mean_x_F @ weight_FO))
        weights.append(torch.stack([weight for weight, _ in per_group]))
        biases.append(torch.stack([bias for _, bias in per_group]))
    return LinearFit(torch.stack(weights), torch.stack(biases))


def r2_L(part: PartMoments, fit: LinearFit, source_layers: Sequence[tuple[int, ...]]) -> Tensor:
    """R2 [L] of a fit on observations of which only the moments are known.

    Pooled over heads and dimensions of a target layer: 1 - residual / total variance. On the
    moments it was solved from, that is the in-sample R2.
    """
    number = fit.weight_LGFO.shape[1]
    scores = []
    for layer, chosen in enumerate(source_layers):
        residual, total = 0.0, 0.0
        for group in range(number):
            weight_FO = fit.weight_LGFO[layer, group]
            xx_FF, _ = part.gram(chosen, layer, group, number)
            cross = part.cross(chosen, (layer,), group, number)
            offset_O = cross.mean_x_F @ weight_FO + fit.bias_LGO[layer, group] - cross.mean_y_O
            yy = cross.yy_O.sum()
            quadratic = ((xx_FF @ weight_FO) * weight_FO).sum()
            quadratic -= 2 * (cross.xy_FO * weight_FO).sum()
            residual += float(yy + quadratic + cross.count * offset_O.square().sum())
            total += float(yy)
        scores.append(1.0 - residual / total)
    return torch.tensor(scores, dtype=torch.float64)


class StreamedR2:
    """R2 of a fit on observations that come in batches; the same number as `r2_L`, and no moments.

    Products are formed in fp32 unless the weights and observations are fp64.
    """

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        fit: LinearFit,
        source_layers: Sequence[tuple[int, ...]],
    ) -> None:
        self._source = source
        self._fit = fit
        self._source_layers = source_layers
        self._residual_L = torch.zeros(target.layers, dtype=torch.float64)
        self._outputs = Moments(0, target.layers * target.width, gram=False)

    def update(self, x_NF: Tensor, y_NC: Tensor) -> None:
        """Add N observations of all source and target layers."""
        weight_LGFO, bias_LGO = self._fit.weight_LGFO, self._fit.bias_LGO
        dtype = torch.promote_types(x_NF.dtype, torch.float32)
        x_NSw = x_NF.to(weight_LGFO.device, dtype).view(len(x_NF), self._source.layers, -1)
        y_NLGO = y_NC.to(weight_LGFO.device, dtype).view(len(y_NC), *bias_LGO.shape)
        width = span(self._source, weight_LGFO.shape[1])
        for layer, chosen in enumerate(self._source_layers):
            for group, weight_FO in enumerate(weight_LGFO[layer].to(dtype)):
                columns = slice(group * width, (group + 1) * width)
                x_NG = x_NSw[:, list(chosen), columns].flatten(1)
                error_NO = y_NLGO[:, layer, group] - bias_LGO[layer, group].to(dtype)
                error_NO = error_NO - x_NG @ weight_FO
                self._residual_L[layer] += float(error_NO.double().square().sum())
        self._outputs.update(x_NF[:, :0].to("cpu"), y_NC.to("cpu"))

    def r2_L(self) -> Tensor:
        """R2 [L] over everything added."""
        total_L = self._outputs.yy_O.view(len(self._residual_L), -1).sum(1)
        return 1.0 - self._residual_L / total_L


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
