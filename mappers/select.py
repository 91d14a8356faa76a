"""Which source layers feed each target layer (arXiv 2608.03893, sections 2.3 and 3.2).

A fixed top-k by single-source score, computed from moments alone.

Shapes: S source layers, L target layers, H KV heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.geometry import KVGeometry
from mappers.moments import Moments, PairMoments

# Keeps a probe solvable when a head has constant dimensions; far below any real variance.
_JITTER = 1e-9


def matched_head(head: int, source: KVGeometry, target: KVGeometry) -> int:
    """The source KV head that stands for target KV head `head`; itself when the counts agree."""
    return head * source.kv_heads // target.kv_heads


def single_source_r2_SL(moments: PairMoments) -> Tensor:
    """R2 [S, L] of head-matched OLS from one source layer to one target layer.

    Averaged over target heads, then over keys and values. In-sample: a ranking, not a quality.
    """
    scores = [_probe_SL(part, moments.source, moments.target) for part in (moments.k, moments.v)]
    return torch.stack(scores).mean(0)


def choose_layers(score_SL: Tensor, k: int) -> tuple[tuple[int, ...], ...]:
    """For each target layer the `k` source layers of highest score, in ascending order."""
    layers = score_SL.shape[0]
    if not 1 <= k <= layers:
        raise MapperError(f"k must lie between 1 and the source's {layers} layers, not {k}")
    top_kL = score_SL.topk(k, dim=0).indices
    return tuple(tuple(sorted(column)) for column in top_kL.T.tolist())


def _probe_SL(part: Moments, source: KVGeometry, target: KVGeometry) -> Tensor:
    s, hs, ds = source.layers, source.kv_heads, source.head_dim
    lt, ht, dt = target.layers, target.kv_heads, target.head_dim
    xx = part.xx_FF.view(s, hs, ds, s, hs, ds)
    xy = part.xy_FO.view(s, hs, ds, lt, ht, dt)
    total_LH = part.yy_O.view(lt, ht, dt).sum(-1)
    score_SL = torch.zeros(s, lt, dtype=torch.float64)
    for head in range(ht):
        a = matched_head(head, source, target)
        for layer in range(s):
            gram_DD = xx[layer, a, :, layer, a, :]
            jitter = _JITTER * gram_DD.diagonal().mean() + torch.finfo(torch.float64).tiny
            chol_DD = torch.linalg.cholesky(gram_DD + jitter * torch.eye(ds, dtype=torch.float64))
            cross = xy[layer, a, :, :, head, :].reshape(ds, lt * dt)
            half = torch.linalg.solve_triangular(chol_DD, cross, upper=False)
            explained_L = half.square().sum(0).view(lt, dt).sum(-1)
            score_SL[layer] += explained_L / total_LH[:, head]
    return score_SL / ht
