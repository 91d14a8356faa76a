"""What an answer of the cascade costs in tokens, bytes and FLOP.

It counts what the engines report; it knows no prompts and no qualities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from bench.routing_collect import Answer

WEIGHTS = ("k_weight_LGFO", "v_weight_LGFO")
"""Tensors of a linear map that cost two FLOP per element and token."""


@dataclass(frozen=True)
class Prices:
    """FLOP of one token: two per parameter or weight of the map, attention left out."""

    small_flop: float
    large_flop: float
    map_flop: float

    def of(self, answer: Answer, small: str, large: str) -> dict[str, float]:
        """Work for one answer without any prefix cache, from the engines' own token counts.

        Tokens that the small model wrote and nobody saw are not counted: at most the hold-back.
        """
        by_small, by_large = answer.written(small), answer.written(large)
        handoff = answer.cascade.handoff
        mapped = 0 if handoff is None else handoff.covered_tokens
        escalated = handoff is not None
        # An answer begins on the small model unless the large one wrote all of it by decision.
        small_read = answer.prompt_tokens if by_small or escalated else 0
        context = answer.prompt_tokens + by_small
        large_read = context - mapped if by_large else 0
        return {
            "small_tokens_read": small_read,
            "small_tokens_written": by_small,
            "large_tokens_read": large_read,
            "large_tokens_written": by_large,
            "mapped_tokens": mapped,
            "moved_bytes": 0 if handoff is None else handoff.bytes_read + handoff.bytes_written,
            "flop": (small_read + by_small) * self.small_flop
            + (large_read + by_large) * self.large_flop
            + mapped * self.map_flop,
        }


def prices_of(small_source: str, large_source: str, mapper_folder: Path) -> Prices:
    """From the models' `config.json` and the mapper's tensors."""
    from safetensors import safe_open

    from cluster.catalog import architecture
    from cluster.plan import map_flop_per_token, parameters

    with safe_open(mapper_folder / "mapper.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in WEIGHTS]
    return Prices(
        2.0 * parameters(architecture(small_source)).active,
        2.0 * parameters(architecture(large_source)).active,
        map_flop_per_token(sum(math.prod(shape) for shape in shapes)),
    )
