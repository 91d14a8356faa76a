"""`kvcascade status` and `kvcascade top` against the deployed cascade."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from tests.real.conftest import RealCascade
from tests.real.test_cascade import complete, conversation

pytestmark = pytest.mark.real


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "120"})


def test_status_knows_every_replica_and_where_it_runs(cascade: RealCascade) -> None:
    done = run("status", "--url", cascade.url, "--json")
    assert done.exit_code == 0, done.output
    serve = json.loads(done.stdout)["serve"]
    parts = serve["deployments"]
    assert serve["status"] == "RUNNING"
    assert set(parts) == {"router", "small", "large", "mapper", "mapper_back", "sessions"}
    assert all(part["replicas"] == {"RUNNING": 1} for part in parts.values())
    places = {parts[name]["described"][0]["node_id"] for name in ("small", "large", "mapper")}
    assert len(places) == 3 and places < set(serve["nodes"])
    assert parts["small"]["described"][0]["num_blocks"] == 289
    shown = run("status", "--url", cascade.url).output
    assert "healthy: " in shown and "mapper_back" in shown


def test_top_shows_the_handoffs_that_were(cascade: RealCascade) -> None:
    asyncio.run(complete(cascade, conversation(300, 72), route={"escalate_after_tokens": 2}))
    deadline = time.monotonic() + 60
    while "handoffs, mapped" not in (shown := run("top", "--url", cascade.url, "--once").output):
        # Ray exports what its processes counted every few seconds.
        assert time.monotonic() < deadline, shown
        time.sleep(2)
    row = next(line for line in shown.splitlines() if "handoffs, mapped" in line)
    assert " ms " in row
    assert "bytes written" in shown and "MB" in shown
