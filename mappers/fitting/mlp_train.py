"""One target layer's networks while they train, and the loop that trains several layers together.

Every network (one head) stops by itself where held-out tokens say, so it matters neither which
others train beside it nor in how many passes. Knows neither models nor files.

Shapes: S source layers, L target layers, N tokens, H KV heads, D head_dim, F features of one head,
U units of a hidden layer; `...` any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.mlp import HIDDEN_UNITS, MlpLayer, gather_features

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Position-free source keys and values [S, N, H, D], then the target's [L, N, H, D]."""

Batches = Callable[[], Iterator[Batch]]
"""Every call goes through all tokens once. Batches may differ in length."""

# An epoch that lowers a network's held-out error by less than this share tries its patience.
_LEAST_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class MlpSettings:
    """How networks are trained.

    `batch_tokens` make one step; the rate falls from `learning_rate` to 0 along half a cosine over
    `max_epochs`. A network ends after `patience` epochs in a row without gain on held-out tokens
    and keeps its best epoch. With `first_token_weight` above 1 every `sequence_tokens`-th token of
    a batch counts so many times, as in the ridge; batches must then be whole sequences, of held-out
    text too.
    """

    hidden: int = HIDDEN_UNITS
    learning_rate: float = 1e-3
    batch_tokens: int = 512
    max_epochs: int = 30
    patience: int = 4
    first_token_weight: int = 1
    sequence_tokens: int | None = None
    compute_dtype: torch.dtype = torch.bfloat16
    seed: int = 0


class Spread:
    """Mean and squared deviations of every element of [..., N, H, D] over all N.

    fp32 within a batch, fp64 across batches.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self.deviation = torch.zeros(())

    def add(self, kv: Tensor) -> None:
        """Chan's update with one batch."""
        variance, mean = torch.var_mean(kv.float(), dim=-3, correction=0)
        count, mean = kv.shape[-3], mean.double()
        total = self.count + count
        shift = mean - self.mean.to(mean)
        between = shift.square() * (self.count * count / total)
        self.deviation = self.deviation + variance.double() * count + between
        self.mean = mean - shift * (self.count / total)
        self.count = total

    @property
    def scale(self) -> Tensor:
        """Standard deviation; 1 for an element that never changes."""
        variance = self.deviation / self.count
        return torch.where(variance > 0, variance, 1.0).sqrt()


@dataclass(frozen=True, slots=True)
class Scaling:
    """What brings keys, or values, of source [S, H, D] and target [L, H, D] to mean 0, variance 1.

    All fp32 and each token counted once, whatever weight its error has.
    """

    mean_x_SHD: Tensor
    scale_x_SHD: Tensor
    mean_y_LHD: Tensor
    scale_y_LHD: Tensor

    @classmethod
    def of(cls, x: Spread, y: Spread) -> Scaling:
        """From what was measured of source and target."""
        return cls(x.mean.float(), x.scale.float(), y.mean.float(), y.scale.float())

    def source(self, x_SNHD: Tensor) -> Tensor:
        """Scaled source, fp32."""
        return (x_SNHD.to(self.mean_x_SHD) - self.mean_x_SHD[:, None]) / self.scale_x_SHD[:, None]

    def target(self, y_NHD: Tensor, layer: int) -> Tensor:
        """One scaled target layer, fp32."""
        return (y_NHD.to(self.mean_y_LHD) - self.mean_y_LHD[layer]) / self.scale_y_LHD[layer]


class LayerTraining:
    """The networks of one target layer's keys or values, and the best of each so far.

    They map scaled features to scaled targets. An element's error counts with its variance, so the
    loss is the squared error of unscaled keys or values, as a share of their variance.
    """

    def __init__(
        self, net: MlpLayer, chosen: tuple[int, ...], groups: int, scale_HD: Tensor, patience: int
    ) -> None:
        self.chosen = chosen
        # Every network of the layer has run out of patience.
        self.ended = False
        self.variance_H = scale_HD.square().sum(-1)
        self.net = net
        self.best = net.map(lambda tensor: tensor.detach().clone())
        self.best_error_H = torch.full_like(self.variance_H, math.inf)
        self._best_judged_H = self.best_error_H
        self._groups = groups
        self._share_HD = scale_HD.square() / self.variance_H[:, None]
        self._patience = patience
        self._idle_H = torch.zeros_like(self.variance_H, dtype=torch.int64)

    @property
    def parameters(self) -> list[Tensor]:
        """What training changes: all but a linear map beside the networks."""
        return [tensor for tensor in self.net if tensor is not None and tensor.requires_grad]

    def error_HN(self, x_SNHD: Tensor, y_NHD: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """Squared error of every token on scaled source and target, as a share of the variance."""
        features_GNF = gather_features(x_SNHD, self.chosen, self._groups)
        heads = self._share_HD.shape[0]
        out_HND = self.net.forward(features_GNF.expand(heads, -1, -1), compute_dtype)
        gap_HND = out_HND - y_NHD.transpose(0, 1)
        return (gap_HND.square() * self._share_HD[:, None]).sum(-1)

    def judge(self, judged_H: Tensor, error_H: Tensor) -> None:
        """Keep the networks of least `judged_H`, which weighs tokens as training does.

        `best_error_H` is what they had of `error_H`, where tokens count alike. Networks whose
        patience is spent stay as kept.
        """
        going_H = self._idle_H < self._patience
        better_H = going_H & (judged_H < self._best_judged_H)
        gain_H = judged_H < self._best_judged_H * (1 - _LEAST_GAIN)
        self._idle_H = torch.where(going_H, torch.where(gain_H, 0, self._idle_H + 1), self._idle_H)
        self._best_judged_H = torch.where(better_H, judged_H, self._best_judged_H)
        self.best_error_H = torch.where(better_H, error_H, self.best_error_H)
        self.ended = bool((self._idle_H >= self._patience).all())
        for kept, now in zip(self.best, self.net, strict=True):
            if kept is not None and now is not None:
                kept[better_H] = now.detach()[better_H]


def new_networks(
    features: int, shape_HD: tuple[int, int], hidden: int, generator: torch.Generator
) -> MlpLayer:
    """Untrained networks on the CPU: He's initial weights, and 0 for the last matrix."""
    heads, dim = shape_HD

    def matrix(inputs: int, outputs: int) -> Tensor:
        return torch.randn(heads, inputs, outputs, generator=generator) * math.sqrt(2 / inputs)

    return MlpLayer(
        matrix(features, hidden),
        torch.zeros(heads, hidden),
        matrix(hidden, hidden),
        torch.zeros(heads, hidden),
        torch.zeros(heads, hidden, dim),
        torch.zeros(heads, dim),
    )


def train(
    parts: tuple[dict[int, LayerTraining], dict[int, LayerTraining]],
    scalings: tuple[Scaling, Scaling],
    batches: Batches,
    heldout: Batches,
    settings: MlpSettings,
    advance: Callable[[int], None],
) -> None:
    """Train the given target layers' networks of keys and of values, in place, to their ends."""
    every = [layer for part in parts for layer in part.values()]
    # fused: one pass over parameters and moments, which is most of a step on a CPU.
    adam = torch.optim.Adam([p for layer in every for p in layer.parameters], fused=True)
    _evaluate(parts, scalings, heldout, settings)
    generator = torch.Generator()
    for epoch in range(settings.max_epochs):
        adam.param_groups[0]["lr"] = settings.learning_rate * (
            0.5 + 0.5 * math.cos(math.pi * epoch / settings.max_epochs)
        )
        generator.manual_seed(settings.seed + epoch)
        for batch in batches():
            tokens = batch[0].shape[1]
            weight_N = _weights(tokens, settings)
            pieces = math.ceil(tokens / settings.batch_tokens)
            for piece in torch.randperm(tokens, generator=generator).chunk(pieces):
                _step(parts, scalings, batch, piece, weight_N[piece], adam, settings.compute_dtype)
                advance(len(piece))
        _evaluate(parts, scalings, heldout, settings)
        if all(layer.ended for layer in every):
            return


def _step(
    parts: tuple[dict[int, LayerTraining], dict[int, LayerTraining]],
    scalings: tuple[Scaling, Scaling],
    batch: Batch,
    piece: Tensor,
    weight_N: Tensor,
    adam: torch.optim.Adam,
    compute_dtype: torch.dtype,
) -> None:
    adam.zero_grad()
    for part, scaling, x, y in zip(parts, scalings, batch[:2], batch[2:], strict=True):
        x_SNHD = scaling.source(x[:, piece.to(x.device)])
        for index, layer in part.items():
            if not layer.ended:
                y_NHD = scaling.target(y[index, piece.to(y.device)], index)
                error_HN = layer.error_HN(x_SNHD, y_NHD, compute_dtype)
                # Layers share nothing, so each may drop what it keeps for its gradient at once.
                (error_HN * weight_N.to(error_HN)).mean(1).sum().backward()
    adam.step()


@torch.no_grad()
def _evaluate(
    parts: tuple[dict[int, LayerTraining], dict[int, LayerTraining]],
    scalings: tuple[Scaling, Scaling],
    heldout: Batches,
    settings: MlpSettings,
) -> None:
    sums: dict[LayerTraining, Tensor] = {}
    for batch in heldout():
        tokens = batch[0].shape[1]
        count_2N = torch.stack([_weights(tokens, settings), torch.ones(tokens)])
        for begin in range(0, tokens, settings.batch_tokens):
            step = slice(begin, begin + settings.batch_tokens)
            for part, scaling, x, y in zip(parts, scalings, batch[:2], batch[2:], strict=True):
                x_SNHD = scaling.source(x[:, step])
                for index, layer in part.items():
                    y_NHD = scaling.target(y[index, step], index)
                    error_HN = layer.error_HN(x_SNHD, y_NHD, settings.compute_dtype)
                    sum_2H = count_2N[:, step].to(error_HN) @ error_HN.T
                    sums[layer] = sums[layer] + sum_2H if layer in sums else sum_2H
    for layer, (judged_H, error_H) in sums.items():
        layer.judge(judged_H, error_H)


def _weights(tokens: int, settings: MlpSettings) -> Tensor:
    """What every token of a batch counts; 1 on average."""
    weight_N = torch.ones(tokens)
    if settings.first_token_weight > 1:
        weight_N[:: settings.sequence_tokens] = settings.first_token_weight
    return weight_N / weight_N.mean()
