"""What is measured of a mapper, the bounds it is held to, and the verdict; as written to disk.

Knows no tensors and no models. Fields that reports written earlier lack are None there: unknown.

Shapes: L target layers, H KV heads, B buckets of prefix positions.
"""

from __future__ import annotations

from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["accept", "refuse"]
Part = Literal["keys", "values"]

# Where another text's cache gives almost the same attention output, losses count against this.
_LEAST_ROOM = 0.05


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Thresholds(_Frozen):
    """What a mapper must reach to be accepted; recorded beside the verdict they led to.

    `min_recovered_gap`: see `ScoreReport`. `min_control_margin`: by what share of the gap between
    no prefix and native the mapped cache must predict better than every control.
    `max_shift_error`: see `Structure`. `min_misplaced_margin`: how much more a mapped head must
    resemble another head than its own to be called misplaced. `min_layer_share`, `min_head_share`
    and `min_bucket_share`: see `LocalAttention.share`. `max_layer_outlier`: how far a layer's share
    may lie below the median layer's. `expected_recall`: share of planted facts recalled, between
    floor and native, below which a report cautions (it does not refuse); silent when the target
    itself recalls less than `min_native_recall`.
    """

    min_recovered_gap: float = 0.5
    min_control_margin: float = 0.1
    max_shift_error: float = 0.05
    min_misplaced_margin: float = 0.1
    min_layer_share: float = 0.15
    min_head_share: float = -0.05
    min_bucket_share: float = 0.2
    max_layer_outlier: float = 0.55
    min_native_recall: float = 0.5
    expected_recall: float = 0.5


class ScoreRow(_Frozen):
    """How the target predicts text after one kind of prefix cache.

    `kl_to_native` in nats per token; `attention_cosine` compares every head's attention output with
    the native run's, layer errors accumulating, and `layer_cosine_L` is the same by layer; both are
    unknown for a run of another model. `recovered_gap` is the share of the gap in nats between no
    prefix and native; `floor_normalised` is (agreement - floor) / (1 - floor) for the top-1
    agreement with native, the floor being that of no prefix. 1 is native, 0 no prefix.
    """

    name: str
    perplexity: float
    kl_to_native: float
    top1_agreement: float
    attention_cosine: float | None
    layer_cosine_L: tuple[float, ...] | None = None
    recovered_gap: float | None = None
    floor_normalised: float | None = None


class LocalAttention(_Frozen):
    """Attention outputs over the prefix alone, each layer with the native run's queries.

    Errors do not pass from layer to layer. Cosines to the native output, of the mapped cache and of
    another text's mapped cache, by KV head and by bucket of prefix positions (`bucket_starts_B`;
    attention confined to the bucket, averaged by the native attention it receives). Buckets in
    which the two texts are the same are left out.
    """

    mapped_LH: tuple[tuple[float, ...], ...]
    other_text_LH: tuple[tuple[float, ...], ...]
    bucket_starts_B: tuple[int, ...]
    mapped_LB: tuple[tuple[float, ...], ...]
    other_text_LB: tuple[tuple[float, ...], ...]

    @staticmethod
    def share(mapped: float, other_text: float) -> float:
        """What is kept of the difference that the text makes: 1 all of it, 0 none, or less."""
        return 1 - (1 - mapped) / max(1 - other_text, _LEAST_ROOM)

    @property
    def layer_share_L(self) -> tuple[float, ...]:
        """Share of every layer, over the mean cosines of its heads."""
        return tuple(
            self.share(_mean(mapped_H), _mean(other_H))
            for mapped_H, other_H in zip(self.mapped_LH, self.other_text_LH, strict=True)
        )

    @property
    def head_share_LH(self) -> tuple[tuple[float, ...], ...]:
        """Share of every KV head."""
        return tuple(
            tuple(self.share(*pair) for pair in zip(mapped_H, other_H, strict=True))
            for mapped_H, other_H in zip(self.mapped_LH, self.other_text_LH, strict=True)
        )

    @property
    def bucket_share_LB(self) -> tuple[tuple[float, ...], ...]:
        """Share of every layer in every bucket of prefix positions."""
        return tuple(
            tuple(self.share(*pair) for pair in zip(mapped_B, other_B, strict=True))
            for mapped_B, other_B in zip(self.mapped_LB, self.other_text_LB, strict=True)
        )

    @property
    def bucket_share_B(self) -> tuple[float, ...]:
        """Share of every bucket, over the mean cosines of the layers."""
        return tuple(
            self.share(_mean(mapped_L), _mean(other_L))
            for mapped_L, other_L in zip(
                zip(*self.mapped_LB, strict=True),
                zip(*self.other_text_LB, strict=True),
                strict=True,
            )
        )

    @property
    def median_layer_share(self) -> float:
        """Share of the median layer."""
        return median(self.layer_share_L)


class Misplaced(_Frozen):
    """A mapped head that resembles another native head more (`other`) than its own (`own`)."""

    part: Part
    layer: int
    head: int
    resembles_layer: int
    resembles_head: int
    own: float
    other: float


class Structure(_Frozen):
    """Checks that hold for every sound mapper, however well it fits.

    Text moved by `shift` positions must map to the same keys turned by the target model's own
    rotary embedding, and to the same values; the errors are relative, in Frobenius norm, of the
    worst layer, and None when the models' positions leave no room for a shift.
    """

    shift: int | None
    shift_error_keys: float | None
    shift_error_values: float | None
    misplaced: tuple[Misplaced, ...]


class ScoreReport(_Frozen):
    """The mapped cache beside its controls, and the verdict.

    `recovered_gap` is the share of the gap in nats between no prefix and native that the mapped
    cache closes, None when the prefix does not help. The target read the last
    `native_suffix_tokens` of each prefix itself. `reasons` says why a mapper is refused.
    `absent_controls` says which controls could not be run, and why.
    """

    rows: tuple[ScoreRow, ...]
    windows: int
    prefix_tokens: int
    scored_tokens: int
    native_suffix_tokens: int = 1
    injection_exact: bool
    recovered_gap: float | None
    verdict: Verdict
    reasons: tuple[str, ...]
    local_attention: LocalAttention | None = None
    structure: Structure | None = None
    absent_controls: tuple[str, ...] = ()
    thresholds: Thresholds | None = None

    def row(self, name: str) -> ScoreRow:
        """The row called `name`."""
        return next(row for row in self.rows if row.name == name)


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)
