"""Processes, threads and cores of a CPU engine, as vLLM takes them from its environment.

Knows vLLM's variables and the cores of this machine; nothing of Ray, models or handoffs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from cluster.errors import ConfigError

_NODES = Path("/sys/devices/system/node")


def executor(workers: int) -> Literal["uni", "mp"]:
    """vLLM's executor for so many workers: one computes in the engine core's own process.

    Several need processes of their own (`MultiprocExecutor`), whose queues spin while any request
    waits.
    """
    return "uni" if workers == 1 else "mp"


def cpu_variables(workers: int, bind: str | None) -> dict[str, str]:
    """What the engine core has to inherit so that its workers compute on the right cores.

    `bind` names cores as `0-3,6`, shared out among the workers, or each worker's own as `0-1|2-3`.
    Without it several workers get a NUMA node each from vLLM, which refuses where nodes are fewer
    than workers (`OMPProcessManager`): there all cores are shared out. Raises ConfigError when
    there is not a core for each.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if workers == 1:
        # Unless this is said, vLLM turns its `uni` executor back into `mp` (`CpuPlatform`).
        cores = _cores(bind) if bind else allowed
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(cores))}
        if bind:
            variables["GOMP_CPU_AFFINITY"] = " ".join(map(str, cores))
        return variables
    if bind is None and _numa_nodes(allowed) >= workers:
        return {}
    if bind and "|" in bind:
        shares = [_cores(part) for part in bind.split("|")]
    else:
        cores = _cores(bind) if bind else allowed
        ends = [len(cores) * rank // workers for rank in range(workers + 1)]
        shares = [cores[first:last] for first, last in zip(ends, ends[1:], strict=False)]
    if len(shares) != workers or not all(shares):
        raise ConfigError(
            f"cpu_threads_bind {bind!r} does not give each of {workers} workers a core: name "
            f"cores for each, as {'|'.join(map(str, range(workers)))!r}, or lower "
            "tensor_parallel_size"
        )
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, s)) for s in shares)}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and put the old ones back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cores(numbers: str) -> list[int]:
    """Core numbers of `0-3,6`."""
    cores: list[int] = []
    for part in numbers.strip().split(",") if numbers.strip() else []:
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def _numa_nodes(cores: list[int]) -> int:
    """NUMA nodes that own at least one of these cores."""
    lists = (path.read_text() for path in _NODES.glob("node[0-9]*/cpulist"))
    return sum(not set(cores).isdisjoint(_cores(numbers)) for numbers in lists)
