"""Hundreds of handoffs over limited links: what became of them, of memory and of the pools.

It does not judge what it measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.load import Load, Outcome
from bench.netns_cluster import netns_cluster
from bench.netns_driver import cascade_document, driver
from bench.soak_memory import Resident, residents

PLACES = {"small": "small", "large": "large", "mapper": "mapper"}
NODES = 4
_POLL_S = 0.25
_EMPTY_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Pools:
    """What is held at a moment: bytes of mappers, blocks of each engine."""

    mapper_handoffs: int
    mapper_bytes: int
    pinned_blocks: Mapping[str, int]
    loading_blocks: Mapping[str, int]
    free_blocks: Mapping[str, int]

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Pools:
        """From the answer of `/v1/cascade/status`."""
        deployments = status["deployments"]
        mappers = deployments["mapper"]["described"]

        def blocks(key: str) -> dict[str, int]:
            return {
                name: sum(one[key] for one in deployments[name]["described"])
                for name in ("small", "large")
            }

        return cls(
            mapper_handoffs=sum(one["running"] for one in mappers),
            mapper_bytes=sum(one["pool_in_use_bytes"] for one in mappers),
            pinned_blocks=blocks("pinned_blocks"),
            loading_blocks=blocks("loading_blocks"),
            free_blocks=blocks("free_blocks"),
        )


@dataclass
class Soak:
    """What to do."""

    handoffs: int = 500
    tokens: Sequence[int] = (200, 400, 800, 1_200)
    seeds: int = 16
    in_flight: int = 4
    rate_gbps: float = 1.0
    every: int = 25


@dataclass
class Measured:
    """All of it. `pools` are those before the first request and after the last one."""

    outcome: Outcome = field(default_factory=lambda: Outcome([]))
    memory: list[Resident] = field(default_factory=list)
    pools: list[Pools] = field(default_factory=list)
    emptied_s: float = 0.0
    """How long after the last answer nothing was held any more."""
    load_averages: list[float] = field(default_factory=list)
    seconds: float = 0.0


def measure(soak: Soak, say: Callable[[str, int], None]) -> Measured:
    """Start a cluster of four nodes, run everything on it, and stop it again."""
    found = Measured()
    say("starting Ray on four nodes", 0)
    with netns_cluster(NODES, rate_gbps=soak.rate_gbps) as cluster, driver(cluster) as one:
        say("deploying", 0)
        one.deploy(cascade_document(PLACES))
        found.pools.append(Pools.of(one.status()))
        found.load_averages.append(os.getloadavg()[0])
        begun = time.monotonic()
        one.start_load(
            Load(
                in_flight=soak.in_flight,
                tokens=tuple(soak.tokens),
                seeds=soak.seeds,
                requests=soak.handoffs,
                answer_tokens=4,
            )
        )
        due, running = 0, True
        while running:
            answers, running = one.answered()
            if answers >= due or not running:
                pids = {node.name: cluster.pids(node.name) for node in cluster.nodes}
                found.memory += residents(pids, answers)
                due = answers // soak.every * soak.every + soak.every
            say("handing over", answers)
            time.sleep(_POLL_S)
        found.outcome = one.finish_load()
        found.seconds = time.monotonic() - begun
        found.load_averages.append(os.getloadavg()[0])
        ended = time.monotonic()
        while True:
            pools = Pools.of(one.status())
            if pools == found.pools[0] or time.monotonic() - ended > _EMPTY_WITHIN_S:
                break
            time.sleep(_POLL_S)
        found.pools.append(pools)
        found.emptied_s = time.monotonic() - ended
    return found


def content_of(soak: Soak, found: Measured, about: dict[str, Any]) -> dict[str, Any]:
    """Of the `--json` file."""
    return {"machine": about, "soak": asdict(soak), **asdict(found)}


def read(content: Mapping[str, Any]) -> Measured:
    """What `content_of` made."""
    return Measured(
        outcome=Outcome.from_json(content["outcome"]),
        memory=[Resident(**one) for one in content["memory"]],
        pools=[Pools(**one) for one in content["pools"]],
        emptied_s=content["emptied_s"],
        load_averages=content["load_averages"],
        seconds=content["seconds"],
    )
