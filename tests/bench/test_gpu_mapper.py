"""The GPU bench, as far as it goes without a GPU: the same script on tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def run(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Its output and its JSON."""
    path = tmp_path_factory.mktemp("bench") / "gpu.json"
    command = [sys.executable, "bench/gpu_mapper.py", "--cpu-shapes", "--json", str(path)]
    done = subprocess.run(
        command,
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done, json.loads(path.read_text())


def test_both_supports_are_checked_and_timed_every_way(
    run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    found = run[1]
    assert found["equal"] and 0 < max(found["largest_error"].values()) < 2**-6
    expected = {
        (support, tokens, way)
        for support in ("full", "head_local")
        for tokens in (5, 70)
        for way in ("torch", "triton", "triton, paged")
    }
    assert {(t["support"], t["tokens"], t["way"]) for t in found["timings"]} == expected
    assert found["left_out"] == []
    full, local = (
        next(t["flops"] for t in found["timings"] if t["support"] == support and t["tokens"] == 70)
        for support in ("full", "head_local")
    )
    # Two source layers of 64 elements to two target layers of 64, keys and values, 70 tokens.
    assert full == 2 * local == 70 * 2 * 2 * (2 * 64) * 64 * 2


def test_the_table_sets_each_timing_beside_the_prefill_of_the_run(
    run: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    done, found = run
    assert found["prefill"]["layers"] == 2 and set(found["prefill"]["ms"]) == {"5", "70"}
    rows = [line for line in done.stdout.splitlines() if line.startswith("| full | 70 |")]
    assert len(rows) == 3
    assert all(f"{found['prefill']['ms']['70']:,.1f} ms" in row for row in rows)


def test_without_time_everything_is_left_out_by_name(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, "bench/gpu_mapper.py", "--cpu-shapes", "--minutes", "0"]
    done = subprocess.run(
        [*command, "--json", str(path)], cwd=repository, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(path.read_text())
    assert found["timings"] == [] and "re-prefill" in found["left_out"]
    assert "map, full, 70 tokens" in found["left_out"]
