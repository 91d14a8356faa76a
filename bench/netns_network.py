"""Network namespaces of one run, each behind a link of a chosen rate, and how they go away again.

    node: eth0 ─── veth pair ─── port on a bridge, in the namespace `switch` of the same run

Everything lives in namespaces whose names begin with the run's prefix, so removing these removes
all of it; the machine's own network is never touched. Needs root, `ip` and `tc`. Standard library
only: the process that cleans up after a killed run must start at once. It knows nothing of Ray.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SWITCH = "switch"
_SUBNET = "10.77.0"
_GATEWAY = f"{_SUBNET}.254"
_PREFIX = re.compile(r"(kvc(\d+)t(\d+)-)")
# What a token bucket may send at once. Less than a timer tick's worth would lower the rate, less
# than the largest segment that TCP hands down would have every segment cut up.
_BURST_S = 0.002
_MIN_BURST_BYTES = 70_000
_QUEUE_MS = 50
# Linux's default. What a machine prefers may not be: BBR, behind a token bucket and on busy
# processors, was seen to hold a 5 Gb/s link at 0.1.
_CONGESTION = "cubic"
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_TERM_S = 3.0
_KILL_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Traffic:
    """Bytes on a node's end of its link, Ethernet headers included."""

    received_bytes: int
    sent_bytes: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.received_bytes - earlier.received_bytes, self.sent_bytes - earlier.sent_bytes
        )


def missing() -> str | None:
    """Why this machine cannot do it; None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing; install iproute2"
    return None


def own_prefix() -> str:
    """`kvc<pid>t<start>-`: names this process and no later one with the same id."""
    return f"kvc{os.getpid()}t{_start_ticks(os.getpid())}-"


def state_folder(prefix: str) -> Path:
    """Where a run keeps its files; removed with its namespaces."""
    return Path(tempfile.gettempdir()) / prefix.rstrip("-")


class Network:
    """The namespaces of one run, one per name, in the order of their addresses."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        self._prefix = prefix
        self._addresses = {name: f"{_SUBNET}.{n}" for n, name in enumerate(names, start=1)}
        self._limited: set[str] = set()
        switch = self.namespace(_SWITCH)
        for namespace in (switch, *map(self.namespace, names)):
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "address", "add", f"{_GATEWAY}/24", "dev", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        # Whoever looks for a way out is told at once that there is none, rather than never.
        _run(*self.command(_SWITCH, "sysctl", "-qw", "net.ipv4.ip_forward=1"))
        for name, address in self._addresses.items():
            node = self.namespace(name)
            pair = ("eth0", "netns", node, "type", "veth", "peer", "name", name, "netns", switch)
            _run("ip", "link", "add", *pair)
            _run("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
            _run("ip", "-n", node, "address", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", node, "link", "set", "eth0", "up")
            _run("ip", "-n", node, "route", "add", "default", "via", _GATEWAY)
            if _CONGESTION in _AVAILABLE.read_text().split():
                link = ("dev", "eth0", "proto", "kernel", "scope", "link", "src", address)
                route = (f"{_SUBNET}.0/24", *link, "congctl", _CONGESTION)
                _run("ip", "-n", node, "route", "replace", *route)

    def namespace(self, name: str) -> str:
        """The namespace of a node, as `ip netns` lists it."""
        return f"{self._prefix}{name}"

    def address(self, name: str) -> str:
        """A node's IPv4 address."""
        return self._addresses[name]

    def command(self, name: str, *command: str) -> list[str]:
        """`command` as it runs inside a node's namespace."""
        return ["ip", "netns", "exec", self.namespace(name), *command]

    def limit(self, name: str, rate_gbps: float | None, delay_ms: float = 0.0) -> None:
        """Let a node's link carry so much in each direction; None is what the machine can do.

        `delay_ms` is added to each direction too. What is queued at that moment is lost.
        RuntimeError when the kernel cannot; few that are not a distribution's have netem.
        """
        ends = [(self.namespace(name), "eth0"), (self.namespace(_SWITCH), name)]
        for namespace, device in ends:
            tc = ("tc", "-n", namespace, "qdisc")
            if name in self._limited:
                _run(*tc, "del", "dev", device, "root")
            parent: tuple[str, ...] = ("root",)
            if rate_gbps is not None:
                burst = max(_MIN_BURST_BYTES, round(rate_gbps * 1e9 / 8 * _BURST_S))
                shape = ("tbf", "rate", f"{round(rate_gbps * 1e9)}bit", "burst", f"{burst}b")
                late = ("latency", f"{_QUEUE_MS}ms")
                _run(*tc, "add", "dev", device, "root", "handle", "1:", *shape, *late)
                parent = ("parent", "1:1")
            if delay_ms:
                netem = ("netem", "delay", f"{delay_ms}ms", "limit", "100000")
                _run(*tc, "add", "dev", device, *parent, "handle", "10:", *netem)
        self._limited.discard(name)
        if rate_gbps is not None or delay_ms:
            self._limited.add(name)

    def traffic(self, name: str) -> Traffic:
        """What a node has received and sent so far."""
        shown = _run("ip", "-n", self.namespace(name), "-s", "-j", "link", "show", "dev", "eth0")
        counts = json.loads(shown)[0]["stats64"]
        return Traffic(counts["rx"]["bytes"], counts["tx"]["bytes"])


def namespaces(prefix: str) -> list[str]:
    """All network namespaces whose names begin so."""
    lines = _run("ip", "netns", "list").splitlines()
    return [name for line in lines if (name := line.split(" ")[0]).startswith(prefix)]


def remove(prefix: str) -> None:
    """End every process in a run's namespaces, and remove these and its files.

    May run twice at once. RuntimeError when something is left.
    """
    mine = namespaces(prefix)
    for sent, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        deadline = time.monotonic() + patience_s
        told: set[int] = set()
        while (alive := _pids(mine)) and time.monotonic() < deadline:
            for pid in alive - told:
                _signal(pid, sent)
            told |= alive
            time.sleep(_POLL_S)
    for namespace in mine:
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
    shutil.rmtree(state_folder(prefix), ignore_errors=True)
    if left := namespaces(prefix):
        raise RuntimeError(
            f"network namespaces are left: {', '.join(left)}; processes in them: "
            f"{sorted(_pids(left))}"
        )


def sweep() -> list[str]:
    """Remove what runs left whose process and whose guard were killed; their prefixes."""
    folders = Path(tempfile.gettempdir()).glob("kvc*t*")
    names = [*namespaces("kvc"), *(f"{one.name}-" for one in folders)]
    stale = set()
    for name in names:
        if (found := _PREFIX.match(name)) and not _lives(int(found[2]), found[3]):
            stale.add(found[1])
    for prefix in sorted(stale):
        remove(prefix)
    return sorted(stale)


def _lives(pid: int, start_ticks: str) -> bool:
    try:
        return _start_ticks(pid) == start_ticks
    except FileNotFoundError:
        return False


def _start_ticks(pid: int) -> str:
    """When a process started, in clock ticks since boot."""
    # The name, field 2, is in brackets and may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _pids(names: Sequence[str]) -> set[int]:
    found: set[int] = set()
    for name in names:
        # Fails when another process has just removed the namespace.
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        found |= {int(pid) for pid in done.stdout.split()}
    return found


def _signal(pid: int, sent: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended by itself
        os.kill(pid, sent)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
