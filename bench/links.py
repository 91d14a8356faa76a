"""Links of limited rates as benches speak of them: options of commands, and words of pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.netns_network import missing

UNLIMITED = "unlimited"

Again = Annotated[
    Path | None,
    typer.Option("--from", help="Measure nothing: make page and picture of such a file."),
]
"""The option of a file that the same command has written."""


def rates_of(words: Sequence[str]) -> list[float | None]:
    """Gb/s of each word; None for a link without a limit."""
    return [None if word == UNLIMITED else float(word) for word in words]


def require_namespaces() -> None:
    """Refuse a command where this machine cannot limit links."""
    if reason := missing():
        raise typer.BadParameter(f"{reason}; run it on a machine that has it")


def link_name(rate_gbps: float | None) -> str:
    """A link as tables call it."""
    return UNLIMITED if rate_gbps is None else f"{rate_gbps:g} Gb/s"


def rate_order(rate_gbps: float | None) -> float:
    """Sorts links by rate."""
    return float("inf") if rate_gbps is None else rate_gbps
