"""How much every token's KV matters to the target's attention, as weights of a regression.

CacheBridge's ATTN-REPAIR (arXiv 2609.00891): at log-spaced boundaries of a sequence the target's
first query after a prefix says how far an error in each prefix token's key or value would show in
its attention output. Knows HF models by their attention interface.

Shapes: B sequences, T tokens, N = B*T, L layers, H KV heads, G head groups of the mapper (1 or H),
U query heads per KV head, J boundaries, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BOUNDARIES = 32
"""Boundaries per sequence in the paper."""

_FIRST_BOUNDARY = 12
_TINY = 1e-30

Relevance = tuple[Tensor, Tensor]
"""Of keys and of values, [L, H, N], fp32, of mean 1 for every layer and head."""


def boundaries(tokens: int) -> tuple[int, ...]:
    """Up to 32 positions, log-spaced from 12 to the last, whose queries are asked."""
    first = min(_FIRST_BOUNDARY, tokens - 1)
    ratio = (tokens - 1) / first
    steps = (first * ratio ** (step / (BOUNDARIES - 1)) for step in range(BOUNDARIES))
    return tuple(sorted({round(step) for step in steps}))


def relevance(
    q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Relevance [H, N] of one layer's keys and values, of mean 1 for every head and sequence.

    The query at each boundary b attends to keys 0..b-1 with weights a, giving o. To it matter, of
    token i's value, a_i^2, and of its key, a_i^2 |v_i - o|^2 |q|^2 scale^2: the squares of what
    attention's output changes by per unit of error. Both are summed over the query heads that share
    a KV head and brought to sum 1 at every boundary.
    """
    tokens, heads = k_BHTD.shape[2], k_BHTD.shape[1]
    at_J = torch.tensor(boundaries(tokens), device=k_BHTD.device)
    q_BHUJD = q_BQTD[:, :, at_J].float().unflatten(1, (heads, -1))
    k_BHTD, v_BHTD = k_BHTD.float(), v_BHTD.float()
    scores = torch.einsum("bhujd,bhtd->bhujt", q_BHUJD, k_BHTD) * scale
    visible_JT = torch.arange(tokens, device=at_J.device) < at_J[:, None]
    a_BHUJT = scores.masked_fill_(~visible_JT, -torch.inf).softmax(-1)
    o_BHUJD = torch.einsum("bhujt,bhtd->bhujd", a_BHUJT, v_BHTD)
    away = torch.einsum("bhujd,bhtd->bhujt", o_BHUJD, v_BHTD).mul_(-2)
    away += v_BHTD.square().sum(-1)[:, :, None, None]
    away += o_BHUJD.square().sum(-1, keepdim=True)
    slope = q_BHUJD.square().sum(-1, keepdim=True) * scale**2
    square = a_BHUJT.square_()
    both = []
    for raw in ((square * away.clamp_(min=0) * slope).sum(2), square.sum(2)):
        share_BHJT = raw / raw.sum(-1, keepdim=True).clamp_(min=_TINY)
        sum_BHT = share_BHJT.sum(2) * (tokens / len(at_J))
        both.append(sum_BHT.transpose(0, 1).flatten(1))
    return both[0], both[1]


def relevance_reference(
    q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`relevance`, written to be read: one sequence, KV head, boundary and query head at a time."""
    sequences, heads, tokens, _ = k_BHTD.shape
    shared = q_BQTD.shape[1] // heads
    keys, values = torch.zeros(2, heads, sequences, tokens)
    asked = boundaries(tokens)
    for b in range(sequences):
        for h in range(heads):
            for at in asked:
                k_PD, v_PD = k_BHTD[b, h, :at].float(), v_BHTD[b, h, :at].float()
                key_P, value_P = torch.zeros(2, at)
                for u in range(shared):
                    q_D = q_BQTD[b, h * shared + u, at].float()
                    a_P = ((k_PD @ q_D) * scale).softmax(0)
                    o_D = a_P @ v_PD
                    value_P += a_P**2
                    away_P = ((v_PD - o_D) ** 2).sum(1)
                    key_P += a_P**2 * away_P * (q_D**2).sum() * scale**2
                keys[h, b, :at] += key_P / key_P.sum()
                values[h, b, :at] += value_P / value_P.sum()
    mean_1 = tokens / len(asked)
    return keys.flatten(1) * mean_1, values.flatten(1) * mean_1


def softened(relevance_HN: Tensor, sequence_tokens: int, power: float) -> Tensor:
    """Relevance to a power, brought back to mean 1 for every head and sequence.

    Squared attention is concentrated on few tokens, on which 1, the paper's power, spends most of
    the sample.
    """
    soft_HBT = relevance_HN.view(len(relevance_HN), -1, sequence_tokens).pow(power)
    return (soft_HBT / soft_HBT.mean(-1, keepdim=True)).flatten(1)


def grouped(relevance_LHN: Tensor, groups: int) -> Tensor:
    """Relevance [L, G, N] for a mapper's head groups: each head's own, or the mean of all."""
    return relevance_LHN.mean(1, keepdim=True) if groups == 1 else relevance_LHN


class RelevanceSums:
    """Sums of squares of relevance over all tokens, which decide how far weights may spread."""

    def __init__(self, layers: int, heads: int) -> None:
        self.tokens = 0
        self._squares = {
            f"{part}_{groups}": torch.zeros(layers, groups, dtype=torch.float64)
            for part in ("k", "v")
            for groups in {1, heads}
        }

    def add(self, both: Relevance) -> None:
        """Add the relevance of N tokens."""
        self.tokens += both[0].shape[-1]
        for name, sums_LG in self._squares.items():
            part_LHN = both[0] if name.startswith("k") else both[1]
            sums_LG += grouped(part_LHN, sums_LG.shape[1]).double().square().sum(-1).cpu()

    def alphas(self, groups: int, width: int) -> tuple[Tensor, Tensor]:
        """`kish_alpha` [L, G] of keys and of values for regressions on `width` features."""
        least = min(self.tokens, 2 * width)
        keys, values = (
            kish_alpha(self._squares[f"{part}_{groups}"], self.tokens, least) for part in ("k", "v")
        )
        return keys, values

    def tensors(self) -> dict[str, Tensor]:
        """Everything summed; `load` and `merge` take it back."""
        return self._squares | {"tokens": torch.tensor([self.tokens])}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state that `tensors` gave."""
        self.tokens = int(tensors["tokens"])
        for name, sums in self._squares.items():
            sums.copy_(tensors[name])

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the state that `tensors` gave elsewhere."""
        self.tokens += int(tensors["tokens"])
        for name, sums in self._squares.items():
            sums += tensors[name]


def kish_alpha(square_sum: Tensor, tokens: int, least: float) -> Tensor:
    """The largest alpha in [0, 1] that leaves an effective sample of `least` tokens.

    Of n weights w = 1 + alpha (r - 1), where r has mean 1, Kish's effective sample size
    (sum w)^2 / sum w^2 is n^2 / (n + alpha^2 (sum r^2 - n)).
    """
    assert least <= tokens, "weights cannot make a sample larger"
    spread = (square_sum - tokens).clamp(min=_TINY)
    return ((tokens**2 / least - tokens) / spread).sqrt().clamp(max=1.0)


def blended(relevance_LGN: Tensor, alpha_LG: Tensor) -> Tensor:
    """Weights 1 + alpha (r - 1), [L, G, N]."""
    alpha = alpha_LG.to(relevance_LGN.device, relevance_LGN.dtype)[..., None]
    return (relevance_LGN - 1) * alpha + 1
