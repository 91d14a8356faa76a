"""What a cluster of namespaces leaves behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.netns_network import Network, namespaces, own_prefix, remove, state_folder, sweep

pytestmark = pytest.mark.multinode

_HOLD = """
import sys, time
from bench.netns_cluster import namespaces_of_this_process
from bench.netns_network import own_prefix
with namespaces_of_this_process(["head"]):
    print(own_prefix(), flush=True)
    time.sleep(600)
"""


def wait_until_gone(prefix: str, *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while namespaces(prefix) or state_folder(prefix).exists():
        assert time.monotonic() < deadline, namespaces(prefix)
        time.sleep(0.2)


def raylets() -> list[str]:
    """Command lines of all raylets of clusters of namespaces."""
    done = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
    return [one for one in done.stdout.splitlines() if "/kvc" in one and "raylet" in one]


def test_a_killed_cluster_leaves_no_namespace_and_no_ray_behind(
    repository: Path, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    command = ["bench/netns_cluster.py", "--nodes", "3", "--rate-gbps", "1", "--"]
    inside = f"echo $RAY_ADDRESS > {said}.new; mv {said}.new {said}; sleep 600"
    process = subprocess.Popen([sys.executable, *command, "sh", "-c", inside], cwd=repository)
    try:
        deadline = time.monotonic() + 180
        while not said.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        mine = f"kvc{process.pid}t"
        made = namespaces(mine)
        assert sorted(name.partition("-")[2] for name in made) == [
            "head",
            "large",
            "mapper",
            "switch",
        ]
        assert said.read_text() == "10.77.0.1:6379\n"
        assert len([one for one in raylets() if f"/{mine}" in one]) >= 3
    finally:
        process.kill()
        process.wait()
    wait_until_gone(f"{made[0].partition('-')[0]}-")
    assert [one for one in raylets() if f"/{mine}" in one] == []


def test_a_run_whose_guard_was_killed_too_is_swept_by_the_next_and_a_living_one_is_not(
    repository: Path,
) -> None:
    def hold() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _HOLD], cwd=repository, stdout=subprocess.PIPE, text=True
        )

    with hold() as dead, hold() as living:
        assert dead.stdout is not None and living.stdout is not None
        prefix, kept = dead.stdout.readline().strip(), living.stdout.readline().strip()
        children = Path(f"/proc/{dead.pid}/task/{dead.pid}/children").read_text().split()
        assert len(children) == 1, "the guard"
        os.kill(int(children[0]), signal.SIGKILL)
        dead.kill()
        dead.wait()
        assert len(namespaces(prefix)) == 2
        assert prefix in sweep()
        wait_until_gone(prefix)
        assert len(namespaces(kept)) == 2
        living.terminate()
        wait_until_gone(kept)


def test_a_link_limits_what_goes_through_it_and_its_counters_count_it() -> None:
    send = (
        "import socket,sys;s=socket.create_connection((sys.argv[1],5000))\ns.sendall(bytes(2<<20))"
    )
    receive = (
        "import socket;s=socket.create_server(('',5000));print('up',flush=True);c,_=s.accept()\n"
        "import time;n=0;t=time.monotonic()\nwhile b:=c.recv(1<<20): n+=len(b)\n"
        "print(n,time.monotonic()-t)"
    )
    prefix = own_prefix()
    network = Network(prefix, ["one", "two"])
    try:
        network.limit("one", 1.0)
        network.limit("one", None)
        network.limit("two", 0.02)
        before = network.traffic("two")
        with subprocess.Popen(
            network.command("two", sys.executable, "-c", receive), stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout is not None and receiver.stdout.readline() == "up\n"
            sender = network.command("one", sys.executable, "-c", send, network.address("two"))
            subprocess.run(sender, check=True)
            received, taken_s = receiver.stdout.readline().split()
        moved = network.traffic("two") - before
        assert int(received) == 2 << 20
        # 2 MiB at 20 Mbit/s; the first 70 kB may come at once. Nothing can make it faster.
        assert float(taken_s) > 0.95 * ((2 << 20) - 70_000) * 8 / 20e6
        assert 1.0 < moved.received_bytes / (2 << 20) < 1.1
        assert moved.sent_bytes < 0.05 * (2 << 20)
    finally:
        remove(prefix)
    assert namespaces(prefix) == []
