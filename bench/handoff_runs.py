"""Runs handoffs over links of several rates, with the mapper on one node after another.

One deployment serves all: moving the mapper leaves the engines running, and rates are changed
under way. It knows nothing of plans, and does not judge what it measures.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bench.netns_cluster import NetnsCluster, netns_cluster
from bench.netns_driver import Driver, cascade_document, driver

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLACES = {"source": "small", "target": "large", "own": "mapper"}
"""Where the mapper is, and the node of the cluster that it is then on."""

WARM_UP_TOKENS = 560

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One escalation. `handoff_ms` is the router's clock from the decision to the first token."""

    place: str
    rate_gbps: float | None
    tokens: int
    first: bool
    """The first one of a mapper."""
    wanted: str
    path: str
    reason: str | None
    temperature: str | None
    prompt_tokens: int
    covered_tokens: int
    bytes_read: int
    bytes_written: int
    handoff_ms: float
    stages_ms: dict[str, float]
    target_received_bytes: int
    """What the target's link carried to it meanwhile."""

    @property
    def good(self) -> bool:
        """Whether it went the way that it was meant to, and a mapper said what it took."""
        return self.path == self.wanted and (self.path != "mapped" or "map" in self.stages_ms)


@dataclass
class Matrix:
    """What to measure."""

    rates_gbps: Sequence[float | None] = (0.1, 1.0, 5.0, None)
    tokens: Sequence[int] = (560, 2_060, 6_060)
    places: Sequence[str] = tuple(PLACES)
    rounds: int = 3

    @property
    def steps(self) -> int:
        """Requests, and moves of the mapper."""
        per_visit = 2 + len(self.rates_gbps) * len(self.tokens)
        return self.rounds * (len(self.places) * per_visit + len(self.tokens))


@dataclass
class Measured:
    """All runs, and how long parts of the measurement took."""

    runs: list[Run] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    load_averages: list[float] = field(default_factory=list)


def measure(matrix: Matrix, console: Console) -> Measured:
    """Start a cluster of four nodes, measure everything on it, and stop it again.

    Every round visits every place. The first handoff after the mapper has moved stands apart.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    found = Measured()
    started = time.monotonic()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("starting Ray on four nodes", total=matrix.steps)
        with netns_cluster(4) as cluster, driver(cluster) as one:
            _lap(found, "ray", started)
            bench = _Bench(cluster, one, matrix, found, progress, task)
            bench.deploy()
            for number in range(matrix.rounds):
                bench.round(number)
            found.load_averages.append(os.getloadavg()[0])
            _lap(found, "measured", started)
    _lap(found, "all", started)
    return found


class _Bench:
    def __init__(
        self,
        cluster: NetnsCluster,
        one: Driver,
        matrix: Matrix,
        found: Measured,
        progress: Progress,
        task: TaskID,
    ) -> None:
        self._cluster = cluster
        self._driver = one
        self._matrix = matrix
        self._found = found
        self._progress = progress
        self._task = task
        # The first round begins with another one, so that the mapper has to move there.
        self._place = matrix.places[-1]
        self._rate_gbps: float | None = None

    def deploy(self) -> None:
        """The cascade, and one request of each path that nobody counts."""
        started = time.monotonic()
        self._say("deploying")
        self._move(self._place)
        for wanted in ("recompute", "mapped"):
            self._ask(WARM_UP_TOKENS, wanted)
        # From here on the small model has read every conversation: that lies before the interval.
        for tokens in self._matrix.tokens:
            self._driver.ask(tokens, tokens, {"force": "small"}, answer_tokens=2)
        self._found.seconds["deploy"] = round(time.monotonic() - started, 1)

    def round(self, number: int) -> None:
        """Every place, rate and length once, and every length by reading again.

        Another place and rate comes first each time. Reading again moves no cache: no limit.
        """
        matrix = self._matrix
        self._found.load_averages.append(os.getloadavg()[0])
        for place in _turned(matrix.places, number):
            self._say(f"round {number + 1}: moving the mapper to {place}")
            self._limit(None)
            # With one place alone, another mapper takes its place.
            if place == self._place:
                self._driver.restart("mapper")
            else:
                self._move(place)
            self._advance()
            self._record(WARM_UP_TOKENS, "mapped", first=True)
            for rate in _turned(matrix.rates_gbps, number):
                self._limit(rate)
                for tokens in matrix.tokens:
                    self._record(tokens, "mapped")
        self._limit(None)
        for tokens in matrix.tokens:
            self._record(tokens, "recompute")

    def _move(self, place: str) -> None:
        places = {"small": "small", "large": "large", "mapper": PLACES[place]}
        self._driver.deploy(cascade_document(places))
        self._place = place

    def _limit(self, rate_gbps: float | None) -> None:
        self._cluster.limit_all(rate_gbps)
        self._rate_gbps = rate_gbps

    def _record(self, tokens: int, wanted: str, *, first: bool = False) -> None:
        rate = "unlimited" if self._rate_gbps is None else f"{self._rate_gbps:g} Gb/s"
        self._say(f"mapper at {self._place}, {rate}, {tokens:,} tokens, {wanted}")
        self._found.runs.append(self._ask(tokens, wanted, first=first))
        self._advance()

    def _ask(self, tokens: int, wanted: str, *, first: bool = False) -> Run:
        network = self._cluster.network
        before = network.traffic("large")
        options: dict[str, Any] = {
            # Of its own, so that neither model has anything of the conversation from before.
            "session_id": uuid.uuid4().hex,
            "escalate_after_tokens": 1,
            "recompute": wanted == "recompute",
        }
        answer = self._driver.ask(tokens, tokens, options)
        handoff = answer.cascade.handoff
        if handoff is None or handoff.handoff_ms is None:
            raise RuntimeError(f"{tokens} tokens were not handed over: {answer.cascade}")
        return Run(
            place=self._place,
            rate_gbps=self._rate_gbps,
            tokens=tokens,
            first=first,
            wanted=wanted,
            path=handoff.path,
            reason=handoff.reason,
            temperature=handoff.temperature,
            prompt_tokens=answer.prompt_tokens,
            covered_tokens=handoff.covered_tokens,
            bytes_read=handoff.bytes_read,
            bytes_written=handoff.bytes_written,
            handoff_ms=handoff.handoff_ms,
            stages_ms=dict(handoff.stages_ms),
            target_received_bytes=(network.traffic("large") - before).received_bytes,
        )

    def _say(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def _advance(self) -> None:
        self._progress.advance(self._task)


def _turned(items: Sequence[T], by: int) -> list[T]:
    at = by % len(items)
    return [*items[at:], *items[:at]]


def _lap(found: Measured, name: str, started: float) -> None:
    found.seconds[name] = round(time.monotonic() - started, 1)
