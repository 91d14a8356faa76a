"""Which k and support serve a pair best: every setting solved from one set of moments, and judged.

In-sample R2 grows with k whatever happens, and at small calibration picks the worst; so settings
are compared by what the target predicts after their mapped caches on held-out windows.

Shapes: W held-out windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pydantic import BaseModel, ConfigDict

from mappers.capture import TokenSequences
from mappers.judging.score import score_mapper
from mappers.judging.verdict import MAPPED, NATIVE
from mappers.manifest import Support
from mappers.mapper import Mapper

DEFAULT_KS = (1, 2, 4, 6, 8, 12, 16, 20, 24)
"""Source layers per target layer that a sweep tries, besides all, where the source has so many."""


class SweepRow(BaseModel):
    """One setting. R2 are means over target layers; KL in nats per token, by window and mean.

    `perplexity_ratio` is mapped over native, 1 at best.
    """

    model_config = ConfigDict(frozen=True)

    k: int
    support: Support
    attention_weights: bool
    width: int
    observations_per_feature: float
    parameters: int
    in_sample_r2_keys: float | None
    in_sample_r2_values: float | None
    heldout_r2_keys: float
    heldout_r2_values: float
    attention_cosine: float
    kl: float
    kl_W: tuple[float, ...]
    top1_agreement: float
    perplexity_ratio: float


class SweepResult(BaseModel):
    """All settings that were tried; `chosen` is the index of the best, see `choose`.

    `not_swept` says in words what was left out, and why.
    """

    model_config = ConfigDict(frozen=True)

    rows: tuple[SweepRow, ...]
    chosen: int
    windows: int
    prefix_tokens: int
    not_swept: tuple[str, ...]

    @property
    def best(self) -> SweepRow:
        """The chosen setting."""
        return self.rows[self.chosen]

    def with_row(self, row: SweepRow) -> SweepResult:
        """The same with another setting, and the choice made anew."""
        rows = (*self.rows, row)
        return self.model_copy(update={"rows": rows, "chosen": choose(rows)})


class Prediction(BaseModel):
    """What the target predicts after a mapped cache, over held-out windows; see `SweepRow`."""

    model_config = ConfigDict(frozen=True)

    attention_cosine: float
    kl: float
    kl_W: tuple[float, ...]
    top1_agreement: float
    perplexity_ratio: float


def predict(
    small: Any,
    large: Any,
    mapper: Mapper,
    windows: TokenSequences,
    prefix_tokens: int,
    advance: Callable[[int], None] = lambda windows: None,
) -> Prediction:
    """Score a mapper window by window, without controls."""
    kl_W, agreement_W, cosine_W, excess_W = [], [], [], []
    for ids_T in windows.ids_ST:
        one = TokenSequences(ids_T[None], 1)
        report = score_mapper(
            small, large, mapper, one, prefix_tokens=prefix_tokens, controls=False
        )
        mapped, native = report.row(MAPPED), report.row(NATIVE)
        assert mapped.attention_cosine is not None
        kl_W.append(mapped.kl_to_native)
        agreement_W.append(mapped.top1_agreement)
        cosine_W.append(mapped.attention_cosine)
        excess_W.append(math.log(mapped.perplexity / native.perplexity))
        advance(1)
    return Prediction(
        attention_cosine=mean(cosine_W),
        kl=mean(kl_W),
        kl_W=tuple(kl_W),
        top1_agreement=mean(agreement_W),
        perplexity_ratio=math.exp(mean(excess_W)),
    )


def choose(rows: Sequence[SweepRow]) -> int:
    """Index of the best setting.

    That is the one of least KL; but one whose KL is larger by no more than the standard error of
    the difference (paired over windows) is as good, and of those as good the one with the fewest
    parameters is taken, then the one of highest attention-output cosine. With a single window
    nothing is known of the error, and only equal KL is as good.
    """
    best = min(rows, key=lambda row: row.kl)

    def as_good(row: SweepRow) -> bool:
        worse_W = [a - b for a, b in zip(row.kl_W, best.kl_W, strict=True)]
        error = stdev(worse_W) / math.sqrt(len(worse_W)) if len(worse_W) > 1 else 0.0
        return mean(worse_W) <= error

    candidates = [at for at, row in enumerate(rows) if as_good(row)]
    return min(candidates, key=lambda at: (rows[at].parameters, -rows[at].attention_cosine))


def plot_sweep(result: SweepResult, path: Path) -> None:
    """Draw KL, attention-output cosine, top-1 agreement and R2 over k into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    panels: list[tuple[str, list[tuple[str, Callable[[SweepRow], float | None]]]]] = [
        ("KL to native (nats per token)", [("", lambda row: row.kl)]),
        ("attention-output cosine", [("", lambda row: row.attention_cosine)]),
        ("top-1 agreement with native", [("", lambda row: row.top1_agreement)]),
        (
            "R2, mean of keys and values",
            [
                ("held out", lambda r: (r.heldout_r2_keys + r.heldout_r2_values) / 2),
                ("in sample", _in_sample),
            ],
        ),
    ]
    curves = list(dict.fromkeys((row.support, row.attention_weights) for row in result.rows))
    for axes, (title, lines) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for colour, (support, weighted) in enumerate(curves):
            rows = sorted(
                (r for r in result.rows if (r.support, r.attention_weights) == (support, weighted)),
                key=lambda row: row.k,
            )
            for style, (suffix, value) in zip("-:", lines, strict=False):
                points = [(row.k, value(row)) for row in rows if value(row) is not None]
                if not points:
                    continue
                name = f"{support}{', attention weights' if weighted else ''}"
                axes.plot(
                    [k for k, _ in points],
                    [y for _, y in points],
                    linestyle=style,
                    marker="o",
                    markersize=4,
                    color=f"C{colour}",
                    label=f"{name}, {suffix}" if suffix else name,
                )
        best = lines[0][1](result.best)
        ring = {"fillstyle": "none", "markersize": 13, "linestyle": "none", "color": "black"}
        axes.plot([result.best.k], [best], marker="o", label="chosen", **ring)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("k: source layers per target layer")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(
        f"{result.windows} held-out windows, mapped cache of {result.prefix_tokens} tokens"
    )
    figure.savefig(path, dpi=120)


def _in_sample(row: SweepRow) -> float | None:
    if row.in_sample_r2_keys is None or row.in_sample_r2_values is None:
        return None
    return (row.in_sample_r2_keys + row.in_sample_r2_values) / 2
