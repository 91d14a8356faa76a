"""Measures links with NIXL itself, by small actors where engines and mappers would run.

An actor owns a buffer that others read and write, as an engine does, and another from which it
reads and writes theirs, as a mapper does. It knows no models; memory is the host's.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import CascadeConfig, PlacementConfig
from cluster.errors import ConfigError
from cluster.links import At, Engine, Link, MeasuredLinks

_START_S = 120.0
_MEASURE_S = 300.0
_BUFFER_BYTES = 64 << 20
_FIRST_BYTES = 1 << 20
_LONG_ENOUGH_S = 0.1
"""A transfer that takes less is followed by one of twice its bytes, where the buffer has them."""
_REPEATS = 3
_SMALL_BYTES = 64
_SMALL_REPEATS = 21
_SHARE = 0.0001
"""Of a custom resource: the least that Ray counts, so that a probe fits beside what runs."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Memory that others may read and write, and the agent to which it belongs."""

    name: str
    metadata: bytes
    address: int


class Probe:
    """One actor. UCX reads its variables at the start of the process, from the runtime env."""

    def __init__(self, progress_delay_us: int) -> None:
        import numpy as np

        from cluster.transport import Initiator, make_agent

        generation = uuid.uuid4().hex
        # Touched, so that the first transfer does not pay for pages.
        self._theirs, self._own = (np.ones(_BUFFER_BYTES, dtype=np.uint8) for _ in range(2))
        self._agent = make_agent(
            f"probe-engine-{generation}", progress_thread=True, progress_delay_us=progress_delay_us
        )
        address = self._theirs.ctypes.data
        self._agent.register_memory([(address, _BUFFER_BYTES, 0, "")], "DRAM")
        self._buffer = Buffer(
            name=f"probe-engine-{generation}",
            metadata=self._agent.get_agent_metadata(),
            address=address,
        )
        self._initiator = Initiator(
            f"probe-mapper-{generation}",
            pool_address=self._own.ctypes.data,
            pool_bytes=_BUFFER_BYTES,
            memory="DRAM",
        )

    def describe(self) -> tuple[str, Buffer]:
        """(this node's address, what the others may read and write)."""
        import ray

        return str(ray.util.get_node_ip_address()), self._buffer

    def measure(self, buffer: Buffer) -> tuple[float, float, float]:
        """(READ Gb/s, WRITE Gb/s, latency in ms) to another probe's buffer."""
        import numpy as np

        from cluster.transport import Peer

        peer = Peer(name=buffer.name, metadata=buffer.metadata, memory="DRAM")
        self._initiator.connect(peer).result()

        def seconds(operation: Any, num_bytes: int) -> float:
            ours, theirs = (
                np.array([[address, num_bytes, 0]], dtype=np.uint64)
                for address in (self._own.ctypes.data, buffer.address)
            )
            return self._initiator.post(operation, ours, theirs, peer).result().seconds

        small = [seconds("READ", _SMALL_BYTES) for _ in range(_SMALL_REPEATS)]
        rates = [_best_gbps(seconds, operation) for operation in ("READ", "WRITE")]
        return rates[0], rates[1], statistics.median(small) * 1e3


def _best_gbps(seconds: Callable[[str, int], float], operation: str) -> float:
    """The best of a few transfers that are long enough to say something of the rate."""
    num_bytes = _FIRST_BYTES
    while (taken_s := seconds(operation, num_bytes)) < _LONG_ENOUGH_S and num_bytes < _BUFFER_BYTES:
        num_bytes *= 2
    taken_s = min(taken_s, *(seconds(operation, num_bytes) for _ in range(_REPEATS - 1)))
    return num_bytes * 8 / taken_s / 1e9


def measure_links(
    cascade: CascadeConfig, *, progress: Callable[[str], None] | None = None
) -> MeasuredLinks:
    """Measure every link that `place: auto` may have to choose from, on the Ray cluster at hand.

    A mapper's own placement counts where it names nodes. Takes seconds, more on slow links, and
    disturbs what runs there meanwhile. ConfigError when no node is as a placement asks.
    """
    import ray

    tell = progress or (lambda text: None)
    places: dict[At, PlacementConfig] = {
        "small": cascade.small.placement,
        "large": cascade.large.placement,
    }
    if cascade.mapper.placement.resources or cascade.mapper.placement.label_selector:
        places["own"] = cascade.mapper.placement
    probes: dict[At, Any] = {}
    try:
        for at, placement in places.items():
            probes[at] = _start(placement, cascade)
        tell("starting a probe on every node")
        described = {at: _described(at, places[at], probe) for at, probe in probes.items()}
        links = []
        engines: tuple[Engine, ...] = ("small", "large")
        for at, probe in probes.items():
            for engine in engines:
                tell(f"measuring from {at} to {engine}")
                _, buffer = described[engine]
                reference = probe.measure.remote(buffer)
                read, write, latency_ms = ray.get(reference, timeout=_MEASURE_S)
                links.append(
                    Link(
                        at=at,
                        engine=engine,
                        read_gbps=read,
                        write_gbps=write,
                        latency_ms=latency_ms,
                    )
                )
    finally:
        for probe in probes.values():
            ray.kill(probe)
    addresses = {at: address for at, (address, _) in described.items()}
    return MeasuredLinks(addresses=addresses, links=tuple(links))


def _start(placement: PlacementConfig, cascade: CascadeConfig) -> Any:
    import ray

    options: dict[str, Any] = {"num_cpus": 0}
    if placement.resources:
        options["resources"] = dict.fromkeys(placement.resources, _SHARE)
    if placement.label_selector:
        options["label_selector"] = dict(placement.label_selector)
    if cascade.transport.ucx_env:
        options["runtime_env"] = {"env_vars": dict(cascade.transport.ucx_env)}
    actor: Any = ray.remote(Probe)
    return actor.options(**options).remote(cascade.transport.progress_delay_us)


def _described(at: At, placement: PlacementConfig, probe: Any) -> tuple[str, Buffer]:
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        found: tuple[str, Buffer] = ray.get(probe.describe.remote(), timeout=_START_S)
    except GetTimeoutError:
        section = "mapper" if at == "own" else at
        raise ConfigError(
            f"args.{section}.placement: no node of the Ray cluster offers "
            f"{dict(placement.resources) or dict(placement.label_selector)}; start one that does"
        ) from None
    return found
