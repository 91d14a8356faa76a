"""What a cross-model handoff costs, from the shapes of two models: pure arithmetic.

Counts multiply-adds as two FLOP. Knows no weights, no measurements and no files; `Gpus` and link
speeds are what the caller says they are, so every time here is a roofline, not a forecast.

Symbols: L layers, H KV heads, D head_dim, s source, t target, k source layers per target layer,
T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.catalog import Architecture
from cluster.errors import MapperError
from mappers import supports
from mappers.fitting.sizes import moments_bytes
from mappers.geometry import KVGeometry
from mappers.manifest import Support

BF16_BYTES = 2
FP32_BYTES = 4
_GRID_POINTS = 200


@dataclass(frozen=True, slots=True)
class Gpus:
    """`count` equal GPUs that share the work evenly.

    `tflops` and `memory_gb_s` are those of one; `efficiency` is the share of both that is
    reached. Without `memory_gb_s` nothing is ever bound by memory.
    """

    tflops: float
    memory_gb_s: float | None
    count: int = 1
    efficiency: float = 1.0

    def seconds(self, flop: float, moved_bytes: float) -> float:
        """Time of a kernel that computes and moves at once: the longer of the two."""
        compute_s = flop / (self.tflops * 1e12 * self.count * self.efficiency)
        if self.memory_gb_s is None:
            return compute_s
        memory_s = moved_bytes / (self.memory_gb_s * 1e9 * self.count * self.efficiency)
        return max(compute_s, memory_s)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a model: `embedding` is the token table, `head` what maps to the vocabulary.

    `head` is 0 when it is tied to the table. `body_active` are those that read one token.
    """

    embedding: int
    head: int
    body: int
    body_active: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.body

    @property
    def active(self) -> int:
        return self.embedding + self.head + self.body_active


def parameters(model: Architecture) -> Parameters:
    """Exact for Llama, Mistral, Qwen2 and Qwen3; other families may have a few biases more.

    Per layer: q and o (hidden x heads x D), k and v (hidden x H x D), two MLP matrices per expert
    or three when gated, a router for several experts, and norms.
    """
    hidden, queries = model.hidden_size, model.attention_heads * model.head_dim
    keys = model.geometry.width
    attention = 2 * hidden * queries + 2 * hidden * keys
    attention += (queries + 2 * keys) if model.qkv_bias else 0
    norms = 2 * hidden + (2 * model.head_dim if model.qk_norm else 0)
    mlp = (3 if model.gated_mlp else 2) * hidden
    shared = mlp * model.shared_intermediate_size
    shared += hidden if model.shared_intermediate_size else 0
    router = hidden * model.experts if model.experts > 1 else 0
    expert = mlp * model.intermediate_size
    per_layer = attention + norms + shared + router
    table = model.vocab_size * hidden
    return Parameters(
        embedding=table,
        head=0 if model.tied_embeddings else table,
        body=model.layers * (per_layer + model.experts * expert) + hidden,
        body_active=model.layers * (per_layer + model.active_experts * expert) + hidden,
    )


def kv_bytes_per_token(geometry: KVGeometry) -> int:
    """Keys and values of one token over all layers, in bf16."""
    return geometry.kv_bytes_per_token(BF16_BYTES)


def prefill_flop_per_token(model: Architecture, tokens: int) -> float:
    """Mean FLOP to read one token of a prompt of `tokens`.

    Two per active parameter, token table and LM head included as the 2N convention has it, and
    attention (QK and AV, 4 x heads x D per layer and position) over half the context, which is
    what a causal mask leaves on average. An engine skips the table and all but one LM head row.
    """
    attention = 4 * model.layers * model.attention_heads * model.head_dim * tokens / 2
    return 2 * parameters(model).active + attention


def prefill_s(model: Architecture, tokens: int, gpus: Gpus) -> float:
    """Roofline of reading a prompt; memory moves the bf16 weights once and the KV written."""
    moved_bytes = parameters(model).total * BF16_BYTES + tokens * kv_bytes_per_token(model.geometry)
    return gpus.seconds(prefill_flop_per_token(model, tokens) * tokens, moved_bytes)


def feature_width(support: Support, k: int, source: KVGeometry, target: KVGeometry) -> int:
    """Inputs of one regression: k H_s D_s, or k D_s with head_local (mappers.supports).

    Raises MapperError for a k that the source lacks, or head_local between unequal head counts.
    """
    if not 1 <= k <= source.layers:
        raise MapperError(
            f"k {k} is not possible: the source has {source.layers} layers; give 1 to "
            f"{source.layers}"
        )
    return supports.feature_width(support, k, source, target)


def mapper_weights(support: Support, k: int, source: KVGeometry, target: KVGeometry) -> int:
    """Weights of keys and values, biases left out: 2 L_t H_t D_t x width (arXiv 2608.03893)."""
    return 2 * target.layers * target.width * feature_width(support, k, source, target)


def mapper_biases(target: KVGeometry) -> int:
    """Biases of keys and values."""
    return 2 * target.layers * target.width


def map_flop_per_token(weights: int) -> int:
    """FLOP to map one token: two per weight. Undoing and applying RoPE is below 0.1 % of it."""
    return 2 * weights


def map_s(weights: int, source: KVGeometry, target: KVGeometry, tokens: int, gpus: Gpus) -> float:
    """Roofline of mapping; memory moves the bf16 weights once, the KV read and the KV written."""
    kv_bytes = tokens * (kv_bytes_per_token(source) + kv_bytes_per_token(target))
    return gpus.seconds(map_flop_per_token(weights) * tokens, weights * BF16_BYTES + kv_bytes)


def transfer_s(moved_bytes: float, link_gbps: float) -> float:
    """Time on a link of `link_gbps` gigabit per second at its full rate."""
    return moved_bytes * 8 / (link_gbps * 1e9)


def overlapped_s(one_s: float, other_s: float, stages: int) -> float:
    """Two steps of a pipeline over `stages` equal parts: the longer one, and one part of the other.

    With one stage this is their sum.
    """
    return max(one_s, other_s) + min(one_s, other_s) / stages


@dataclass(frozen=True, slots=True)
class Statistics:
    """Bytes of the fp64 sums of products from which `mappers.fitting` solves keys and values.

    `one_pass` serves any choice of layers. The others need the layers chosen before: `choosing`
    holds what the choice takes, `chosen_together` all target layers at once (one Gram matrix of
    every source layer, cross products with chosen ones), `chosen_one_by_one` a single target layer.
    """

    one_pass_bytes: int
    choosing_bytes: int
    chosen_together_bytes: int
    chosen_one_by_one_bytes: int


def fit_statistics(support: Support, k: int, source: KVGeometry, target: KVGeometry) -> Statistics:
    """Memory of a fit (`mappers.fitting.passes`), over groups of heads with the same features.

    `full` is one group with H D elements a layer, `head_local` has H groups with D. Layers are
    chosen by matching heads.
    """
    width = feature_width(support, k, source, target)
    groups = 1 if support == "full" else target.kv_heads
    outputs = target.width // groups
    all_features = source.layers * source.width // groups
    heads = target.kv_heads
    by_head = moments_bytes(source.layers * source.head_dim, target.layers * target.head_dim)
    gram = moments_bytes(all_features, 0)
    chosen = target.layers * moments_bytes(width, outputs, gram=False)
    return Statistics(
        one_pass_bytes=2 * groups * moments_bytes(all_features, target.layers * outputs),
        choosing_bytes=2 * heads * by_head,
        chosen_together_bytes=2 * groups * (gram + chosen),
        chosen_one_by_one_bytes=2 * groups * moments_bytes(width, outputs),
    )


def break_even_tokens(
    reprefill_s: Callable[[int], float], handoff_s: Callable[[int], float], limit_tokens: int
) -> int | None:
    """The length from which on, up to `limit_tokens`, a handoff is never slower; None without one.

    Looks for the last crossing on a geometric grid and then bisects, since a slow link can win
    below the time that reading the weights takes, lose above it, and win again by attention.
    """

    def wins(tokens: int) -> bool:
        return handoff_s(tokens) <= reprefill_s(tokens)

    if not wins(limit_tokens):
        return None
    won, lost = limit_tokens, 0
    for tokens in reversed(length_grid(1, limit_tokens)):
        if not wins(tokens):
            lost = tokens
            break
        won = tokens
    while won - lost > 1:
        middle = (won + lost) // 2
        if wins(middle):
            won = middle
        else:
            lost = middle
    return won


def length_grid(first_tokens: int, last_tokens: int) -> list[int]:
    """Prompt lengths from first to last, both included, in about equal ratios."""
    ratio = last_tokens / first_tokens
    points = (first_tokens * ratio ** (step / _GRID_POINTS) for step in range(_GRID_POINTS + 1))
    return sorted({first_tokens, last_tokens, *(round(point) for point in points)})


@dataclass(frozen=True, slots=True)
class PrefillSaving:
    """FLOP per prompt token of a cascade that maps, and the shares it saves of the alternatives."""

    cascade_flop: float
    reprefill_cascade_flop: float
    all_large_flop: float

    @property
    def of_reprefill_cascade(self) -> float:
        return 1 - self.cascade_flop / self.reprefill_cascade_flop

    @property
    def of_all_large(self) -> float:
        return 1 - self.cascade_flop / self.all_large_flop


def prefill_saving(
    small_flop: float, large_flop: float, escalation: float, map_flop: float = 0.0
) -> PrefillSaving:
    """Of prompts of which a share `escalation` goes on to the large model.

    The small model reads every prompt. A re-prefilling cascade then pays small + e x large, a
    mapping one small + e x map, and serving all with the large model pays large.
    """
    return PrefillSaving(
        cascade_flop=small_flop + escalation * map_flop,
        reprefill_cascade_flop=small_flop + escalation * large_flop,
        all_large_flop=large_flop,
    )


def directed_pairs(models: int) -> int:
    """Mappers between every two of `models` models, in both directions."""
    return models * (models - 1)


def fleet_bytes(models: int, pair_bytes: float) -> float:
    """All mappers of a fleet whose directed pairs take `pair_bytes` on average."""
    return directed_pairs(models) * pair_bytes
