"""A handoff between nodes: what the endpoint reports is what the links carried."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from copy import deepcopy
from itertools import groupby
from pathlib import Path

import pytest

from bench.load import Load
from bench.netns_network import Traffic
from router.api import HandoffInfo
from tests.multinode.conftest import Deployed

pytestmark = pytest.mark.multinode


def counted(deployed: Deployed) -> dict[str, Traffic]:
    network = deployed.cluster.network
    return {node.name: network.traffic(node.name) for node in deployed.cluster.nodes}


def escalate(deployed: Deployed, **options: bool) -> tuple[HandoffInfo, dict[str, Traffic]]:
    """(the handoff that was reported, what each link carried meanwhile)."""
    before = counted(deployed)
    cascade = {"session_id": uuid.uuid4().hex, "escalate_after_tokens": 1, **options}
    answer = deployed.driver.ask(2_060, 1, cascade)
    moved = {name: after - before[name] for name, after in counted(deployed).items()}
    assert 2_000 < answer.prompt_tokens <= 2_060
    assert [part.model for part in answer.cascade.served_by] == ["small", "large"]
    handoff = answer.cascade.handoff
    assert handoff is not None
    return handoff, moved


def test_each_part_runs_on_its_own_node(deployed: Deployed) -> None:
    parts = [deployed.driver.describe(role) for role in ("small", "large", "mapper")]
    assert len({part["node_id"] for part in parts}) == 3
    address = deployed.cluster.network.address("mapper")
    assert parts[2]["address"].startswith(f"tcp://{address}:")


def test_a_mapped_handoff_crosses_the_mappers_link_with_the_bytes_that_it_reports(
    deployed: Deployed,
) -> None:
    handoff, moved = escalate(deployed)
    assert handoff.path == "mapped" and handoff.reason is None
    # Layers, keys and values, 3 KV heads, 64 elements of bf16: 15 layers here, 30 there.
    assert handoff.bytes_written == handoff.covered_tokens * 30 * 2 * 3 * 64 * 2
    # Reading begins before the target has said that it takes the last blocks itself.
    assert 0 <= handoff.bytes_read / (15 * 2 * 3 * 64 * 2) - handoff.covered_tokens <= 64
    assert moved["mapper"].received_bytes == pytest.approx(handoff.bytes_read, rel=0.1)
    assert moved["mapper"].sent_bytes == pytest.approx(handoff.bytes_written, rel=0.1)
    assert moved["head"].sent_bytes == pytest.approx(handoff.bytes_read, rel=0.1)
    assert moved["large"].received_bytes == pytest.approx(handoff.bytes_written, rel=0.1)


def test_reading_again_moves_no_cache(deployed: Deployed) -> None:
    handoff, moved = escalate(deployed, recompute=True)
    assert handoff.path == "recompute" and handoff.bytes_written == 0
    # A mapped handoff of this conversation writes 46 MB.
    assert moved["large"].received_bytes < 1_000_000
    assert moved["mapper"].received_bytes + moved["mapper"].sent_bytes < 1_000_000


def test_mappers_come_and_go_under_load_and_no_request_notices(deployed: Deployed) -> None:
    """Both mappers are on the one node for them: what counts here is that links are slow."""
    deployed.driver.start_load(Load(in_flight=3, tokens=(560,), watch_s=0.5))
    for mappers in (2, 1):
        changed = deepcopy(deployed.document)
        changed["applications"][0]["deployments"][0]["num_replicas"] = mappers
        deployed.driver.deploy(changed)
        time.sleep(2)
    outcome = deployed.driver.finish_load(stop=True)
    assert {record.complaint for record in outcome.records} == {None}
    running = [sample.replicas.get("RUNNING", 0) for sample in outcome.samples]
    assert [number for number, _ in groupby(running)] == [1, 2, 1]
    engines = {(*sample.pids["small"], *sample.pids["large"]) for sample in outcome.samples}
    assert len(engines) == 1
    mappers_seen = {pid for sample in outcome.samples for pid in sample.pids["mapper"]}
    assert len(mappers_seen) == 2


def test_a_process_without_the_token_is_refused(deployed: Deployed) -> None:
    ray = str(Path(sys.executable).with_name("ray"))

    def status(*without: str) -> subprocess.CompletedProcess[str]:
        command = ("env", *(f"--unset={key}" for key in without), ray, "status")
        inside = deployed.cluster.network.command("head", *command)
        env = dict(deployed.cluster.env)
        return subprocess.run(inside, env=env, capture_output=True, text=True, timeout=60)

    assert status().returncode == 0
    refused = status("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
    assert refused.returncode != 0
    assert "auth" in (refused.stdout + refused.stderr).lower()
