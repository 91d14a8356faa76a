"""Which cores the workers of a CPU engine compute on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from deployments import cpu_environment
from deployments.cpu_environment import cpu_variables, environment, executor

BIND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cores 0 to 7; two NUMA nodes, and one of memory alone."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpu_environment, "_NODES", tmp_path)
    for node, cores in enumerate(["0-3\n", "4-7\n", "\n"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(cores)


def test_one_worker_stays_in_the_core_process_on_its_cores() -> None:
    assert executor(1) == "uni"
    assert cpu_variables(1, "0-2,5") == {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "4",
        "GOMP_CPU_AFFINITY": "0 1 2 5",
    }
    assert cpu_variables(1, None)["OMP_NUM_THREADS"] == "8"


def test_cores_are_shared_out_among_several_workers() -> None:
    assert executor(2) == "mp"
    assert cpu_variables(2, "0-1")[BIND] == "0|1"
    assert cpu_variables(3, "0-7")[BIND] == "0,1|2,3,4|5,6,7"


def test_cores_named_for_each_worker_are_kept() -> None:
    assert cpu_variables(2, "0-1|5,6")[BIND] == "0,1|5,6"


def test_vllm_chooses_only_where_it_finds_a_numa_node_for_each_worker() -> None:
    assert cpu_variables(2, None) == {}
    assert cpu_variables(4, None)[BIND] == "0,1|2,3|4,5|6,7"


@pytest.mark.parametrize(("workers", "bind"), [(2, "3"), (2, "0|1|2"), (2, "0|"), (9, None)])
def test_a_worker_without_a_core_is_refused(workers: int, bind: str | None) -> None:
    with pytest.raises(ConfigError, match=f"each of {workers} workers a core"):
        cpu_variables(workers, bind)


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv(BIND, raising=False)
    with environment({"OMP_NUM_THREADS": "1", BIND: "0|1"}):
        assert (os.environ["OMP_NUM_THREADS"], os.environ[BIND]) == ("1", "0|1")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert BIND not in os.environ
