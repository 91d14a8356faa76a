"""Moments of an ordered pair of models, kept in blocks: which source layers against which outputs.

One block of everything serves every choice of layers but is large; blocks of single heads, or of
chosen layers alone, are small. Solvers ask for layers and heads, whatever the blocks.

Shapes: N observations, F features (source layers x heads x dims), O outputs (likewise, target), L
target layers, G head groups (1, or every KV head of the target by itself).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.fitting.moments import Moments
from mappers.fitting.sizes import moments_bytes
from mappers.geometry import KVGeometry


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Source layers (ascending) against target layers, of all heads or of one.

    With `groups` 1 all heads of a layer belong together; else `groups` is the number of the
    target's KV heads and `group` one of them, read from its matching source head. Without target
    layers a block keeps the products of features for others that have no `gram`.
    """

    source_layers: tuple[int, ...]
    target_layers: tuple[int, ...]
    group: int = 0
    groups: int = 1
    gram: bool = True

    def bytes(self, source: KVGeometry, target: KVGeometry) -> int:
        """Memory of the block's moments."""
        features = len(self.source_layers) * span(source, self.groups)
        return moments_bytes(
            features, len(self.target_layers) * span(target, self.groups), self.gram
        )


@dataclass(frozen=True, slots=True)
class Cross:
    """What a regression needs beside the products of its features; sums as in `Moments`."""

    count: float
    mean_x_F: Tensor
    mean_y_O: Tensor
    xy_FO: Tensor
    yy_O: Tensor


class PartMoments:
    """Moments of keys, or of values, in blocks."""

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        specs: Iterable[BlockSpec],
        device: torch.device | str = "cpu",
    ) -> None:
        self.source = source
        self.target = target
        self.device = device
        self.specs = tuple(specs)
        self.blocks = [
            Moments(
                len(spec.source_layers) * span(source, spec.groups),
                len(spec.target_layers) * span(target, spec.groups),
                spec.gram,
                device,
            )
            for spec in self.specs
        ]

    def update(
        self, x_NF: Tensor, y_NO: Tensor, weight: float = 1.0, weight_LGN: Tensor | None = None
    ) -> None:
        """Add N observations of all source and target layers to every block.

        All count `weight`, or, where `weight_LGN` is given, by target layer and group; then every
        block must be of one target layer and one group.
        """
        for spec, block in zip(self.specs, self.blocks, strict=True):
            own: float | Tensor = weight
            if weight_LGN is not None:
                (layer,) = spec.target_layers
                own = weight_LGN[layer, spec.group]
            block.update(
                _columns(x_NF, self._rows(spec.source_layers, spec)),
                _columns(y_NO, self._outputs(spec.target_layers, spec)),
                own,
            )

    def gram(
        self, source_layers: Sequence[int], layer: int, group: int, groups: int
    ) -> tuple[Tensor, float]:
        """Products [F, F] of the features with which one target layer is fitted, and their count"""
        at = self.gram_block(source_layers, layer, group, groups)
        wanted = BlockSpec(tuple(source_layers), (), group, groups)
        rows_F = self._within(self._rows(wanted.source_layers, wanted), at, features=True)
        return self.blocks[at].gram_of(rows_F), self.blocks[at].count

    def gram_block(self, source_layers: Sequence[int], layer: int, group: int, groups: int) -> int:
        """The block that `gram` reads: same block, layers and group, same products."""
        return next(
            at
            for at, spec in enumerate(self.specs)
            if spec.gram
            and _covers(spec, source_layers, group, groups)
            and (layer in spec.target_layers or not spec.target_layers)
        )

    def cross(
        self, source_layers: Sequence[int], target_layers: Sequence[int], group: int, groups: int
    ) -> Cross:
        """Products of features and outputs, the outputs' squares and both means."""
        wanted = BlockSpec(tuple(source_layers), tuple(target_layers), group, groups)
        at = next(
            at
            for at, spec in enumerate(self.specs)
            if _covers(spec, source_layers, group, groups)
            and set(target_layers) <= set(spec.target_layers)
        )
        block = self.blocks[at]
        rows_F = self._within(self._rows(wanted.source_layers, wanted), at, features=True)
        columns_O = self._within(self._outputs(wanted.target_layers, wanted), at, features=False)
        return Cross(
            block.count,
            block.mean_x_F[rows_F],
            block.mean_y_O[columns_O],
            block.xy_FO[rows_F[:, None], columns_O],
            block.yy_O[columns_O],
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything accumulated, by block and name."""
        return {
            f"{at}.{name}": tensor
            for at, block in enumerate(self.blocks)
            for name, tensor in block.tensors().items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state that `tensors` gave for the same blocks."""
        for at, block in enumerate(self.blocks):
            block.load(_under(tensors, f"{at}."))

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the state that `tensors` gave elsewhere for the same blocks."""
        for at, block in enumerate(self.blocks):
            own = _under(tensors, f"{at}.")
            block.merge(Moments.of({name: one.to(self.device) for name, one in own.items()}))

    def _rows(self, layers: Sequence[int], spec: BlockSpec) -> Tensor:
        head = 0 if spec.groups == 1 else matched_head(spec.group, self.source, self.target)
        return _index(layers, self.source, head, spec.groups).to(self.device)

    def _outputs(self, layers: Sequence[int], spec: BlockSpec) -> Tensor:
        return _index(layers, self.target, spec.group, spec.groups).to(self.device)

    def _within(self, wanted: Tensor, at: int, *, features: bool) -> Tensor:
        """Where a block keeps the given columns of the whole feature or output vector."""
        spec = self.specs[at]
        kept = (
            self._rows(spec.source_layers, spec)
            if features
            else self._outputs(spec.target_layers, spec)
        )
        return torch.searchsorted(kept, wanted)


class PairMoments:
    """Moments of keys and of values of one ordered pair; without specs one block of everything."""

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        k_specs: Iterable[BlockSpec] | None = None,
        v_specs: Iterable[BlockSpec] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        everything = BlockSpec(tuple(range(source.layers)), tuple(range(target.layers)))
        self.source = source
        self.target = target
        self.k = PartMoments(source, target, (everything,) if k_specs is None else k_specs, device)
        self.v = PartMoments(source, target, (everything,) if v_specs is None else v_specs, device)

    def tensors(self) -> dict[str, Tensor]:
        """Everything accumulated, by part, block and name."""
        parts = {"k": self.k, "v": self.v}
        return {
            f"{name}.{key}": tensor
            for name, part in parts.items()
            for key, tensor in part.tensors().items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state that `tensors` gave for the same blocks, bit for bit."""
        self.k.load(_under(tensors, "k."))
        self.v.load(_under(tensors, "v."))

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the state that `tensors` gave for the same blocks elsewhere, by Chan's update."""
        self.k.merge(_under(tensors, "k."))
        self.v.merge(_under(tensors, "v."))


def matched_head(head: int, source: KVGeometry, target: KVGeometry) -> int:
    """The source KV head that stands for target KV head `head`; itself when the counts agree."""
    return head * source.kv_heads // target.kv_heads


def span(geometry: KVGeometry, groups: int) -> int:
    """Elements of one layer that a group reads or writes: the layer's, or one head's."""
    return geometry.width if groups == 1 else geometry.head_dim


def _index(layers: Sequence[int], geometry: KVGeometry, group: int, groups: int) -> Tensor:
    """Columns of the vector of all layers that a group takes, layer by layer."""
    width = span(geometry, groups)
    start_k = torch.tensor(layers, dtype=torch.int64) * geometry.width + group * width
    return (start_k[:, None] + torch.arange(width)).flatten()


def _covers(spec: BlockSpec, source_layers: Sequence[int], group: int, groups: int) -> bool:
    same_heads = spec.groups == 1 or (spec.groups, spec.group) == (groups, group)
    return same_heads and set(source_layers) <= set(spec.source_layers)


def _columns(values_NC: Tensor, columns: Tensor) -> Tensor:
    return values_NC if len(columns) == values_NC.shape[1] else values_NC[:, columns]


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
