"""Attention outputs layer by layer, with the native run's queries: one bad layer shows by itself.

In a whole forward pass an error in one layer changes the queries of all later ones. Here every
layer is asked the queries the native run asked, over the prefix cache alone. Knows nothing of
mappers.

Shapes: L layers, P prefix tokens, T query tokens, H KV heads, G query heads per KV head,
D head_dim, B buckets of prefix positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mappers.attention import Attended
from mappers.judging.records import LocalAttention

KV = tuple[Tensor, Tensor]
"""Keys (with RoPE) and values of one sequence, both [L, P, H, D]."""

# Queries compared per window; evenly spaced ones say as much as all.
_MAX_QUERIES = 32


@dataclass(frozen=True, slots=True)
class Query:
    """One layer's queries [H, G, T, D] with RoPE, fp32, and the factor on its attention scores."""

    q_HGTD: Tensor
    scale: float


def few_queries(one: Attended) -> Query:
    """Some queries, evenly spaced, of the one sequence that a layer attended for."""
    tokens = one.q_BQTD.shape[2]
    few = torch.linspace(0, tokens - 1, min(tokens, _MAX_QUERIES)).long().to(one.q_BQTD.device)
    q_HGTD = one.q_BQTD[0, :, few].float().unflatten(0, (one.k_BHPD.shape[1], -1))
    return Query(q_HGTD, one.scale)


class LocalSums:
    """Sums over windows of the cosines that `LocalAttention` reports as means."""

    def __init__(self, prefix_tokens: int) -> None:
        self._starts_B = bucket_starts(prefix_tokens)
        self._head: list[Tensor] = []
        self._bucket: list[Tensor] = []
        self._weight_LB = torch.zeros(())

    def add(
        self, queries: list[Query], native: KV, mapped: KV, other_text: KV, differs_P: Tensor
    ) -> None:
        """Add one window: three prefix caches of equal length, asked the same queries.

        `differs_P` tells where the other text has another token. Buckets in which the texts are
        mostly the same, as where both begin with one system message, tell nothing and are left out.
        """
        caches = (native, mapped, other_text)
        ends = (*self._starts_B[1:], len(differs_P))
        telling_B = torch.stack(
            [
                differs_P[begin:end].float().mean() >= 0.5
                for begin, end in zip(self._starts_B, ends, strict=True)
            ]
        )
        per_layer = [
            self._layer(query, [(k[layer].float(), v[layer].float()) for k, v in caches])
            for layer, query in enumerate(queries)
        ]
        heads, buckets, weights = (torch.stack(parts) for parts in zip(*per_layer, strict=True))
        self._head.append(heads)
        self._bucket.append(buckets * telling_B)
        self._weight_LB = self._weight_LB + weights * telling_B

    def report(self) -> LocalAttention:
        """Means over all windows added."""
        head_LCH = torch.stack(self._head).mean(0)
        told = (self._weight_LB > 0).all(0).nonzero().flatten()
        bucket_LCB = torch.stack(self._bucket).sum(0)[..., told] / self._weight_LB[:, None, told]
        return LocalAttention(
            mapped_LH=_rounded(head_LCH[:, 0]),
            other_text_LH=_rounded(head_LCH[:, 1]),
            bucket_starts_B=tuple(self._starts_B[at] for at in told.tolist()),
            mapped_LB=_rounded(bucket_LCB[:, 0]),
            other_text_LB=_rounded(bucket_LCB[:, 1]),
        )

    def _layer(self, query: Query, caches: list[KV]) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines [2, H] and weighted by bucket [2, B], of mapped and other; weights [B]."""
        scores = [
            torch.einsum("hgtd,phd->hgtp", query.q_HGTD, k_PHD) * query.scale for k_PHD, _ in caches
        ]
        whole = slice(0, scores[0].shape[-1])
        head_CH = torch.stack([cos.mean((1, 2)) for cos in _cosines(scores, caches, whole)])
        mass_HGTP = scores[0].softmax(-1)
        by_bucket, weights = [], []
        for begin, end in zip(self._starts_B, (*self._starts_B[1:], whole.stop), strict=True):
            part = slice(begin, end)
            mass_HGT = mass_HGTP[..., part].sum(-1)
            cosines = _cosines(scores, caches, part)
            by_bucket.append(torch.stack([(cos * mass_HGT).sum() for cos in cosines]))
            weights.append(mass_HGT.sum())
        return head_CH, torch.stack(by_bucket, 1), torch.stack(weights)


def bucket_starts(prefix_tokens: int) -> tuple[int, ...]:
    """First positions of the buckets of a prefix: 0, 4, 16, 64 and so on."""
    starts = [0]
    while (following := max(4, starts[-1] * 4)) < prefix_tokens:
        starts.append(following)
    return tuple(starts)


def _cosines(scores: list[Tensor], caches: list[KV], part: slice) -> list[Tensor]:
    """Cosines [H, G, T] of the first cache's output with each other one's, over `part` alone."""
    native, *others = (
        torch.einsum("hgtp,phd->hgtd", score_HGTP[..., part].softmax(-1), v_PHD[part])
        for score_HGTP, (_, v_PHD) in zip(scores, caches, strict=True)
    )
    return [cosine_similarity(native, other, dim=-1) for other in others]


def _rounded(values: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(value, 5) for value in row) for row in values.tolist())
