"""A lean Llama forward pass for the distillation: one function for the large and the small model.

Everything runs in bf16 with fp32 inside the norms, as the deployed models do. A low-rank update is
merged into its weight once per step, so the loop trains exactly the rounded weights that are
written later. It does not know of losses, data or files.

Shapes: N rows, T tokens, E hidden, H heads, D head_dim, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from cluster.quickstart.adapter import KEPT_LAYERS, LINEARS, LORA_RANK, NORMS

HIDDEN = 576
HEADS = 9
KV_HEADS = 3
HEAD_DIM = 64
WIDTH = 1536
ROPE_THETA = 100_000.0
NORM_EPS = 1e-5


LINEAR_SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
# Linears that read the same input are multiplied at once.
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class MergedLora(torch.autograd.Function):
    """`x @ W^T` with W merged: gradients reach x and the factors of W's parts, never W itself."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, w_OI: Tensor, a_RI: Tensor, *parts_OR: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, w_OI, a_RI, *parts_OR)
        return x_TI @ w_OI.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, w_OI, a_RI, *parts_OR = ctx.saved_tensors
        (dy_TO,) = grads
        low_TR = x_TI @ a_RI.T
        dlow, dparts = [], []
        dys = dy_TO.split([len(part) for part in parts_OR], 1)
        lows = low_TR.chunk(len(parts_OR), 1)
        for part_OR, dy, low in zip(parts_OR, dys, lows, strict=True):
            dlow.append(dy @ part_OR)
            dparts.append(dy.T @ low)
        return dy_TO @ w_OI, None, torch.cat(dlow, 1).T @ x_TI, *dparts


@dataclass
class Layer:
    """One decoder layer: bf16 weights by group, norm weights and, when trained, bf16 factors."""

    weights: dict[str, Tensor]
    norms: dict[str, Tensor]
    factors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def linear(self, group: str, x_TI: Tensor) -> Tensor:
        if group in self.factors:
            return MergedLora.apply(x_TI, self.weights[group], *self.factors[group])  # type: ignore[no-any-return,no-untyped-call]
        return x_TI @ self.weights[group].T


def load_large(folder: Path) -> tuple[Tensor, list[Layer], Tensor]:
    """Embeddings [vocab, E], the layers and the final norm weight [E] of a model folder, bf16."""
    state = load_file(folder / "model.safetensors")
    count = 1 + max(int(name.split(".")[2]) for name in state if ".layers." in name)
    layers = [
        Layer(
            {
                group: torch.cat([state[f"model.layers.{at}.{name}.weight"] for name in names])
                for group, names in GROUPS.items()
            },
            {name: state[f"model.layers.{at}.{name}"] for name in NORMS},
        )
        for at in range(count)
    ]
    return state["model.embed_tokens.weight"], layers, state["model.norm.weight"]


def new_factors(large: Sequence[Layer], norm_E: Tensor) -> dict[str, Tensor]:
    """A fresh adapter in fp32 (names as in the adapter file) that leaves the kept layers as is."""
    adapter = {"norm.weight": norm_E.float().clone()}
    for to, source in enumerate(KEPT_LAYERS):
        for name in LINEARS:
            rows, columns = LINEAR_SHAPES[name]
            a_RI = torch.randn(LORA_RANK, columns) / columns**0.5
            adapter[f"layers.{to}.{name}.lora_a"] = a_RI
            adapter[f"layers.{to}.{name}.lora_b"] = torch.zeros(rows, LORA_RANK)
        for name in NORMS:
            adapter[f"layers.{to}.{name}"] = large[source].norms[name].float().clone()
    return adapter


def small_layers(large: Sequence[Layer], adapter: dict[str, Tensor]) -> list[Layer]:
    """The small model's layers; gradients flow to every tensor of `adapter` that asks for them."""
    layers = []
    for to, source in enumerate(KEPT_LAYERS):
        weights, factors = {}, {}
        for group, names in GROUPS.items():
            a_s = [adapter[f"layers.{to}.{name}.lora_a"] for name in names]
            b_s = [adapter[f"layers.{to}.{name}.lora_b"] for name in names]
            with torch.no_grad():
                update_OI = torch.cat([b_OR @ a_RI for a_RI, b_OR in zip(a_s, b_s, strict=True)])
                weights[group] = update_OI.add_(large[source].weights[group]).to(torch.bfloat16)
            factors[group] = (
                torch.cat(a_s).to(torch.bfloat16),
                *(b_OR.to(torch.bfloat16) for b_OR in b_s),
            )
        norms = {name: adapter[f"layers.{to}.{name}"].to(torch.bfloat16) for name in NORMS}
        layers.append(Layer(weights, norms, factors))
    return layers


def norm(x_TE: Tensor, weight_E: Tensor) -> Tensor:
    """RMS norm as Llama computes it."""
    x = x_TE.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * weight_E).to(x_TE.dtype)


def _gated(both_TF: Tensor) -> Tensor:
    gate, up = both_TF.chunk(2, -1)
    return F.silu(gate.float()).mul(up).to(both_TF.dtype)


def _rotated(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x_THD.float().chunk(2, -1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_THD.dtype)


class Forward:
    """The forward pass over batches of a fixed number of tokens.

    With `fused` the element-wise parts are compiled, which about doubles the speed on a CPU and
    needs a C++ compiler; without it they run one by one, with the same results up to rounding.
    """

    def __init__(self, *, fused: bool) -> None:
        def compiled(part: Any) -> Any:
            return torch.compile(part, dynamic=False) if fused else part

        self._norm, self._gated, self._rotated = map(compiled, (norm, _gated, _rotated))

    def __call__(
        self, embed: Tensor, layers: Sequence[Layer], tokens_NT: Tensor, wanted: Sequence[int]
    ) -> list[Tensor]:
        """Outputs [N * T, E] (bf16, before the final norm) of the layers in `wanted`, ascending."""
        rows, length = tokens_NT.shape
        cos_TD, sin_TD = (table.repeat(rows, 1) for table in _rope(length))
        x = F.embedding(tokens_NT.reshape(-1), embed)
        kept = []
        for at, layer in enumerate(layers):
            h = self._norm(x, layer.norms["input_layernorm.weight"])
            qkv = layer.linear("qkv", h).view(rows * length, -1, HEAD_DIM)
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
            q, k = self._rotated(q, cos_TD, sin_TD), self._rotated(k, cos_TD, sin_TD)
            q, k, v = (head.view(rows, length, -1, HEAD_DIM).transpose(1, 2) for head in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(rows * length, HEADS * HEAD_DIM)
            x = x + layer.linear("o", mixed)
            h = self._norm(x, layer.norms["post_attention_layernorm.weight"])
            x = x + layer.linear("down", self._gated(layer.linear("gate_up", h)))
            if at in wanted:
                kept.append(x)
        return kept


def _rope(length: int) -> tuple[Tensor, Tensor]:
    frequency = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angle_TD = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return angle_TD.cos(), angle_TD.sin()


def decode(
    embed: Tensor,
    layers: Sequence[Layer],
    tokens_N: Tensor,
    k_LNHTD: Tensor,
    v_LNHTD: Tensor,
    at: int,
) -> Tensor:
    """Output [N, E] of the last layer for one new token per row, all at position `at`.

    Writes the token's keys and values into the buffers, whose earlier positions must be filled.
    """
    rows = len(tokens_N)
    cos_TD, sin_TD = (table[at:].expand(rows, -1) for table in _rope(at + 1))
    x = F.embedding(tokens_N, embed)
    for layer, k_NHTD, v_NHTD in zip(layers, k_LNHTD, v_LNHTD, strict=True):
        h = norm(x, layer.norms["input_layernorm.weight"])
        q, k, v = (
            layer.linear("qkv", h).view(rows, -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
        )
        k_NHTD[:, :, at] = _rotated(k, cos_TD, sin_TD)
        v_NHTD[:, :, at] = v
        # The query heads of one KV head are passed as if they were positions: nothing is masked.
        q_NHGD = _rotated(q, cos_TD, sin_TD).view(rows, KV_HEADS, -1, HEAD_DIM)
        mixed = F.scaled_dot_product_attention(
            q_NHGD, k_NHTD[:, :, : at + 1], v_NHTD[:, :, : at + 1]
        )
        x = x + layer.linear("o", mixed.reshape(rows, -1))
        h = norm(x, layer.norms["post_attention_layernorm.weight"])
        x = x + layer.linear("down", _gated(layer.linear("gate_up", h)))
    return x
