"""Looking into the attention of any HF model while it runs, by transformers' attention interface.

Knows neither what is looked for nor model families: every one hands its rotated queries and keys
to the interface.

Shapes: B sequences, T query tokens, P key tokens, Q query heads, H KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_WATCHING = "kvcascade_watching"


class Attended(NamedTuple):
    """One layer's attention: what it read, with RoPE, the factor on its scores, and its output."""

    q_BQTD: Tensor
    k_BHPD: Tensor
    v_BHPD: Tensor
    scale: float
    output_BTQD: Tensor


@contextmanager
def watched_attention(model: Any, see: Callable[[Attended], None]) -> Iterator[None]:
    """Show every attention of the forward passes within to `see`, layer by layer.

    It is computed by the implementation that the model was loaded with.
    """
    original = model.config._attn_implementation
    compute: Any = ALL_ATTENTION_FUNCTIONS[original]

    def watch(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        result = compute(module, query, key, value, mask, **options)
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        see(Attended(query, key, value, scale, result[0]))
        return result

    AttentionInterface.register(_WATCHING, watch)
    # Without a mask function of its own name an implementation is given no causal mask.
    AttentionMaskInterface.register(_WATCHING, ALL_MASK_ATTENTION_FUNCTIONS[original])
    model.set_attn_implementation(_WATCHING)
    try:
        yield
    finally:
        model.set_attn_implementation(original)
