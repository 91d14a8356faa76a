"""The settings that a sweep over k and support tried, as a table. Prints; computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from mappers.fitting.sweep import SweepResult


def print_sweep(result: SweepResult, console: Console) -> None:
    """One row per setting, the chosen one marked, and what was left out."""
    table = Table(
        title=f"{result.windows} held-out windows, mapped cache of {result.prefix_tokens} tokens",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("k", justify="right", no_wrap=True)
    table.add_column("support", no_wrap=True)
    for name in ("N/p", "M", "R2 in", "R2 k", "R2 v", "cosine", "KL", "top-1", "ppl"):
        table.add_column(name, justify="right", no_wrap=True)
    for at, row in enumerate(result.rows):
        table.add_row(
            str(row.k),
            row.support + (" *" if row.attention_weights else ""),
            f"{row.observations_per_feature:.1f}",
            f"{row.parameters / 1e6:.2f}",
            _mean(row.in_sample_r2_keys, row.in_sample_r2_values),
            f"{row.heldout_r2_keys:.3f}",
            f"{row.heldout_r2_values:.3f}",
            f"{row.attention_cosine:.4f}",
            f"{row.kl:.4f}",
            f"{row.top1_agreement:.3f}",
            f"{row.perplexity_ratio:.3f}",
            style="bold" if at == result.chosen else None,
        )
    console.print(table)
    best = result.best
    weighted = " with attention weights (*)" if best.attention_weights else ""
    console.print(f"Chosen: {best.support}, k {best.k}{weighted}, in bold.")
    console.print(
        "N/p: calibration tokens per feature. M: million weights. R2: mean in sample; held out of "
        "keys and of values. cosine: attention outputs. KL: nats per token. ppl: over native."
    )
    for note in result.not_swept:
        console.print(f"not swept: {note}")


def _mean(keys: float | None, values: float | None) -> str:
    return "-" if keys is None or values is None else f"{(keys + values) / 2:.3f}"
