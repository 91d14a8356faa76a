"""How near to its links a handoff moves KV, without engines, Ray or a costly map in the way.

`python bench/data_path.py` puts a source's memory, a mapper (the real `Converter` with the identity
map) and a target's memory into network namespaces behind links of several rates, and hands KV of
the quickstart's large model times two over: one handoff at a time, four at once, and a short one
beside a long one. It writes bench/DATA_PATH.md and bench/data_path.png with the timeline of one
handoff. Needs root, `ip` and `tc`; takes about three minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.data_path_page import Shape, Together, Trial, page, rich_table, timeline
from bench.links import UNLIMITED, rates_of, require_namespaces
from bench.netns_cluster import UCX_ENV, namespaces_of_this_process
from bench.netns_network import Network
from bench.orders import Orders
from cluster.demo_findings import machine

SHAPE = Shape(layers=28, kv_heads=8, head_dim=64)
NODES = ("source", "mapper", "target")
BLOCK_TOKENS = 32
AT_ONCE = 4
SHORT_TOKENS = 512
_BENCH = Path(__file__).resolve().parent


def _program(network: Network, node: str, kind: str, **options: Any) -> Orders:
    """One `data_path_node.py` in its namespace."""
    command = (sys.executable, str(_BENCH / "data_path_node.py"), kind, network.address(node))
    process = subprocess.Popen(
        network.command(node, *command, json.dumps(options)),
        env=os.environ | UCX_ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return Orders(process)


class Course:
    """Source, mapper and target, connected."""

    def __init__(self, network: Network, tokens: int, chunk_tokens: int) -> None:
        shape = asdict(SHAPE)
        self._network = network
        self._tokens = tokens
        self._source = _program(network, "source", "memory", **shape, tokens=AT_ONCE * tokens)
        self._target = _program(network, "target", "memory", **shape, tokens=AT_ONCE * tokens)
        self._mapper = _program(
            network, "mapper", "mapper", **shape, chunk_tokens=chunk_tokens, handoffs=AT_ONCE
        )
        self._layout = self._source.give("layout")
        self._mapper.give("greet", layout=self._layout)
        self._mapper.give("greet", layout=self._target.give("layout"))

    def limit(self, rate_gbps: float | None) -> None:
        """Every link, in each direction."""
        for node in NODES:
            self._network.limit(node, rate_gbps)

    def together(self, *lengths: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Reports of handoffs that begin together, and processor seconds by program."""
        programs = {"source": self._source, "mapper": self._mapper, "target": self._target}
        before = {name: program.give("cpu_s") for name, program in programs.items()}
        orders = []
        for number, tokens in enumerate(lengths):
            first = number * self._tokens // BLOCK_TOKENS
            blocks = list(range(first, first + tokens // BLOCK_TOKENS))
            order = self._mapper.give("begin", layout=self._layout, block_ids=blocks)
            self._target.give("announce", **order, block_ids=blocks)
            orders.append(order["handoff_id"])
        reports = [self._mapper.give("finish", handoff_id=one) for one in orders]
        return reports, {
            name: program.give("cpu_s") - before[name] for name, program in programs.items()
        }

    def end(self) -> None:
        """All programs; the mapper first, for it has connections to the others."""
        for program in (self._mapper, self._source, self._target):
            program.end()


@contextmanager
def connected(tokens: int, chunk_tokens: int) -> Iterator[Course]:
    """A path through namespaces until the block ends."""
    with namespaces_of_this_process(NODES) as (network, _):
        path = Course(network, tokens, chunk_tokens)
        try:
            yield path
        finally:
            path.end()


def measure(
    rates_gbps: list[float | None], lengths: list[int], rounds: int, chunk_tokens: int
) -> tuple[list[Trial], list[Together]]:
    """Single handoffs of every length and handoffs at once, over links of every rate."""
    trials, at_once = [], []
    longest = max(lengths)
    with connected(longest, chunk_tokens) as path:
        for tokens in lengths:
            path.together(tokens)
        for rate in track(rates_gbps, description="rates of the links"):
            path.limit(rate)
            # What the mapper has learnt of other rates must not count here.
            for tokens in (*lengths, *lengths):
                path.together(tokens)
            for _ in range(rounds):
                for tokens in lengths:
                    (report,), cpu_s = path.together(tokens)
                    trials.append(Trial.of(SHAPE, rate, tokens, report, cpu_s))
                reports, _ = path.together(*[longest] * AT_ONCE)
                beside, _ = path.together(*[longest] * (AT_ONCE - 1), SHORT_TOKENS)
                at_once.append(Together.of(rate, longest, reports, SHORT_TOKENS, beside[-1]))
    return trials, at_once


def main(
    rate: Annotated[
        list[str], typer.Option(help="Gb/s of every link, or `unlimited`; repeatable.")
    ] = ["1", "2", UNLIMITED],  # noqa: B006
    tokens: Annotated[list[int], typer.Option(help="Lengths; repeatable.", min=BLOCK_TOKENS)] = [  # noqa: B006
        SHORT_TOKENS,
        2_048,
        6_048,
    ],
    rounds: Annotated[int, typer.Option(help="Runs of everything.", min=1)] = 3,
    chunk_tokens: Annotated[int, typer.Option(help="Largest chunk.", min=BLOCK_TOKENS)] = 512,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every run to this file.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of page and picture.")] = _BENCH,
) -> None:
    """Measure the data path by link rate and length."""
    console = Console(highlight=False)
    require_namespaces()
    if odd := [length for length in tokens if length % BLOCK_TOKENS]:
        raise typer.BadParameter(f"{odd}: lengths are multiples of {BLOCK_TOKENS}")
    rates_gbps = rates_of(rate)
    started, about = time.monotonic(), machine()
    trials, at_once = measure(rates_gbps, sorted(tokens), rounds, chunk_tokens)
    about |= {"seconds": time.monotonic() - started, "load_after": os.getloadavg()[0]}
    if json_path is not None:
        found = {
            "machine": about,
            "shape": asdict(SHAPE),
            "trials": [asdict(trial) for trial in trials],
            "at_once": [asdict(one) for one in at_once],
        }
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    console.print(rich_table(trials))
    (out / "DATA_PATH.md").write_text(page(SHAPE, trials, at_once, about))
    shown = [t for t in trials if t.tokens == max(tokens) and t.rate_gbps == _typical(rates_gbps)]
    timeline(shown[-1], out / "data_path.png")
    console.print(f"Page and picture are in {out}.")


def _typical(rates_gbps: list[float | None]) -> float | None:
    return 1.0 if 1.0 in rates_gbps else rates_gbps[0]


if __name__ == "__main__":
    typer.run(main)
