"""How much text a fit wants and how much memory its moments take. Free of torch, as plans are."""

from __future__ import annotations

from collections.abc import Iterator

COMFORTABLE_RATIO = 5
"""Below this many observations per feature a fit's held-out error is dominated by its variance."""

# Rows of a product formed at a time: its fp32 copy stays small, and tiles below the diagonal of the
# Gram matrix are never made.
_TILE = 1024


def moments_bytes(features: int, outputs: int, gram: bool = True) -> int:
    """Bytes that `moments.Moments` of this shape keep."""
    sums = features * outputs + features + 2 * outputs
    if gram:
        sums += sum((t.stop - t.start) * (features - t.start) for t in tiles(features))
    return 8 * sums


def tiles(features: int) -> Iterator[slice]:
    """Rows of the Gram matrix, tile by tile; each is kept from its diagonal on."""
    for begin in range(0, features, _TILE):
        yield slice(begin, min(begin + _TILE, features))
