"""Ray nodes on this machine, each in a network namespace behind a link of a chosen rate.

    python bench/netns_cluster.py --nodes 4 --rate-gbps 1 -- COMMAND

runs COMMAND in the head's namespace, from where every node can be reached, with `RAY_ADDRESS` and
the token that the nodes ask for in its environment. All nodes share this machine's processors and
memory; only their networks are apart. UCX must be kept from finding a shorter way: `UCX_ENV`
belongs into `transport.ucx_env` of whatever is deployed.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.netns_network import (
    Network,
    missing,
    namespaces,
    own_prefix,
    remove,
    state_folder,
    sweep,
)

HEAD = "head"
RAY_PORT = 6379
UCX_ENV = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
"""Without shared memory, and by the link even where both ends are on one node's loopback."""

_ROLES = ("small_node", "large_node", "mapper_node")
_COUNTS = range(3, 7)
_OBJECT_STORE_BYTES = 100_000_000
_START_S = 120.0


@dataclass(frozen=True)
class Node:
    """A Ray node. Each also offers the resource `at_<name>`."""

    name: str
    resources: tuple[str, ...] = ()

    @property
    def offered(self) -> dict[str, float]:
        """Ray's custom resources."""
        return dict.fromkeys((f"at_{self.name}", *self.resources), 1.0)


def nodes_of(count: int) -> list[Node]:
    """Three to six nodes: with three the small model's is the head, from four on all are apart.

    What is more than four are further nodes for mappers, `mapper2` and `mapper3`. ValueError for
    other numbers.
    """
    small, large, mapper = (Node(role.removesuffix("_node"), (role,)) for role in _ROLES)
    if count not in _COUNTS:
        raise ValueError(f"{count} nodes: there are layouts for {_COUNTS[0]} to {_COUNTS[-1]}")
    if count == 3:
        return [Node(HEAD, small.resources), large, mapper]
    more = [Node(f"mapper{number}", mapper.resources) for number in range(2, count - 2)]
    return [Node(HEAD), small, large, mapper, *more]


@dataclass
class NetnsCluster:
    """A running cluster: its network, and what a process needs to join it."""

    network: Network
    nodes: Sequence[Node]
    env: Mapping[str, str] = field(repr=False)

    @property
    def address(self) -> str:
        """Ray's own, as for `ray.init`."""
        return f"{self.network.address(HEAD)}:{RAY_PORT}"

    def limit_all(self, rate_gbps: float | None, delay_ms: float = 0.0) -> None:
        """See `Network.limit`, for every node."""
        for node in self.nodes:
            self.network.limit(node.name, rate_gbps, delay_ms)

    def pids(self, node: str) -> list[int]:
        """Every process that is on a node now."""
        command = ["ip", "netns", "pids", self.network.namespace(node)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def popen(
        self,
        *command: str,
        node: str = HEAD,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process on a node."""
        inside = self.network.command(node, *command)
        env = dict(self.env)
        return subprocess.Popen(
            inside, env=env, text=True, stdin=stdin, stdout=stdout, stderr=stderr
        )


@contextmanager
def namespaces_of_this_process(names: Sequence[str]) -> Iterator[tuple[Network, Path]]:
    """(their network, a folder for files) until the block ends, or this process does.

    ValueError where they are not possible or this process has some already; RuntimeError when a
    tool fails.
    """
    if reason := missing():
        raise ValueError(f"{reason}; run it on a machine that has it")
    sweep()
    prefix = own_prefix()
    if namespaces(prefix):
        raise ValueError("this process has a cluster already; leave that one first")
    folder = state_folder(prefix)
    folder.mkdir(mode=0o700)
    with _guarded(prefix):
        yield Network(prefix, names), folder


@contextmanager
def netns_cluster(
    count: int = 4, *, rate_gbps: float | None = None, delay_ms: float = 0.0
) -> Iterator[NetnsCluster]:
    """Ray on `nodes_of(count)` until the block ends; links are limited in each direction.

    Errors as `namespaces_of_this_process` has them, and RuntimeError when a node does not start.
    """
    nodes = nodes_of(count)
    with namespaces_of_this_process([node.name for node in nodes]) as (network, folder):
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        cluster = NetnsCluster(network, nodes, _environment(network, token))
        cluster.limit_all(rate_gbps, delay_ms)
        head, *others = nodes
        _wait([_start(cluster, head, folder)])
        _wait([_start(cluster, node, folder) for node in others])
        yield cluster


@contextmanager
def _guarded(prefix: str) -> Iterator[None]:
    """Have all of `prefix` removed at the end of the block, or of this process."""
    guard = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("netns_guard.py")), prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C goes to the whole group of the terminal.
        start_new_session=True,
    )
    assert guard.stdin is not None and guard.stdout is not None
    try:
        guard.stdout.readline()
        yield
    finally:
        guard.stdin.close()
        guard.wait()
        guard.stdout.close()
        # Does nothing unless the guard was killed.
        remove(prefix)


def _environment(network: Network, token: Path) -> dict[str, str]:
    """Of everything that runs on a node: nothing outside can be reached."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")
    }
    return inherited | {
        # The commands of this environment, `ray` and `kvcascade` among them.
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": f"{network.address(HEAD)}:{RAY_PORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray makes its workers nice by 15: then all else on the machine would come first.
        "RAY_worker_niceness": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _start(cluster: NetnsCluster, node: Node, folder: Path) -> subprocess.Popen[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    where = (
        ("--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        if node.name == HEAD
        else (f"--address={cluster.address}",)
    )
    return cluster.popen(
        *(ray, "start", *where, "--disable-usage-stats", "--num-cpus=1"),
        f"--node-ip-address={cluster.network.address(node.name)}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--resources={json.dumps(node.offered)}",
        # A node's sockets and logs; Unix paths have to be short.
        f"--temp-dir={folder / node.name}",
        node=node.name,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _wait(starting: Sequence[subprocess.Popen[str]]) -> None:
    for process in starting:
        output, _ = process.communicate(timeout=_START_S)
        if process.returncode:
            raise RuntimeError(f"a Ray node did not start:\n{output}")


def main(
    command: Annotated[list[str], typer.Argument(help="What to run, after `--`.")],
    nodes: Annotated[int, typer.Option(help="Ray nodes.", min=_COUNTS[0], max=_COUNTS[-1])] = 4,
    rate_gbps: Annotated[
        float | None, typer.Option(help="Rate of every link, each way. Unset: unlimited.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(help="Added to each direction.", min=0)] = 0.0,
) -> None:
    """Run a command in the head's namespace of a Ray cluster of its own; ends with its code."""
    console = Console(stderr=True)
    with ExitStack() as stack:
        try:
            with console.status(f"starting Ray on {nodes} nodes"):
                cluster = stack.enter_context(
                    netns_cluster(nodes, rate_gbps=rate_gbps, delay_ms=delay_ms)
                )
        except (ValueError, RuntimeError) as error:
            console.print(f"[red]error:[/] {error}")
            raise typer.Exit(2) from None
        code = cluster.popen(*command).wait()
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
