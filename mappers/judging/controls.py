"""Caches that should fail, to tell what a mapped cache owes to its mapper.

Knows the weights of linear mappers; other kinds have no random counterpart of equal norm.

Shapes: S source layers, L target layers, P prefix tokens, H KV heads, D head_dim, G head groups,
F features, O outputs of one target layer and head group.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mappers.mapper import LinearMapper, Mapper

KV = tuple[Tensor, Tensor]
"""Keys (with RoPE) and values of one sequence, both [layers, P, H, D]."""


def random_like(mapper: Mapper, seed: int = 0) -> Mapper | None:
    """A mapper with random weights, of the same Frobenius norm per layer for keys and for values.

    Biases, chosen layers and rotary embeddings are the mapper's own. None for a mapper that is not
    linear.
    """
    if not isinstance(mapper, LinearMapper):
        return None
    generator = torch.Generator().manual_seed(seed)
    weights = mapper.weights
    return mapper.with_weights(
        replace(
            weights,
            k_weight_LGFO=_random_like(weights.k_weight_LGFO, generator),
            v_weight_LGFO=_random_like(weights.v_weight_LGFO, generator),
        )
    )


def _random_like(weight_LGFO: Tensor, generator: torch.Generator) -> Tensor:
    random_LGFO = torch.randn(weight_LGFO.shape, generator=generator).to(weight_LGFO.device)
    norm_L: Tensor = weight_LGFO.float().flatten(1).norm(dim=1) / random_LGFO.flatten(1).norm(dim=1)
    scaled_LGFO: Tensor = random_LGFO * norm_L[:, None, None, None]
    return scaled_LGFO.to(weight_LGFO.dtype)


def raw_source(kv_SPHD: KV, mapper: Mapper) -> KV | None:
    """The source's cache under the target's layers; None when heads differ in number or size."""
    source, target = mapper.source, mapper.target
    if (source.kv_heads, source.head_dim) != (target.kv_heads, target.head_dim):
        return None
    layers = [layer * source.layers // target.layers for layer in range(target.layers)]
    return kv_SPHD[0][layers], kv_SPHD[1][layers]
