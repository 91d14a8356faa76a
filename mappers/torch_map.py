"""The fast path of linear maps in torch: few passes over memory, all of them near the processor.

Steps of at most `STEP_TOKENS` tokens. The features of a step, position-free, are laid side by side
once; target layers that read the same source layers share one gathering of them, or none where the
chosen layers are neighbours. Per target layer: one product, then bias, rotation and rounding on
its output while that is in the cache. Knows tensors, not models.

Shapes: S source layers, L target layers, T tokens, R rows (tokens and filling), H KV heads, D
head_dim, G head groups, w elements of one group of one source layer, C = S * w, F features of a
group, O outputs of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from mappers.geometry import KVGeometry
from mappers.rope import Rope, rotate
from mappers.weights import LinearWeights

# The products run fastest on some 500 rows, and as many features still fit an L3 share.
STEP_TOKENS = 512

# A step is filled up to a multiple of this, so that a last token or two never reach a kernel of
# another kind, which would sum in another order: any split of a text gives the same bytes.
_ROW_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class _Design:
    """Target layers that read the same features, and where those stand: runs of columns."""

    columns: tuple[slice, ...]
    layers: tuple[int, ...]


class TorchMap:
    """Maps position-free features of all layers, step by step. Keeps no state between calls."""

    def __init__(
        self,
        weights: LinearWeights,
        source: KVGeometry,
        target: KVGeometry,
        source_rope: Rope,
        target_rope: Rope,
    ) -> None:
        self._weights = weights
        self._source, self._target = source, target
        self._source_rope, self._target_rope = source_rope, target_rope
        width = source.width // weights.groups
        members: dict[tuple[int, ...], list[int]] = {}
        for layer, chosen in enumerate(weights.source_layers):
            members.setdefault(chosen, []).append(layer)
        self._designs = [_Design(_runs(c, width), tuple(ls)) for c, ls in members.items()]

    def run(
        self, k_STHD: Tensor, v_STHD: Tensor, start: int, out_k_LTHD: Tensor, out_v_LTHD: Tensor
    ) -> None:
        """Fill the outputs, in their dtype, from cached keys and values of consecutive tokens."""
        tokens = k_STHD.shape[1]
        for begin in range(0, tokens, STEP_TOKENS):
            step = slice(begin, min(begin + STEP_TOKENS, tokens))
            rows = -(-(step.stop - begin) // _ROW_MULTIPLE) * _ROW_MULTIPLE
            positions = self._source_rope.positions(start + begin, rows)
            self._keys(k_STHD[:, step], positions, out_k_LTHD[:, step])
            self._values(v_STHD[:, step], rows, out_v_LTHD[:, step])

    def _keys(self, k_STHD: Tensor, positions: Tensor, out_LTHD: Tensor) -> None:
        w, tokens = self._weights, k_STHD.shape[1]
        all_GRC, free_STHD = self._side_by_side(tokens, len(positions))
        cos, sin = self._source_rope.cos_sin(positions, inverse=True)
        for k_THD, free_THD in zip(k_STHD, free_STHD, strict=True):
            free_THD.copy_(rotate(k_THD, cos[:tokens], sin[:tokens]))
        cos, sin = self._target_rope.cos_sin(positions)
        y_THD = torch.empty(out_LTHD.shape[1:], dtype=torch.float32, device=k_STHD.device)
        turned_THD = torch.empty_like(y_THD)
        for layer, x_GRF in self._features(all_GRC):
            _product(x_GRF, w.k_weight_LGFO[layer], w.k_bias_LGO[layer], y_THD)
            out_LTHD[layer] = rotate(y_THD, cos[:tokens], sin[:tokens], out=turned_THD)

    def _values(self, v_STHD: Tensor, rows: int, out_LTHD: Tensor) -> None:
        w = self._weights
        all_GRC, plain_STHD = self._side_by_side(v_STHD.shape[1], rows)
        plain_STHD.copy_(v_STHD)
        for layer, x_GRF in self._features(all_GRC):
            _product(x_GRF, w.v_weight_LGFO[layer], w.v_bias_LGO[layer], out_LTHD[layer])

    def _side_by_side(self, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
        """Room for all features of a step, [G, R, S * w], and the same as [S, T, H, D]."""
        w, source = self._weights.k_weight_LGFO, self._source
        groups = self._weights.groups
        all_GRC = w.new_empty(groups, rows, source.layers * source.width // groups)
        all_GRC[:, tokens:] = 0
        shape = (groups, tokens, source.layers, -1, source.head_dim)
        plain_STGHD = all_GRC[:, :tokens].view(shape).permute(2, 1, 0, 3, 4)
        return all_GRC, plain_STGHD.view(source.layers, tokens, source.kv_heads, source.head_dim)

    def _features(self, all_GRC: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every target layer with the features [G, R, F] that it reads."""
        groups, features = self._weights.groups, self._weights.k_weight_LGFO.shape[2]
        room_GRF = all_GRC.new_empty(groups, all_GRC.shape[1], features)
        for design in self._designs:
            parts = [all_GRC[..., run] for run in design.columns]
            x_GRF = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1, out=room_GRF)
            for layer in design.layers:
                yield layer, x_GRF


def _product(x_GRF: Tensor, weight_GFO: Tensor, bias_GO: Tensor, out_THD: Tensor) -> None:
    """One target layer's products and biases, rounded once more when `out_THD` is not fp32."""
    groups, outputs = bias_GO.shape
    out_TGO = out_THD.view(len(out_THD), groups, outputs)
    for group in range(groups):
        y_RO = linear(x_GRF[group], weight_GFO[group].T)
        torch.add(y_RO[: len(out_THD)], bias_GO[group], out=out_TGO[:, group])


def _runs(chosen: tuple[int, ...], width: int) -> tuple[slice, ...]:
    """Columns of the chosen layers, neighbouring ones joined, in the order of `chosen`."""
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(chosen)) if b != a + 1]
    return tuple(
        slice(chosen[first] * width, (chosen[last - 1] + 1) * width)
        for first, last in pairwise([0, *breaks, len(chosen)])
    )
