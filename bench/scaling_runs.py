"""Runs loads over one, two and three mappers, and while their number changes.

One cluster serves all: every mapper is on a node of its own behind a limited link, and nothing else
is limited. It does not judge what it measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.load import Load, Outcome, Sample
from bench.load_model import quickstart_document, transport_document
from bench.netns_cluster import NetnsCluster, netns_cluster
from bench.netns_driver import Driver, driver

MAX_MAPPERS = 3
NODES = 3 + MAX_MAPPERS
RAMP_S = 3.0
_SETTLE_S = 3.0
_PATIENCE_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Some seconds of full load over a number of mappers.

    Rates are what links carried; `mappers_gbps` is what each mapper's carried to it. `own_cores`
    are those that the cluster's processes used, `idle_cores` those that nobody did; what is left
    of the machine's went to other work. `reasons` are those of handoffs that were none.
    """

    pair: str
    rate_gbps: float | None
    round: int
    mappers: int
    in_flight: int
    seconds: float
    handoffs: int
    reasons: Sequence[str]
    handoff_ms: float
    delivered_gbps: float
    mappers_gbps: Sequence[float]
    own_cores: float
    idle_cores: float
    load_average: float

    @property
    def handoffs_per_s(self) -> float:
        """Answers in the window by its length."""
        return self.handoffs / self.seconds


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A load during which mappers came and went. `events` are (moment, what was done then)."""

    name: str
    outcomes: Sequence[Outcome]
    events: Sequence[tuple[float, str]]

    @property
    def samples(self) -> list[Sample]:
        """All of them, in order."""
        return [sample for outcome in self.outcomes for sample in outcome.samples]

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


@dataclass
class Matrix:
    """What to measure."""

    rates_gbps: Sequence[float] = (0.5, 1.0)
    rounds: int = 2
    window_s: float = 12.0
    tokens: int = 1_986
    """A little more than whole blocks of 32: the rest is read, by both engines."""
    in_flight_per_mapper: int = 4
    quickstart: bool = True
    episodes: bool = True


@dataclass
class Measured:
    """All of it."""

    windows: list[Window] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    load_averages: list[float] = field(default_factory=list)
    seconds: float = 0.0


def measure(matrix: Matrix, folder: Path, found: Measured, say: Say) -> None:
    """Start a cluster of six nodes, measure everything on it, and stop it again.

    `folder` holds the tiny model; `found` is filled on the way.
    """
    started = time.monotonic()
    say("starting Ray on six nodes")
    with netns_cluster(NODES) as cluster, driver(cluster) as one:
        bench = _Bench(cluster, one, matrix, folder, found, say)
        bench.throughput()
        if matrix.episodes:
            bench.by_hand()
            bench.by_itself()
        if matrix.quickstart:
            bench.quickstart()
    found.seconds = time.monotonic() - started


class _Bench:
    def __init__(
        self,
        cluster: NetnsCluster,
        one: Driver,
        matrix: Matrix,
        folder: Path,
        found: Measured,
        say: Say,
    ) -> None:
        self._cluster = cluster
        self._driver = one
        self._matrix = matrix
        self._folder = folder
        self._found = found
        self._say = say
        self._mapper_nodes = [node.name for node in cluster.nodes if "mapper" in node.name]

    def throughput(self) -> None:
        """Every number of mappers at every rate, upwards and downwards by turns."""
        up = list(range(1, MAX_MAPPERS + 1))
        self._deploy(1)
        self._warm_up(self._matrix.tokens)
        for number in range(self._matrix.rounds):
            self._found.load_averages.append(os.getloadavg()[0])
            for mappers in up if number % 2 == 0 else up[::-1]:
                self._deploy(mappers)
                for rate_gbps in self._matrix.rates_gbps:
                    self._limit(rate_gbps)
                    self._window("tiny", rate_gbps, number, mappers, (self._matrix.tokens,))
                self._limit(None)

    def quickstart(self) -> None:
        """The quickstart pair at the last rate, with one mapper and with all."""
        rate_gbps = self._matrix.rates_gbps[-1]
        for mappers in (1, MAX_MAPPERS):
            self._say(f"deploying the quickstart pair with {mappers} mappers")
            self._driver.deploy(quickstart_document(mappers=mappers))
            self._warm_up(1_030)
            self._limit(rate_gbps)
            self._window("quickstart", rate_gbps, 0, mappers, (1_030,))
            self._limit(None)

    def by_hand(self) -> None:
        """One mapper, three, one again, by `num_replicas`, under a load that never stops."""
        self._deploy(1)
        self._limit(self._matrix.rates_gbps[-1])
        events: list[tuple[float, str]] = []
        self._driver.start_load(self._load(6, watched=True))
        time.sleep(12)
        for mappers, then_s in ((MAX_MAPPERS, 15), (1, 12)):
            events.append((time.monotonic(), f"num_replicas: {mappers}"))
            self._deploy(mappers)
            time.sleep(then_s)
        outcome = self._driver.finish_load(stop=True)
        self._found.episodes.append(Episode(name="by hand", outcomes=[outcome], events=events))

    def by_itself(self) -> None:
        """One mapper, three, one again, by their own signal: a light load, a heavy, a light."""
        self._say("deploying mappers that scale themselves")
        scaling = {
            "max_replicas": MAX_MAPPERS,
            "target_backlog_s": 1.5,
            "upscale_delay_s": 2.0,
            "downscale_delay_s": 6.0,
        }
        self._driver.deploy(transport_document(self._folder, mappers=None, scaling=scaling))
        self._warm_up(self._matrix.tokens)
        self._until_there_are(1, least_s=5)
        self._limit(self._matrix.rates_gbps[-1])
        events: list[tuple[float, str]] = []
        outcomes = []
        for in_flight, wanted, least_s in ((1, 1, 10), (12, MAX_MAPPERS, 35), (1, 1, 15)):
            self._say(f"{in_flight} in flight, until there are {wanted} mappers")
            events.append((time.monotonic(), f"{in_flight} in flight"))
            self._driver.start_load(self._load(in_flight, watched=True))
            self._until_there_are(wanted, least_s=least_s)
            outcomes.append(self._driver.finish_load(stop=True))
        self._found.episodes.append(Episode(name="by itself", outcomes=outcomes, events=events))

    def _until_there_are(self, mappers: int, *, least_s: float) -> None:
        """Wait for so many and no other state, or a minute."""
        begun = time.monotonic()
        while (waited_s := time.monotonic() - begun) < _PATIENCE_S:
            time.sleep(1)
            replicas = self._driver.status()["deployments"]["mapper"]["replicas"]
            if waited_s > least_s and replicas == {"RUNNING": mappers}:
                break

    def _window(
        self, pair: str, rate_gbps: float, number: int, mappers: int, tokens: tuple[int, ...]
    ) -> None:
        in_flight = mappers * self._matrix.in_flight_per_mapper
        self._say(f"{pair}: {mappers} mappers, {rate_gbps:g} Gb/s, round {number + 1}")
        network = self._cluster.network
        names = ["large", *self._mapper_nodes]
        self._driver.start_load(self._load(in_flight, tokens=tokens))
        time.sleep(RAMP_S)
        before = [network.traffic(name) for name in names]
        idle_s, own_s = _idle_s(), self._own_s()
        begun = time.monotonic()
        time.sleep(self._matrix.window_s)
        moved = [
            network.traffic(name) - earlier for name, earlier in zip(names, before, strict=True)
        ]
        ended = time.monotonic()
        idle_cores = (_idle_s() - idle_s) / (ended - begun)
        own_cores = (self._own_s() - own_s) / (ended - begun)
        records = self._driver.finish_load(stop=True).records
        here = [record for record in records if begun <= record.ended_s < ended]
        times = sorted(record.handoff_ms for record in here if record.handoff_ms is not None)
        large, *at_mappers = (one.received_bytes * 8e-9 / (ended - begun) for one in moved)
        self._found.windows.append(
            Window(
                pair=pair,
                rate_gbps=rate_gbps,
                round=number,
                mappers=mappers,
                in_flight=in_flight,
                seconds=ended - begun,
                handoffs=len(here),
                reasons=[record.complaint for record in records if record.complaint],
                handoff_ms=times[len(times) // 2] if times else 0.0,
                delivered_gbps=large,
                mappers_gbps=at_mappers,
                own_cores=own_cores,
                idle_cores=idle_cores,
                load_average=os.getloadavg()[0],
            )
        )

    def _load(
        self, in_flight: int, *, tokens: tuple[int, ...] | None = None, watched: bool = False
    ) -> Load:
        return Load(
            in_flight=in_flight,
            tokens=tokens or (self._matrix.tokens,),
            watch_s=1.0 if watched else None,
        )

    def _warm_up(self, tokens: int) -> None:
        """Every conversation once, so that the small model has read them all."""
        load = self._load(2, tokens=(tokens,))
        many = 2 * len(load.conversations)
        self._driver.start_load(Load(**asdict(load) | {"requests": many}))
        self._driver.finish_load()

    def _deploy(self, mappers: int) -> None:
        self._say(f"deploying {mappers} mappers")
        self._driver.deploy(transport_document(self._folder, mappers=mappers))
        time.sleep(_SETTLE_S)

    def _own_s(self) -> float:
        """Processor time of all processes on the nodes, of the kernel on their behalf included."""
        ticks = 0
        for node in self._cluster.nodes:
            for pid in self._cluster.pids(node.name):
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has just ended
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _limit(self, rate_gbps: float | None) -> None:
        for name in self._mapper_nodes:
            self._cluster.network.limit(name, rate_gbps)


def _idle_s() -> float:
    """Seconds that the machine's cores have had nothing to do, together."""
    idle, waiting = Path("/proc/stat").read_text().split()[4:6]
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")
