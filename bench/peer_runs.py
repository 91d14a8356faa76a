"""Runs Ray's prefill/decode application and this project's handoffs over the same links, in turn.

One cluster serves all systems, one after the other: engines of two systems at once would take each
other's cores. It does not judge what it measures.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.netns_cluster import NetnsCluster, netns_cluster
from bench.netns_driver import Driver, cascade_document, driver
from bench.peer_driver import PeerDriver, peer_document, peer_driver

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

MODEL = "quickstart:large"
_POOL_TOKENS = 24_576
_WARM_UP_TOKENS = 560


@dataclass(frozen=True)
class System:
    """What moves a cache from one engine to another. `place` is the node of a mapper."""

    key: str
    name: str
    place: str | None = None
    mapper: str | None = None

    @property
    def is_peer(self) -> bool:
        """Whether Ray's application is meant."""
        return self.mapper is None


SYSTEMS = (
    System("identity", "identity handoff, mapper at the target", "large", "identity"),
    System("identity-own", "identity handoff, mapper on its own node", "mapper", "identity"),
    System("mapped", "mapped handoff, mapper at the target", "large", "quickstart"),
    System("peer", "Ray PD with NixlConnector as it ships"),
    System("peer-helped", "Ray PD, NixlConnector kept off the engines' cores"),
)
"""In the order of their turns."""


@dataclass(frozen=True)
class Run:
    """One cache moved. Times in ms.

    `first_token_ms` runs from the moment at which the source's work is known to be done to the
    target's first token, on the clock of whoever conducts: Ray's decode server, or the router.
    `moving_ms` is the transfer itself, on the clock of the process that posted it.
    """

    system: str
    rate_gbps: float | None
    tokens: int
    prompt_tokens: int
    first: bool
    first_token_ms: float
    moving_ms: float
    crossed_bytes: int
    """Payload that crossed the target's link, as the system counts it."""
    received_bytes: int
    """What the target's link carried to it meanwhile, with everything else."""
    stages_ms: dict[str, float]
    good: bool


@dataclass
class Matrix:
    """What to measure."""

    systems: Sequence[System] = SYSTEMS
    rates_gbps: Sequence[float | None] = (0.5, 1.0, None)
    tokens: Sequence[int] = (560, 2_060, 6_060)
    rounds: int = 3

    @property
    def steps(self) -> int:
        """Requests."""
        per_system = 1 + len(self.tokens) * (1 + self.rounds * len(self.rates_gbps))
        return len(self.systems) * per_system


@dataclass
class Measured:
    """All runs, and what the machine did besides."""

    runs: list[Run] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    load_averages: dict[str, float] = field(default_factory=dict)


def measure(matrix: Matrix, console: Console, save: Callable[[Measured], None]) -> Measured:
    """Start a cluster of four nodes, let each system have its turn on it, and stop it again.

    `save` is called after each turn: they take minutes.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # Ray's application is to import its watch from here, on every node.
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    found = Measured()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("starting Ray on four nodes", total=matrix.steps)
        with netns_cluster(4) as cluster:
            for system in matrix.systems:
                started = time.monotonic()
                with _asker(cluster, system, progress, task) as ask:
                    _Turn(cluster, system, matrix, found, progress, task, ask).run()
                found.seconds[system.key] = round(time.monotonic() - started, 1)
                found.load_averages[system.key] = round(os.getloadavg()[0], 2)
                save(found)
    return found


Ask = Callable[[int], dict[str, Any]]
"""From about how many tokens to what `Run` holds of one request."""


@contextmanager
def _asker(
    cluster: NetnsCluster, system: System, progress: Progress, task: TaskID
) -> Iterator[Ask]:
    """Deploy a system; the function that has it move a conversation's cache."""
    progress.update(task, description=f"deploying: {system.name}")
    cluster.limit_all(None)
    if system.is_peer:
        with peer_driver(cluster) as peer:
            peer.deploy(_peer_document(helped=system.key == "peer-helped"))
            yield lambda tokens: _ask_peer(peer, tokens)
    else:
        with driver(cluster) as one:
            one.deploy(_cascade_document(system))
            yield lambda tokens: _ask_cascade(one, tokens)


def _peer_document(*, helped: bool) -> dict[str, Any]:
    from cluster.sources import kv_bytes_per_token, resolve_model

    folder = resolve_model(MODEL)
    pool_bytes = _POOL_TOKENS * kv_bytes_per_token(folder, "bfloat16")
    return peer_document(folder, pool_bytes, helped=helped)


def _cascade_document(system: System) -> dict[str, Any]:
    assert system.place is not None and system.mapper is not None
    document = cascade_document({"small": "small", "large": "large", "mapper": system.place})
    args = document["applications"][0]["args"]
    args["mapper"]["small_to_large"] = system.mapper
    # As the peer: whatever can come comes, and the target reads what is left of the last block.
    args["handoff"] = {"native_suffix_tokens": 1}
    if system.mapper == "identity":
        args["small"]["source"] = MODEL
    return document


def _ask_peer(peer: PeerDriver, tokens: int) -> dict[str, Any]:
    seen = peer.ask(tokens, tokens)
    return {
        "prompt_tokens": seen.prompt_tokens,
        "first_token_ms": 1e3 * seen.first_token_s,
        "moving_ms": 1e3 * seen.transfer_s,
        "crossed_bytes": round(seen.bytes),
        "stages_ms": {"prefill": 1e3 * seen.prefill_s, "post": 1e3 * seen.post_s},
        "good": seen.transfers == 1,
    }


def _ask_cascade(one: Driver, tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        # Of its own, so that the target has nothing of the conversation from before.
        "session_id": uuid.uuid4().hex,
        "escalate_after_tokens": 1,
        "recompute": False,
    }
    answer = one.ask(tokens, tokens, options)
    handoff = answer.cascade.handoff
    if handoff is None or handoff.handoff_ms is None:
        raise RuntimeError(f"{tokens} tokens were not handed over: {answer.cascade}")
    stages_ms = dict(handoff.stages_ms)
    around_ms = sum(stages_ms.get(name, 0.0) for name in ("ticket", "queue", "admit"))
    return {
        "prompt_tokens": answer.prompt_tokens,
        "first_token_ms": handoff.handoff_ms,
        "moving_ms": handoff.handoff_ms - around_ms,
        # With the mapper at the target, what it read; both are the same for the identity.
        "crossed_bytes": handoff.bytes_read,
        "stages_ms": stages_ms,
        "good": handoff.path == "mapped" and "map" in stages_ms,
    }


@dataclass
class _Turn:
    cluster: NetnsCluster
    system: System
    matrix: Matrix
    found: Measured
    progress: Progress
    task: TaskID
    ask: Ask

    def run(self) -> None:
        """Every round has every rate and length; another rate comes first each time."""
        self._record(_WARM_UP_TOKENS, None, first=True)
        for tokens in self.matrix.tokens:
            # From here on the source has every conversation in its prefix cache.
            self._record(tokens, None, first=True)
        rates = list(self.matrix.rates_gbps)
        for number in range(self.matrix.rounds):
            at = number % len(rates)
            for rate in (*rates[at:], *rates[:at]):
                self.cluster.limit_all(rate)
                for tokens in self.matrix.tokens:
                    self._record(tokens, rate, first=False)
        self.cluster.limit_all(None)

    def _record(self, tokens: int, rate_gbps: float | None, *, first: bool) -> None:
        link = "no limit" if rate_gbps is None else f"{rate_gbps:g} Gb/s"
        self.progress.update(
            self.task, description=f"{self.system.name}, {link}, {tokens:,} tokens"
        )
        before = self.cluster.network.traffic("large")
        seen = self.ask(tokens)
        moved = self.cluster.network.traffic("large") - before
        self.found.runs.append(
            Run(
                system=self.system.key,
                rate_gbps=rate_gbps,
                tokens=tokens,
                first=first,
                received_bytes=moved.received_bytes,
                **seen,
            )
        )
        self.progress.advance(self.task)
