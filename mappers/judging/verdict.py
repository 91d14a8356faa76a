"""The verdict on a mapper: what was measured held against thresholds, with every reason by name.

Knows the report's numbers alone. Layers, heads and positions are counted from 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from mappers.judging.records import LocalAttention, Misplaced, Structure, Thresholds
from mappers.judging.report import GenerationReport

NATIVE = "native"
INJECTED = "native injected"
MAPPED = "mapped"
OTHER_TEXT = "another text's cache"
RANDOM = "random mapper"
RAW = "raw source cache"
NO_PREFIX = "no prefix"
SOURCE = "source alone"

_MOST_NAMED = 6


def judge(
    perplexity: Mapping[str, float],
    injection_exact: bool,
    thresholds: Thresholds | None = None,
    structure: Structure | None = None,
    local: LocalAttention | None = None,
) -> tuple[float | None, tuple[str, ...]]:
    """Recovered gap (see `ScoreReport`) and the reasons to refuse; no reasons means accept.

    `perplexity` by name of row. What was not measured is not judged.
    """
    bounds = thresholds or Thresholds()
    nll = {name: math.log(value) for name, value in perplexity.items()}
    gap = nll[NO_PREFIX] - nll[NATIVE]
    recovered = (nll[NO_PREFIX] - nll[MAPPED]) / gap if gap > 0 else None
    reasons = []
    if not injection_exact:
        reasons.append("putting the native cache back changes predictions: the test itself is off")
    if recovered is None:
        reasons.append("the held-out text is predicted no better with a prefix than without")
    elif recovered < bounds.min_recovered_gap:
        reasons.append(
            f"the mapped cache recovers {recovered:.0%} of the gap between no prefix and native; "
            f"{bounds.min_recovered_gap:.0%} is required"
        )
    # A source that predicts better than the target itself, a larger one, is no control.
    if nll[NATIVE] < nll.get(SOURCE, -math.inf) <= nll[MAPPED]:
        reasons.append("the source model alone predicts at least as well as the mapped cache")
    for name in (OTHER_TEXT, RANDOM, RAW):
        if name in nll and gap > 0 and nll[name] - nll[MAPPED] < bounds.min_control_margin * gap:
            reasons.append(
                f"{name} predicts nearly as well as the mapped cache: they differ by "
                f"{(nll[name] - nll[MAPPED]) / gap:.0%} of the gap between no prefix and native; "
                f"{bounds.min_control_margin:.0%} is required"
            )
    if structure is not None:
        reasons += _structure_reasons(structure, bounds)
    if local is not None:
        reasons += _local_reasons(local, bounds)
    return recovered, tuple(reasons)


def cautions(generation: GenerationReport, thresholds: Thresholds | None = None) -> tuple[str, ...]:
    """What a user should know though it does not refuse a mapper.

    Exact recall is the first thing a mapped cache loses; whether that matters depends on what is
    asked of the target. Silent where the target itself cannot recall.
    """
    bounds = thresholds or Thresholds()
    native, kept = generation.row(NATIVE), generation.floor_normalised
    if native.accuracy < bounds.min_native_recall or kept is None:
        return ()
    if kept >= bounds.expected_recall:
        return ()
    return (
        f"planted facts: {generation.row(MAPPED).correct} of {native.asked} are recalled from the "
        f"mapped cache, {native.correct} natively ({kept:.0%} is kept): do not rely on details "
        "that only the source has read",
    )


def _structure_reasons(structure: Structure, bounds: Thresholds) -> Iterable[str]:
    turned_wrong = False
    for part, error in (
        ("keys", structure.shift_error_keys),
        ("values", structure.shift_error_values),
    ):
        if error is not None and error > bounds.max_shift_error:
            turned_wrong |= part == "keys"
            cause = "; source or target theta, or its scaling, is wrong" if part == "keys" else ""
            yield (
                f"positions: text moved by {structure.shift} positions maps to other {part} "
                f"(error {error:.0%}, at most {bounds.max_shift_error:.0%} is allowed){cause}"
            )
    # Wrongly turned keys resemble nothing; what they resemble most is chance.
    found = [one for one in structure.misplaced if not (turned_wrong and one.part == "keys")]
    yield from _misplaced_reasons(found)


def _misplaced_reasons(found: Sequence[Misplaced]) -> Iterable[str]:
    layers: dict[tuple[int, int], set[str]] = defaultdict(set)
    heads: dict[tuple[int, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in found:
        if one.layer != one.resembles_layer:
            layers[one.layer, one.resembles_layer].add(one.part)
        else:
            heads[one.head, one.resembles_head][one.layer].add(one.part)
    lines = [
        f"layer {at} holds {' and '.join(sorted(parts))} that belong to layer {belongs}"
        for (at, belongs), parts in sorted(layers.items())
    ]
    for (at, belongs), by_layer in sorted(heads.items()):
        parts = " and ".join(sorted(set().union(*by_layer.values())))
        lines.append(
            f"head order: KV head {at} holds {parts} that belong to head {belongs} in "
            f"layers {_listed(sorted(by_layer))}"
        )
    yield from lines[:_MOST_NAMED]
    if len(lines) > _MOST_NAMED:
        yield f"{len(lines) - _MOST_NAMED} more layers or heads hold what belongs elsewhere"


def _local_reasons(local: LocalAttention, bounds: Thresholds) -> Iterable[str]:
    share_L, median = local.layer_share_L, local.median_layer_share
    required = max(bounds.min_layer_share, median - bounds.max_layer_outlier)
    bad_layers = {layer for layer, share in enumerate(share_L) if share < required}
    if bad_layers:
        worst = sorted(bad_layers, key=lambda layer: share_L[layer])
        yield (
            "attention outputs by layer: "
            + _listed([f"{layer} keeps {share_L[layer]:.0%}" for layer in worst])
            + f" of what the text makes of them; the median layer keeps {median:.0%} and "
            f"{required:.0%} is required"
        )
    bad_heads = sorted(
        (share, layer, head)
        for layer, share_H in enumerate(local.head_share_LH)
        for head, share in enumerate(share_H)
        if layer not in bad_layers and share < bounds.min_head_share
    )
    if bad_heads:
        yield (
            "attention outputs by KV head: "
            + _listed([f"layer {layer} head {head} keeps {s:.0%}" for s, layer, head in bad_heads])
            + f"; {bounds.min_head_share:.0%} is required"
        )
    share_B = local.bucket_share_B
    bad_buckets = [b for b, share in enumerate(share_B) if share < bounds.min_bucket_share]
    if bad_buckets and len(bad_layers) < len(share_L):
        starts = local.bucket_starts_B
        yield (
            "attention outputs by position: "
            + _listed([f"from {starts[b]} on {share_B[b]:.0%} is kept" for b in bad_buckets])
            + f"; {bounds.min_bucket_share:.0%} is required"
        )


def _listed(items: Sequence[object]) -> str:
    named = ", ".join(str(item) for item in items[:_MOST_NAMED])
    rest = len(items) - _MOST_NAMED
    return f"{named} and {rest} more" if rest > 0 else named
