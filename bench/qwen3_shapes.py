"""Random weights and caches in the exact shapes of Qwen3-14B and Qwen3-32B, and in tiny ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mappers.mapper import LinearMapper


@dataclass(frozen=True)
class Shapes:
    """Of both models' caches, and of the large model's body."""

    source_layers: int = 40
    target_layers: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    chosen: int = 8
    hidden: int = 5120
    intermediate: int = 25600
    heads: int = 64
    vocabulary: int = 151_936
    tokens: tuple[int, ...] = (64, 1024, 8192, 32768)
    matrix: int = 8192
    copy_bytes: int = 4 << 30


TINY = Shapes(
    source_layers=3,
    target_layers=2,
    kv_heads=2,
    head_dim=32,
    chosen=2,
    hidden=64,
    intermediate=96,
    heads=4,
    vocabulary=128,
    tokens=(5, 70),
    matrix=128,
    copy_bytes=1 << 20,
)


def random_mapper(shapes: Shapes, support: str, device: torch.device) -> LinearMapper:
    """Weights that keep the size of what they map; every target layer reads layers around it."""
    from mappers.fingerprint import ModelFingerprint
    from mappers.geometry import RopeSpec
    from mappers.mapper import LinearMapper
    from mappers.weights import LinearWeights

    s, groups = shapes, 1 if support == "full" else shapes.kv_heads
    rope = RopeSpec(rope_type="default", rope_theta=1e6, head_dim=s.head_dim, max_position=40_960)
    source = ModelFingerprint(
        model_type="qwen3",
        weights_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        template_sha256=None,
        layers=s.source_layers,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        hidden_size=s.hidden,
        max_position=rope.max_position,
        rope=rope,
    )
    target = source.model_copy(update={"layers": s.target_layers})
    width = s.kv_heads * s.head_dim // groups

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).mul_((s.chosen * width) ** -0.5)

    room = s.source_layers - s.chosen
    firsts = [round(room * layer / (s.target_layers - 1)) for layer in range(s.target_layers)]
    matrix, bias = (s.target_layers, groups, s.chosen * width, width), torch.float32
    weights = LinearWeights(
        tuple(tuple(range(first, first + s.chosen)) for first in firsts),
        normal(*matrix),
        normal(s.target_layers, groups, width, dtype=bias),
        normal(*matrix),
        normal(s.target_layers, groups, width, dtype=bias),
    )
    return LinearMapper(source, target, weights, device=device)


def cache(shapes: Shapes, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random keys and values of the source."""
    size = (shapes.source_layers, tokens, shapes.kv_heads, shapes.head_dim)
    k_STHD, v_STHD = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return k_STHD, v_STHD


def random_body(shapes: Shapes, layers: int, device: torch.device) -> Any:
    """The large model without its LM head, bf16, made on the device."""
    from transformers import Qwen3Config, Qwen3Model

    s = shapes
    config = Qwen3Config(
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab_size=s.vocabulary,
        max_position_embeddings=40_960,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Qwen3Model(config).eval()
        finally:
            torch.set_default_dtype(before)
    return model
