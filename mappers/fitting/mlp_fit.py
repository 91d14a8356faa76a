"""Fitting the nonlinear map of `mlp` to position-free keys and values, by squared error.

Knows what memory training takes and how scaling and a linear map go into the result; the training
itself is `mlp_train`'s. Knows no models: tokens come from the caller.

Shapes: S source layers, L target layers, N tokens, H KV heads, D head_dim, G groups of heads with
features of their own, F features of one head, O outputs of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.fitting.mlp_train import (
    Batches,
    LayerTraining,
    MlpSettings,
    Scaling,
    Spread,
    new_networks,
    train,
)
from mappers.fitting.moments import available_memory_bytes
from mappers.geometry import KVGeometry
from mappers.manifest import LayerR2, Support
from mappers.mlp import MlpLayer, MlpPart, MlpWeights, gather_features, network_parameters
from mappers.supports import feature_width, groups
from mappers.weights import LinearWeights

_Linear = tuple[Tensor, Tensor] | None

# fp32: weight, gradient, two moments of Adam, best weight so far; and a copy in compute dtype.
_BYTES_PER_PARAMETER = 24


def training_bytes(
    source: KVGeometry,
    target: KVGeometry,
    k: int,
    support: Support,
    settings: MlpSettings,
    *,
    residual: bool,
    layers: int,
) -> int:
    """Peak bytes of training so many target layers together, and of all trained weights.

    The tokens that the caller holds come on top.
    """
    hidden = settings.hidden
    one_layer = network_parameters(source, target, k, support, hidden, residual=residual)
    features = feature_width(support, k, source, target)
    # Of one layer at a time: features, two hidden layers with their gradients, outputs.
    activations = target.kv_heads * (features + 6 * hidden + 4 * target.head_dim)
    kept = 4 * (target.layers - layers) * one_layer
    training = layers * one_layer * _BYTES_PER_PARAMETER
    return kept + training + 4 * settings.batch_tokens * activations


def layers_that_fit(
    source: KVGeometry,
    target: KVGeometry,
    k: int,
    support: Support,
    settings: MlpSettings,
    available_bytes: int,
    *,
    residual: bool,
) -> int:
    """Most target layers that train together in `available_bytes`; MapperError when not even one.

    Fewer layers at a time mean more passes over the tokens.
    """

    def needed(layers: int) -> int:
        return training_bytes(
            source, target, k, support, settings, residual=residual, layers=layers
        )

    if needed(1) > available_bytes:
        raise MapperError(
            f"training networks for this pair takes {needed(1) / 1e9:.1f} GB, one layer at a time, "
            f"but only {available_bytes / 1e9:.1f} GB of memory is available; use fewer hidden "
            f"units, a smaller k or support head_local"
        )
    counts = range(1, target.layers + 1)
    return max(layers for layers in counts if needed(layers) <= available_bytes)


def fit_mlp(
    source: KVGeometry,
    target: KVGeometry,
    source_layers: tuple[tuple[int, ...], ...],
    support: Support,
    batches: Batches,
    heldout: Batches,
    settings: MlpSettings,
    *,
    linear: LinearWeights | None = None,
    layers_per_pass: int | None = None,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[MlpWeights, LayerR2]:
    """Train all networks; gives fp32 weights and the R2 of every layer on the `heldout` tokens.

    With `linear` (of the same layers and support) networks learn what it leaves over, starting from
    nothing, so that the result is no worse on `heldout` (tokens weighed as in training); without,
    they are the paper's, and with few tokens may stay below the linear map.
    The same seed gives the same weights. `layers_per_pass` defaults to what fits in memory.
    `advance` gets the tokens of every step: for each pass `max_epochs` times all tokens, or fewer.
    R2 is flattered a little, since the same tokens chose the epochs.

    Raises MapperError when memory does not suffice, `linear` reads other features or the first
    token's weight comes without the length of sequences.
    """
    number = groups(support, source, target)
    if settings.first_token_weight > 1 and settings.sequence_tokens is None:
        raise MapperError("first_token_weight needs sequence_tokens to find the first tokens")
    if linear is not None:
        same = linear.source_layers == source_layers and linear.k_weight_LGFO.shape[1] == number
        if not same:
            raise MapperError("the linear map reads other features; fit it on the same layers")
    together = layers_per_pass or layers_that_fit(
        source,
        target,
        len(source_layers[0]),
        support,
        settings,
        available_memory_bytes(device),
        residual=linear is not None,
    )
    k_x, v_x, k_y, v_y = _spreads(batches, device)
    scalings = Scaling.of(k_x, k_y), Scaling.of(v_x, v_y)
    linears: tuple[_Linear, _Linear] = None, None
    if linear is not None:
        linears = (
            (linear.k_weight_LGFO, linear.k_bias_LGO),
            (linear.v_weight_LGFO, linear.v_bias_LGO),
        )
    trained: tuple[list[MlpLayer], list[MlpLayer]] = [], []
    error_LH: tuple[list[Tensor], list[Tensor]] = [], []
    for begin in range(0, target.layers, together):
        layers = range(begin, min(begin + together, target.layers))
        parts: tuple[dict[int, LayerTraining], dict[int, LayerTraining]] = {}, {}
        for which, (part, scaling, solved) in enumerate(zip(parts, scalings, linears, strict=True)):
            for layer in layers:
                seed = settings.seed + 2 * layer + which
                net = _new(scaling, layer, source_layers[layer], number, settings.hidden, seed)
                if solved is not None:
                    net = _beside(net, solved, scaling, layer, source_layers[layer])
                part[layer] = LayerTraining(
                    _trainable(net, device),
                    source_layers[layer],
                    number,
                    scaling.scale_y_LHD[layer],
                    settings.patience,
                )
        train(parts, scalings, batches, heldout, settings, advance)
        for part, scaling, into, errors in zip(parts, scalings, trained, error_LH, strict=True):
            for layer, fitted in part.items():
                into.append(_unscaled(fitted.best, scaling, layer))
                errors.append((fitted.best_error_H * fitted.variance_H).cpu())
    weights = MlpWeights(
        source_layers, _stacked(trained[0], scalings[0]), _stacked(trained[1], scalings[1])
    )
    _, _, k_unseen, v_unseen = _spreads(heldout, device)
    r2 = LayerR2(k=_r2(error_LH[0], k_unseen), v=_r2(error_LH[1], v_unseen))
    return weights, r2


def _spreads(batches: Batches, device: torch.device | str) -> tuple[Spread, ...]:
    """Of source keys, source values, target keys and target values."""
    spreads = Spread(), Spread(), Spread(), Spread()
    for batch in batches():
        for spread, kv in zip(spreads, batch, strict=True):
            spread.add(kv.to(device))
    return spreads


def _new(
    scaling: Scaling, layer: int, chosen: tuple[int, ...], number: int, hidden: int, seed: int
) -> MlpLayer:
    features = len(chosen) * scaling.mean_x_SHD[0].numel() // number
    heads, dim = scaling.mean_y_LHD.shape[1:]
    return new_networks(features, (heads, dim), hidden, torch.Generator().manual_seed(seed))


def _beside(
    net: MlpLayer,
    solved: tuple[Tensor, Tensor],
    scaling: Scaling,
    layer: int,
    chosen: tuple[int, ...],
) -> MlpLayer:
    """The networks added to a linear map of unscaled features, here brought to scaled ones."""
    weight_GFO, bias_GO = (tensor[layer].double().cpu() for tensor in solved)
    number, features, _ = weight_GFO.shape
    heads, dim = net.last_bias_HD.shape
    mean_y_HD, scale_y_HD = (
        scaling.mean_y_LHD[layer].cpu().double(),
        scaling.scale_y_LHD[layer].cpu().double(),
    )
    mean_GF, scale_GF = (
        gather_features(x_SHD.cpu().double()[:, None], chosen, number)[:, 0]
        for x_SHD in (scaling.mean_x_SHD, scaling.scale_x_SHD)
    )
    bias_HD = (bias_GO + torch.einsum("gf,gfo->go", mean_GF, weight_GFO)).view(heads, dim)
    weight_GFO = weight_GFO * scale_GF[:, :, None]
    weight_HFD = weight_GFO.view(number, features, -1, dim).transpose(1, 2).flatten(0, 1)
    return net._replace(
        skip_HFD=(weight_HFD / scale_y_HD[:, None]).float(),
        last_bias_HD=((bias_HD - mean_y_HD) / scale_y_HD).float(),
    )


def _trainable(net: MlpLayer, device: torch.device | str) -> MlpLayer:
    """On the device, with gradients for all but the linear map."""
    moved = net.map(lambda tensor: tensor.to(device).requires_grad_())
    if moved.skip_HFD is not None:
        moved.skip_HFD.requires_grad_(False)
    return moved


def _unscaled(net: MlpLayer, scaling: Scaling, layer: int) -> MlpLayer:
    """The same networks, on the CPU, giving unscaled keys or values."""
    mean_HD, scale_HD = scaling.mean_y_LHD[layer], scaling.scale_y_LHD[layer]
    skip_HFD = None if net.skip_HFD is None else net.skip_HFD * scale_HD[:, None]
    unscaled = net._replace(
        last_HUD=net.last_HUD * scale_HD[:, None],
        last_bias_HD=net.last_bias_HD * scale_HD + mean_HD,
        skip_HFD=skip_HFD,
    )
    return unscaled.map(torch.Tensor.cpu)


def _stacked(layers: list[MlpLayer], scaling: Scaling) -> MlpPart:
    stacked = [torch.stack(column) for column in zip(*(net[:6] for net in layers), strict=True)]
    skips = [net.skip_HFD for net in layers if net.skip_HFD is not None]
    part = MlpPart(scaling.mean_x_SHD.cpu(), scaling.scale_x_SHD.cpu(), *stacked)
    return replace(part, skip_LHFD=torch.stack(skips)) if skips else part


def _r2(error_LH: list[Tensor], unseen: Spread) -> tuple[float, ...]:
    """R2 per layer, pooled over heads and dimensions, as `ridge.r2_L` has it."""
    error_L = torch.stack(error_LH).double().sum(-1)
    total_L = unseen.deviation.sum((-1, -2)).cpu()
    return tuple((1 - error_L / total_L).tolist())
