"""How a demonstration looks: the coloured answer, the waterfall and the table.

It turns recorded numbers into what rich prints; it measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cluster.demo_client import Piece
from cluster.demo_findings import Row, duration
from router.api import HandoffInfo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {"small": "cyan", "large": "bold green"}
BAR_CHARACTERS = 28

STAGES = {
    "ticket": "small names its blocks",
    "queue": "mapper busy with others",
    "read": "NIXL READ from small",
    "map": "RoPE off, matmul, RoPE on",
    "wait_target": "large has no blocks yet",
    "write": "NIXL WRITE into large",
    "admit": "large's first step",
}
"""The stages in the order in which they begin, and what happens in them."""


class AnswerWriter:
    """Prints an answer as it arrives, each model in its colour, with a mark at the change.

    `switch_after_tokens` is where the large model takes over; None: one model writes everything.
    """

    def __init__(self, console: Console, switch_after_tokens: int | None) -> None:
        self._console = console
        self._switch = switch_after_tokens
        self._changed = False

    def __call__(self, piece: Piece) -> None:
        """Print one more piece."""
        large = self._switch is not None and piece.tokens > self._switch
        if large and not self._changed:
            self._changed = True
            self._console.print(" ‖ ", style="dim", end="")
        style = STYLES["large" if large else "small"]
        self._console.print(piece.text, style=style, end="", markup=False, soft_wrap=True)


def comparison_table(rows: Iterable[Row]) -> Table:
    """The published table."""
    from rich import box
    from rich.table import Table

    table = Table(title="Decision to the large model's first token", box=box.SIMPLE)
    for name in ("conversation", "mapped KV (range)", "re-prefill (range)", "faster", "runs"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.prompt_tokens:,} tokens",
            _spread(row.mapped_ms, row.mapped_range_ms),
            _spread(row.recompute_ms, row.recompute_range_ms),
            f"{row.speedup:.1f}x",
            f"2 x {row.repetitions}",
        )
    return table


def waterfall(handoff: HandoffInfo) -> Table:
    """A bar for every stage of one handoff, to the scale of its total.

    The lengths are what the processes measured. Of the places it is known that the ticket comes
    first, that reading begins and writing ends the conversion, and that admitting comes last.
    """
    from rich.table import Table

    assert handoff.handoff_ms is not None, "only a finished handoff has a waterfall"
    total_ms = handoff.handoff_ms
    stages_ms = dict(handoff.stages_ms)
    begin_ms = stages_ms.get("ticket", 0.0) + stages_ms.get("queue", 0.0)
    end_ms = total_ms - stages_ms.get("admit", 0.0)
    starts_ms = {
        "ticket": 0.0,
        "queue": stages_ms.get("ticket", 0.0),
        "write": max(begin_ms, end_ms - stages_ms.get("write", 0.0)),
        "admit": end_ms,
    }
    table = Table.grid(padding=(0, 1))
    order = [*(name for name in STAGES if name in stages_ms), *(stages_ms.keys() - STAGES.keys())]
    for name in order:
        spent_ms = stages_ms[name]
        if name == "queue" and spent_ms < 1.0:
            continue
        drawn = bar(starts_ms.get(name, begin_ms), spent_ms, total_ms)
        table.add_row(name, drawn, f"{spent_ms:8.1f} ms", f"[dim]{STAGES.get(name, '')}[/]")
    table.add_row(
        "[bold]total[/]",
        bar(0.0, total_ms, total_ms),
        f"[bold]{total_ms:8.1f} ms[/]",
        "[dim]network included[/]",
    )
    return table


def bar(start_ms: float, spent_ms: float, total_ms: float, width: int = BAR_CHARACTERS) -> str:
    """`width` characters that stand for `total_ms`, filled for one stage.

    A stage too short for a character is a thin line.
    """
    scale = width / total_ms if total_ms > 0 else 0.0
    filled = min(width, round(spent_ms * scale))
    mark = "█" * filled or "▏"
    first = min(width - len(mark), max(0, round(start_ms * scale)))
    return (" " * first + mark).ljust(width)


def _spread(middle_ms: float, ends_ms: tuple[float, float]) -> str:
    """A median with its range in the same unit."""
    scale, digits = (1000.0, 2) if middle_ms >= 1000.0 else (1.0, 0)
    low, high = (f"{end / scale:,.{digits}f}" for end in ends_ms)
    return f"[bold]{duration(middle_ms)}[/] [dim]({low}-{high})[/]"
