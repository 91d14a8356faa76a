"""A Qwen3 fleet on H200 GPUs for tests of the simulation."""

from __future__ import annotations

from typing import Any

from cluster.catalog import architecture, catalog
from cluster.plan_report import Scenario
from cluster.simulate import Fleet, Setup
from cluster.simulate_load import requests
from cluster.simulate_spec import Lengths, Load, Replicas, Rules, Variant

H200 = catalog().gpu("H200")
FLEET = Replicas(small=6, large=4, mapper=2)


def always(tokens: int) -> Lengths:
    return Lengths(median_tokens=tokens, p95_tokens=tokens)


def scenario(**changes: Any) -> Scenario:
    usual: dict[str, Any] = {
        "tokens": 4_096,
        "gpus": 1,
        "gpu_name": "H200",
        "gpu_tflops": H200.tflops,
        "gpu_memory_gb_s": H200.memory_gb_s,
        "efficiency": 0.5,
        "links_gbps": (400.0,),
        "overhead_ms": 20.0,
        "escalation": 0.3,
        "models": 2,
        "average_pair_gb": None,
    }
    return Scenario(**(usual | changes))


def setup(
    load: dict[str, Any] | None = None,
    rules: dict[str, Any] | None = None,
    link_gbps: float = 400.0,
    **changes: Any,
) -> Setup:
    usual_load: dict[str, Any] = {
        "seconds": 30.0,
        "prompt": Lengths(median_tokens=1_000, p95_tokens=4_000),
    }
    usual_rules: dict[str, Any] = {
        "gpu_memory_gb": H200.memory_gb,
        "small_gpus": 1,
        "large_gpus": 1,
        "mapper_gpus": 1,
    }
    return Setup(
        architecture("qwen3-14b"),
        architecture("qwen3-32b"),
        scenario(**changes),
        link_gbps,
        Load(**(usual_load | (load or {}))),
        Rules(**(usual_rules | (rules or {}))),
    )


def ran(made: Setup, variant: Variant, rate: float, replicas: Replicas = FLEET) -> Fleet:
    """A fleet after all its requests ended."""
    fleet = Fleet(made, variant, replicas, requests(made.load, rate))
    fleet.run()
    return fleet
