"""Rotary position embedding of keys, applied and undone exactly, at any start position.

Frequencies come from transformers' own `ROPE_INIT_FUNCTIONS`, so that llama3 and YaRN scaling, with
YaRN's attention factor, agree with the model. Knows one model at a time and nothing of mapping.

Shapes: T tokens, H KV heads, D head_dim, R of which are turned; `...` any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mappers.geometry import RopeSpec


class Rope:
    """Rotation of keys [..., T, H, D] by absolute position, in fp32.

    The rotation is the half-split ("neox") one of transformers' `apply_rotary_pos_emb` for Llama,
    on the first `rotary_dim` elements of a head; the others pass unchanged. Angles are products in
    fp32, as in transformers and vLLM, whose cos and sin these equal bit for bit: more digits would
    give other angles (up to 0.004 rad at position 131,071) than those the model was run with.
    `strip` is its exact inverse: `apply` multiplies cos and sin by attention_scaling, so `strip`
    turns back and divides by it, once.
    """

    def __init__(self, spec: RopeSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        inv_freq, self.attention_scaling = _inverse_frequencies(spec)
        self._inv_freq = inv_freq.to(device)

    def positions(self, start: int, tokens: int) -> Tensor:
        """Absolute positions [T] of `tokens` consecutive tokens."""
        return torch.arange(start, start + tokens, device=self._inv_freq.device)

    def apply(self, k: Tensor, positions: Tensor) -> Tensor:
        """Position-free keys [..., T, H, D] -> keys as the model caches them, fp32."""
        return rotate(k, *self.cos_sin(positions))

    def strip(self, k: Tensor, positions: Tensor) -> Tensor:
        """Cached keys [..., T, H, D] -> position-free keys, fp32."""
        return rotate(k, *self.cos_sin(positions, inverse=True))

    def cos_sin(self, positions: Tensor, *, inverse: bool = False) -> tuple[Tensor, Tensor]:
        """What `rotate` multiplies by: cos and sin [T, 1, R/2] in fp32, attention_scaling included.

        `inverse`: those that turn back and divide by it.
        """
        angle = positions.to(torch.float32)[:, None] * self._inv_freq
        scale = self.attention_scaling
        cos, sin = angle.cos() * scale, angle.sin() * scale
        if inverse:
            cos, sin = cos * scale**-2, -sin * scale**-2
        return cos[:, None], sin[:, None]


def rotate(k: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Turn the first elements of every head of k [..., T, H, D] by `Rope.cos_sin`'s angles; fp32.

    `out`, of k's shape and fp32, receives the result if given; it may not overlap k.
    """
    half = cos.shape[-1]
    turned = 2 * half
    k = k.float()
    first, second = k[..., :half], k[..., half:turned]
    if out is None:
        out = torch.empty(k.shape, dtype=torch.float32, device=k.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:turned]).addcmul_(first, sin)
    out[..., turned:] = k[..., turned:]
    return out


def _inverse_frequencies(spec: RopeSpec) -> tuple[Tensor, float]:
    """Inverse frequencies [R/2] in fp32 and the attention scaling of `spec`."""
    # transformers takes seconds to import and only this function needs it.
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = spec.parameters()
    if spec.rope_type == "default":
        # Each model class holds its own copy of the unscaled formula; "linear" by one is the same.
        parameters |= {"rope_type": "linear", "factor": 1.0}
    config = PreTrainedConfig.from_dict(
        {
            "rope_parameters": parameters,
            "head_dim": spec.head_dim,
            # Read, though not used, by the YaRN formula when head_dim is given.
            "hidden_size": spec.head_dim,
            "num_attention_heads": 1,
            "max_position_embeddings": spec.max_position,
        }
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)
