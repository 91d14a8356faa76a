"""Streaming centred second moments of (features, outputs): all that a linear fit needs to know.

Observations are never kept: each batch becomes a mean and products, merged by Chan's update, and
any choice of layers, support or ridge is solved from the same sums. Knows nothing of models.

Shapes: N observations, F features, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.fitting.sizes import tiles


@dataclass(slots=True)
class Moments:
    """Weighted means and centred sums of products, fp64. Sums grow with `count`.

    `count` is the sum of weights. Products inside one batch are formed in fp32 unless the batch is
    fp64 (relative error about 1e-6 for a few thousand rows); everything across batches is fp64.
    Without `gram`, products of features with features are not kept.
    """

    features: int
    outputs: int
    gram: bool = True
    device: torch.device | str = "cpu"
    count: float = field(init=False, default=0.0)
    mean_x_F: Tensor = field(init=False)
    mean_y_O: Tensor = field(init=False)
    xx_tiles: list[Tensor] = field(init=False)
    xy_FO: Tensor = field(init=False)
    yy_O: Tensor = field(init=False)

    def __post_init__(self) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=self.device)

        self.mean_x_F = zeros(self.features)
        self.mean_y_O = zeros(self.outputs)
        self.xx_tiles = [
            zeros(rows.stop - rows.start, self.features - rows.start)
            for rows in tiles(self.features if self.gram else 0)
        ]
        self.xy_FO = zeros(self.features, self.outputs)
        self.yy_O = zeros(self.outputs)

    @property
    def xx_FF(self) -> Tensor:
        """Products of all features with all, symmetric; a copy."""
        return self.gram_of(torch.arange(self.features, device=self.device))

    def gram_of(self, rows_R: Tensor) -> Tensor:
        """Products [R, R] of some features, given in ascending order; a copy."""
        assert self.gram, "these moments were made without products of features"
        xx_RR = torch.empty(len(rows_R), len(rows_R), dtype=torch.float64, device=self.device)
        for tile, xx in zip(tiles(self.features), self.xx_tiles, strict=True):
            first, end = torch.searchsorted(
                rows_R, torch.tensor([tile.start, tile.stop], device=rows_R.device)
            ).tolist()
            rows, columns = rows_R[first:end] - tile.start, rows_R[first:] - tile.start
            xx_RR[first:end, first:] = xx[rows[:, None], columns]
            xx_RR[end:, first:end] = xx_RR[first:end, end:].T
        return xx_RR

    def update(self, x_NF: Tensor, y_NO: Tensor, weight: float | Tensor = 1.0) -> None:
        """Add N paired observations of any float dtype.

        An observation of weight w (one number for all, or a tensor [N]) counts as if it came w
        times.
        """
        assert x_NF.shape[0] == y_NO.shape[0] > 0, "features and outputs must be paired"
        dtype = torch.float64 if x_NF.dtype == torch.float64 else torch.float32
        x_NF, y_NO = x_NF.to(self.device, dtype), y_NO.to(self.device, dtype)
        if isinstance(weight, Tensor):
            weight_N = weight.to(self.device, torch.float64)
            count, scale = float(weight_N.sum()), 1.0
            share_N, root_N = (weight_N / count).to(dtype), weight_N.sqrt().to(dtype)
            mean_x_F, mean_y_O = share_N @ x_NF, share_N @ y_NO
            x_NF = (x_NF - mean_x_F).mul_(root_N[:, None])
            y_NO = (y_NO - mean_y_O).mul_(root_N[:, None])
        else:
            count, scale = x_NF.shape[0] * float(weight), float(weight)
            mean_x_F, mean_y_O = x_NF.mean(0), y_NO.mean(0)
            x_NF, y_NO = x_NF - mean_x_F, y_NO - mean_y_O
        dx_F, dy_O, between = self._advance(count, mean_x_F.double(), mean_y_O.double())
        for tile, xx in zip(self._gram_tiles(), self.xx_tiles, strict=True):
            xx.add_(x_NF[:, tile].T @ x_NF[:, tile.start :], alpha=scale)
            xx.addr_(dx_F[tile], dx_F[tile.start :], alpha=between)
        for tile in tiles(self.features if self.outputs else 0):
            xy = self.xy_FO[tile]
            xy.add_(x_NF[:, tile].T @ y_NO, alpha=scale).addr_(dx_F[tile], dy_O, alpha=between)
        self.yy_O.add_((y_NO * y_NO).sum(0), alpha=scale).addcmul_(dy_O, dy_O, value=between)

    def merge(self, other: Moments) -> None:
        """Add everything `other` has seen, as if its observations had come here."""
        if not other.count:
            return
        dx_F, dy_O, between = self._advance(other.count, other.mean_x_F, other.mean_y_O)
        tiles = zip(self._gram_tiles(), self.xx_tiles, other.xx_tiles, strict=True)
        for tile, mine, theirs in tiles:
            mine.add_(theirs).addr_(dx_F[tile], dx_F[tile.start :], alpha=between)
        self.xy_FO.add_(other.xy_FO).addr_(dx_F, dy_O, alpha=between)
        self.yy_O.add_(other.yy_O).addcmul_(dy_O, dy_O, value=between)

    def tensors(self) -> dict[str, Tensor]:
        """Everything accumulated, by name; `load` takes it back bit for bit."""
        named = {
            "count": torch.tensor([self.count], dtype=torch.float64),
            "mean_x_F": self.mean_x_F,
            "mean_y_O": self.mean_y_O,
            "xy_FO": self.xy_FO,
            "yy_O": self.yy_O,
        }
        return named | {f"xx_{at}": xx for at, xx in enumerate(self.xx_tiles)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Moments:
        """Moments that read what `tensors` gave, without copying it."""
        made = cls(0, 0, gram=False)
        made.features, made.outputs = tensors["xy_FO"].shape
        made.count = float(tensors["count"])
        made.mean_x_F, made.mean_y_O = tensors["mean_x_F"], tensors["mean_y_O"]
        made.xy_FO, made.yy_O = tensors["xy_FO"], tensors["yy_O"]
        made.xx_tiles = [tensors[f"xx_{at}"] for at in range(len(tensors) - 5)]
        made.gram = bool(made.xx_tiles)
        return made

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state that `tensors` gave for moments of the same shape."""
        for name, mine in self.tensors().items():
            if name == "count":
                self.count = float(tensors[name])
            else:
                mine.copy_(tensors[name])

    def _gram_tiles(self) -> Iterator[slice]:
        return tiles(self.features if self.gram else 0)

    def _advance(
        self, count: float, mean_x_F: Tensor, mean_y_O: Tensor
    ) -> tuple[Tensor, Tensor, float]:
        """Move count and means; gives the distances of the means and their factor (Chan)."""
        assert count > 0, "observations without weight"
        total = self.count + count
        between = self.count * count / total
        dx_F, dy_O = mean_x_F - self.mean_x_F, mean_y_O - self.mean_y_O
        self.mean_x_F.add_(dx_F, alpha=count / total)
        self.mean_y_O.add_(dy_O, alpha=count / total)
        self.count = total
        return dx_F, dy_O, between


def available_memory_bytes(device: torch.device | str = "cpu") -> int:
    """Memory of `device` that can be taken; on the CPU without swapping, by the kernel's estimate.

    Raises MapperError where /proc/meminfo has no MemAvailable.
    """
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MapperError("/proc/meminfo has no MemAvailable line; fitting needs Linux 3.14 or later")
