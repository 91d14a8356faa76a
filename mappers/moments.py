"""Streaming centred second moments of (features, outputs): all that a linear fit needs to know.

Observations are never kept: each batch becomes a mean and products, merged by Chan's update, and
any choice of layers, support or ridge is solved from the same sums. Knows nothing of models.

Shapes: N observations, F features (all source layers x heads x dims), O outputs (likewise, target).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.geometry import KVGeometry


@dataclass(slots=True)
class Moments:
    """Means and centred sums of products, fp64. Sums grow with `count`; divide for covariances.

    Products inside one batch are formed in fp32 unless the batch is fp64 (relative error about 1e-6
    for a few thousand rows); everything across batches is fp64.
    """

    features: int
    outputs: int
    count: int = 0
    mean_x_F: Tensor = field(init=False)
    mean_y_O: Tensor = field(init=False)
    xx_FF: Tensor = field(init=False)
    xy_FO: Tensor = field(init=False)
    yy_O: Tensor = field(init=False)

    def __post_init__(self) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64)

        self.mean_x_F = zeros(self.features)
        self.mean_y_O = zeros(self.outputs)
        self.xx_FF = zeros(self.features, self.features)
        self.xy_FO = zeros(self.features, self.outputs)
        self.yy_O = zeros(self.outputs)

    def update(self, x_NF: Tensor, y_NO: Tensor, weight: int = 1) -> None:
        """Add N paired observations of any float dtype, as if each came `weight` times."""
        assert x_NF.shape[0] == y_NO.shape[0] > 0, "features and outputs must be paired"
        dtype = torch.float64 if x_NF.dtype == torch.float64 else torch.float32
        x_NF, y_NO = x_NF.to(dtype), y_NO.to(dtype)
        mean_x_F, mean_y_O = x_NF.mean(0), y_NO.mean(0)
        x_NF, y_NO = x_NF - mean_x_F, y_NO - mean_y_O
        self._add(
            x_NF.shape[0] * weight,
            mean_x_F.double(),
            mean_y_O.double(),
            (x_NF.T @ x_NF).mul_(weight),
            (x_NF.T @ y_NO).mul_(weight),
            (y_NO * y_NO).sum(0) * weight,
        )

    def merge(self, other: Moments) -> None:
        """Add everything `other` has seen, as if its observations had come here."""
        if other.count:
            self._add(
                other.count, other.mean_x_F, other.mean_y_O, other.xx_FF, other.xy_FO, other.yy_O
            )

    def _add(
        self, count: int, mean_x_F: Tensor, mean_y_O: Tensor, xx: Tensor, xy: Tensor, yy: Tensor
    ) -> None:
        total = self.count + count
        weight = self.count * count / total
        dx_F, dy_O = mean_x_F - self.mean_x_F, mean_y_O - self.mean_y_O
        self.xx_FF.add_(xx).addr_(dx_F, dx_F, alpha=weight)
        self.xy_FO.add_(xy).addr_(dx_F, dy_O, alpha=weight)
        self.yy_O.add_(yy).addcmul_(dy_O, dy_O, value=weight)
        self.mean_x_F.add_(dx_F, alpha=count / total)
        self.mean_y_O.add_(dy_O, alpha=count / total)
        self.count = total


@dataclass(slots=True)
class PairMoments:
    """Moments of keys and of values of one ordered pair of models."""

    source: KVGeometry
    target: KVGeometry
    k: Moments = field(init=False)
    v: Moments = field(init=False)

    def __post_init__(self) -> None:
        features = self.source.layers * self.source.width
        outputs = self.target.layers * self.target.width
        self.k = Moments(features, outputs)
        self.v = Moments(features, outputs)


def moments_bytes(source: KVGeometry, target: KVGeometry) -> int:
    """Peak memory of one PairMoments while a batch is added, in bytes."""
    features = source.layers * source.width
    outputs = target.layers * target.width
    sums = features * (features + outputs + 2) + 2 * outputs
    batch_product = features * max(features, outputs)
    return 2 * 8 * sums + 4 * batch_product


def require_memory(
    source: KVGeometry, target: KVGeometry, available_bytes: int, sets: int = 1
) -> int:
    """Estimated bytes of `sets` PairMoments; MapperError when they exceed `available_bytes`."""
    needed = sets * moments_bytes(source, target)
    if needed > available_bytes:
        raise MapperError(
            f"fitting this pair accumulates {needed / 1e9:.1f} GB of moments but only "
            f"{available_bytes / 1e9:.1f} GB of memory is available; use a machine with more"
        )
    return needed


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, as the kernel estimates it (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MapperError("/proc/meminfo has no MemAvailable line; fitting needs Linux 3.14 or later")
