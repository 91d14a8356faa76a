"""Which source layers feed each target layer (arXiv 2608.03893, sections 2.3 and 3.2, appendix B).

`top`, the paper's rule, takes the layers of highest score, each by itself; `greedy` adds one layer
after the other, each time the one that explains most of what is left. Both look through matching
heads alone and from moments alone.

Shapes: S source layers, L target layers, H KV heads, D head_dim of the source, E of the target.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.fitting.blocks import PairMoments, PartMoments

# Keeps a probe solvable when a head has constant dimensions; far below any real variance.
_JITTER = 1e-9


def single_source_r2_SL(moments: PairMoments) -> Tensor:
    """R2 [S, L] of head-matched OLS from one source layer to one target layer.

    Averaged over target heads, then over keys and values. In-sample: a ranking, not a quality.
    """
    heads = range(moments.target.kv_heads)
    scores = [probe_SL(part, head) for part in (moments.k, moments.v) for head in heads]
    return torch.stack(scores).mean(0)


def probe_SL(part: PartMoments, head: int) -> Tensor:
    """R2 [S, L] of OLS from one source layer to one target layer, for one target head."""
    groups, layers = part.target.kv_heads, range(part.target.layers)
    rows = []
    for layer in range(part.source.layers):
        gram_DD, _ = part.gram((layer,), 0, head, groups)
        cross = part.cross((layer,), layers, head, groups)
        half = torch.linalg.solve_triangular(_factor(gram_DD), cross.xy_FO, upper=False)
        explained_L = half.square().sum(0).view(len(layers), -1).sum(-1)
        rows.append(explained_L / cross.yy_O.view(len(layers), -1).sum(-1))
    return torch.stack(rows).cpu()


def choose_layers(score_SL: Tensor, k: int) -> tuple[tuple[int, ...], ...]:
    """For each target layer the `k` source layers of highest score, in ascending order."""
    _require_k(k, score_SL.shape[0])
    top_kL = score_SL.topk(k, dim=0).indices
    return tuple(tuple(sorted(column)) for column in top_kL.T.tolist())


def choose_greedily(
    moments: PairMoments, k: int, layers: Iterable[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """For each target layer `k` source layers, chosen one after the other, in ascending order.

    Each is the one whose addition raises the head-matched OLS R2 most, averaged over target heads,
    keys and values. Costs k products of S D columns per target layer, head, keys and values.
    """
    _require_k(k, moments.source.layers)
    searches = [
        (part, head, _all_gram(part, head))
        for part in (moments.k, moments.v)
        for head in range(moments.target.kv_heads)
    ]
    chosen = []
    for layer in range(moments.target.layers) if layers is None else layers:
        states = [_Forward(part, head, gram, layer) for part, head, gram in searches]
        taken: list[int] = []
        for _ in range(k):
            gain_S = torch.stack([state.gains() for state in states]).mean(0)
            gain_S[taken] = -torch.inf
            taken.append(int(gain_S.argmax()))
            for state in states:
                state.add(taken[-1])
        chosen.append(tuple(sorted(taken)))
    return tuple(chosen)


class _Forward:
    """Forward selection for one target layer and head, by a Cholesky factor that grows by blocks.

    `self._rows` are the rows of the factor for the layers taken so far, over all features; the
    diagonal blocks of what the taken layers leave unexplained are kept up to date.
    """

    def __init__(self, part: PartMoments, head: int, gram_FF: Tensor, layer: int) -> None:
        layers, size = part.source.layers, part.source.head_dim
        cross = part.cross(range(layers), (layer,), head, part.target.kv_heads)
        self._gram_FF = gram_FF
        self._size = size
        self._left_SDD = torch.stack(
            [gram_FF[self._of(at), self._of(at)] for at in range(layers)]
        ).clone()
        self._least_S = _JITTER * self._left_SDD.diagonal(dim1=1, dim2=2).mean(1)
        self._cross_SDE = cross.xy_FO.view(layers, size, -1).clone()
        self._total = cross.yy_O.sum()
        self._rows: list[Tensor] = []

    def _of(self, layer: int) -> slice:
        return slice(layer * self._size, (layer + 1) * self._size)

    def gains(self) -> Tensor:
        """R2 [S] that each layer would add. Of a layer taken already it is about 0, or noise."""
        chol_SDD = _factor(self._left_SDD, self._least_S)
        half_SDE = torch.linalg.solve_triangular(chol_SDD, self._cross_SDE, upper=False)
        gain_S: Tensor = half_SDE.square().sum((1, 2)) / self._total
        return gain_S

    def add(self, layer: int) -> None:
        """Take a layer: what it explains is gone from the others and from the outputs."""
        own = self._of(layer)
        left_DF = self._gram_FF[own].clone()
        for row_DF in self._rows:
            left_DF -= row_DF[:, own].T @ row_DF
        chol_DD = _factor(self._left_SDD[layer], self._least_S[layer])
        row_DF = torch.linalg.solve_triangular(chol_DD, left_DF, upper=False)
        half_DE = torch.linalg.solve_triangular(chol_DD, self._cross_SDE[layer], upper=False)
        row_SDD = row_DF.view(self._size, -1, self._size).transpose(0, 1)
        self._left_SDD -= row_SDD.mT @ row_SDD
        self._cross_SDE -= row_SDD.mT @ half_DE
        self._rows.append(row_DF)


def _all_gram(part: PartMoments, head: int) -> Tensor:
    gram_FF, _ = part.gram(range(part.source.layers), 0, head, part.target.kv_heads)
    return gram_FF


def _factor(gram: Tensor, least: Tensor | None = None) -> Tensor:
    """Cholesky factors [..., D, D] of positive semidefinite matrices, kept solvable."""
    if least is None:
        least = _JITTER * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    jitter = (least + torch.finfo(torch.float64).tiny)[..., None, None]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor: Tensor = torch.linalg.cholesky_ex(gram + jitter * eye)[0]
    return factor


def _require_k(k: int, layers: int) -> None:
    if not 1 <= k <= layers:
        raise MapperError(f"k must lie between 1 and the source's {layers} layers, not {k}")
