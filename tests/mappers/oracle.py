"""A pair whose exact mapper is known, and ways to break it: a model mapped to itself."""

from __future__ import annotations

from pathlib import Path

import torch

from mappers.fingerprint import ModelFingerprint, fingerprint
from mappers.mapper import LinearMapper, LinearWeights


def identity_weights(print_: ModelFingerprint) -> LinearWeights:
    """The identity as weights of support `full`: every layer reads itself alone."""
    layers, width = print_.layers, print_.geometry.width
    eye_LGFO = torch.eye(width).expand(layers, 1, width, width).contiguous()
    bias_LGO = torch.zeros(layers, 1, width)
    chosen = tuple((layer,) for layer in range(layers))
    return LinearWeights(chosen, eye_LGFO, bias_LGO, eye_LGFO.clone(), bias_LGO.clone())


def oracle(folder: Path) -> LinearMapper:
    """The mapper from a model to itself."""
    model = fingerprint(folder)
    return _mapper(model, model, identity_weights(model))


def with_swapped_layers(folder: Path, one: int, two: int) -> LinearMapper:
    """Target layers `one` and `two` get each other's keys and values."""
    model = fingerprint(folder)
    exact = identity_weights(model)
    chosen = list(exact.source_layers)
    chosen[one], chosen[two] = chosen[two], chosen[one]
    swapped = LinearWeights(
        tuple(chosen), exact.k_weight_LGFO, exact.k_bias_LGO, exact.v_weight_LGFO, exact.v_bias_LGO
    )
    return _mapper(model, model, swapped)


def with_wrong_theta(folder: Path, theta: float) -> LinearMapper:
    """Keys are turned for the target with another theta than the target's."""
    model = fingerprint(folder)
    rope = model.rope.model_copy(update={"rope_theta": theta})
    return _mapper(model, model.model_copy(update={"rope": rope}), identity_weights(model))


def with_wrong_head_order(folder: Path) -> LinearMapper:
    """Every target layer's KV heads come in reverse order."""
    model = fingerprint(folder)
    exact = identity_weights(model)
    layers, _, width, _ = exact.k_weight_LGFO.shape
    by_head = exact.k_weight_LGFO.view(layers, 1, width, model.kv_heads, model.head_dim)
    reversed_LGFO = by_head.flip(3).reshape(layers, 1, width, width).contiguous()
    return _mapper(
        model,
        model,
        LinearWeights(
            exact.source_layers,
            reversed_LGFO,
            exact.k_bias_LGO,
            reversed_LGFO.clone(),
            exact.v_bias_LGO,
        ),
    )


def _mapper(
    source: ModelFingerprint, target: ModelFingerprint, weights: LinearWeights
) -> LinearMapper:
    return LinearMapper(source, target, weights, compute_dtype=torch.float32, dtype=torch.float32)
