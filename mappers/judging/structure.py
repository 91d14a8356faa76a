"""Checks of a mapper that hold however well it fits: positions, and layers and heads in place.

A wrong theta, swapped layers or another order of heads often hide behind a fair perplexity. The
models' own rotary embeddings are asked here, not the ones the mapper was made with.

Shapes: L layers, T tokens, H KV heads, D head_dim, N = L x H heads of all layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mappers.judging.records import Misplaced, Part
from mappers.mapper import Mapper

KV = tuple[Tensor, Tensor]
"""Keys (with RoPE) and values of one sequence, both [L, T, H, D]."""

_PARTS: tuple[Part, Part] = ("keys", "values")


def shift_errors(
    mapper: Mapper, source: Any, target: Any, kv_STHD: KV
) -> tuple[int, float, float] | None:
    """How far `mapper` is from treating text alike wherever it stands; see `Structure`.

    Gives the shift and the relative errors of keys and values in the worst layer; None when a model
    has no positions left after the cache. A sound mapper errs by rounding alone.
    """
    k_STHD, v_STHD = kv_STHD
    tokens = k_STHD.shape[1]
    last = min(model.config.max_position_embeddings for model in (source, target))
    shift = min(4 * tokens, last - tokens)
    if shift <= 0:
        return None
    k_LTHD, v_LTHD = mapper.apply(k_STHD, v_STHD, 0)
    moved_k_LTHD, moved_v_LTHD = mapper.apply(turned(source, k_STHD, shift), v_STHD, shift)
    return (
        shift,
        _worst_layer_error(moved_k_LTHD, turned(target, k_LTHD, shift)),
        _worst_layer_error(moved_v_LTHD, v_LTHD),
    )


def turned(model: Any, k_LTHD: Tensor, shift: int) -> Tensor:
    """Keys as `model` would cache them `shift` positions later, fp32, by its own rotary module."""
    rotary = model.base_model.rotary_emb
    k_LTHD = k_LTHD.float()
    positions = torch.tensor([[0, shift]], device=k_LTHD.device)
    cos, sin = (part[0] for part in rotary(k_LTHD, position_ids=positions))
    # cos and sin carry YaRN's attention factor, which the keys hold already; it is cos at 0.
    factor = cos[0]
    # Some families turn only the first elements of a head.
    turning, rest = k_LTHD.split([cos.shape[-1], k_LTHD.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    return torch.cat(((turning * cos[1] + across * sin[1]) / factor, rest), dim=-1)


class PlaceSums:
    """Correlations of every mapped head with every native head, summed over windows."""

    def __init__(self) -> None:
        self._product_NN: dict[Part, Tensor] = {}
        self._mapped_N: dict[Part, Tensor] = {}
        self._native_N: dict[Part, Tensor] = {}
        self._heads = 1
        self.windows = 0

    def add(self, native: KV, mapped: KV) -> None:
        """Add one window's caches, both of the target's shape."""
        self._heads = native[0].shape[2]
        self.windows += 1
        for part, native_LTHD, mapped_LTHD in zip(_PARTS, native, mapped, strict=True):
            x_NE, y_NE = _centred(mapped_LTHD), _centred(native_LTHD)
            for sums, value in (
                (self._product_NN, x_NE @ y_NE.T),
                (self._mapped_N, x_NE.square().sum(1)),
                (self._native_N, y_NE.square().sum(1)),
            ):
                sums[part] = sums[part] + value if part in sums else value

    def misplaced(self, margin: float) -> tuple[Misplaced, ...]:
        """Mapped heads that resemble another native head by `margin` more than their own."""
        found = []
        for part in self._product_NN:
            norm_NN = (self._mapped_N[part][:, None] * self._native_N[part]).sqrt()
            correlation_NN = self._product_NN[part] / norm_NN.clamp(min=1e-30)
            best_N = correlation_NN.argmax(1).tolist()
            for at, best in enumerate(best_N):
                own, other = float(correlation_NN[at, at]), float(correlation_NN[at, best])
                if other > own + margin:
                    layer, head = divmod(at, self._heads)
                    to_layer, to_head = divmod(best, self._heads)
                    found.append(
                        Misplaced(
                            part=part,
                            layer=layer,
                            head=head,
                            resembles_layer=to_layer,
                            resembles_head=to_head,
                            own=round(own, 4),
                            other=round(other, 4),
                        )
                    )
        return tuple(found)


def _centred(kv_LTHD: Tensor) -> Tensor:
    """[L, T, H, D] -> [N, T*D] without every head's mean. The first token is unlike any other."""
    rest_LTHD = kv_LTHD[:, 1:].float()
    centred_LTHD = rest_LTHD - rest_LTHD.mean(1, keepdim=True)
    return centred_LTHD.transpose(1, 2).flatten(2).flatten(0, 1)


def _worst_layer_error(actual_LTHD: Tensor, expected_LTHD: Tensor) -> float:
    actual_LE, expected_LE = actual_LTHD.float().flatten(1), expected_LTHD.float().flatten(1)
    error_L = (actual_LE - expected_LE).norm(dim=1) / expected_LE.norm(dim=1).clamp(min=1e-30)
    return float(error_L.max())
