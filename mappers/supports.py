"""What a target head may be mapped from, in numbers. Free of torch, as plans are.

A *group* is the set of heads that share a design; see `fitting.ridge`.
"""

from __future__ import annotations

from cluster.errors import MapperError
from mappers.geometry import KVGeometry
from mappers.manifest import Support


def groups(support: Support, source: KVGeometry, target: KVGeometry) -> int:
    """Number of head groups; MapperError for head_local between unequal head counts."""
    if support == "full":
        return 1
    if source.kv_heads != target.kv_heads:
        raise MapperError(
            f"support head_local needs equal KV heads, but the source has {source.kv_heads} and "
            f"the target {target.kv_heads}; use support full"
        )
    return target.kv_heads


def feature_width(support: Support, k: int, source: KVGeometry, target: KVGeometry) -> int:
    """Features of one group when `k` source layers are used."""
    return k * source.width // groups(support, source, target)
