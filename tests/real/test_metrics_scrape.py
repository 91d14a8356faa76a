"""What Prometheus would scrape of the deployed cascade has everything that dashboard and alerts
name.
"""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
import ray
import yaml

from cluster.status_metrics import Labels, Scrape
from tests.cluster.promql import metrics_of, queries
from tests.conftest import REPOSITORY
from tests.real.conftest import RealCascade
from tests.real.test_cascade import complete, conversation

pytestmark = pytest.mark.real

SECONDS_UNTIL_EXPORTED = 90.0


@ray.remote(num_cpus=0)
class Rare:
    """Exports what this cascade has no cause to: it has no target, no shadows and drops nothing."""

    def __init__(self) -> None:
        from cluster.telemetry import Metrics

        metrics = Metrics()
        metrics.set_fractions(realised=None, target=0.3)
        metrics.count_log_dropped()
        metrics.count_shadow("agrees")


def scrape() -> Scrape:
    """The metrics of all nodes, as Prometheus would have them."""
    series: dict[str, tuple[tuple[Labels, float], ...]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            text = httpx.get(url, trust_env=False, timeout=30).text
            for name, found in Scrape.parse(text, at_s=0.0).series.items():
                series[name] = series.get(name, ()) + found
    return Scrape(at_s=0.0, series=series)


def test_every_metric_of_dashboard_and_alerts_is_scraped(cascade: RealCascade) -> None:
    dashboard = json.loads((REPOSITORY / "cluster/grafana.json").read_text())
    alerts = yaml.safe_load((REPOSITORY / "cluster/alerts.yaml").read_text())
    used = {name for query in queries(dashboard, alerts) for name in metrics_of(query)}
    rare = Rare.remote()
    # One answer that was escalated on demand, one that a policy decided.
    asyncio.run(complete(cascade, conversation(300, 70), route={"escalate_after_tokens": 2}))
    asyncio.run(complete(cascade, conversation(300, 71)))
    deadline = time.monotonic() + SECONDS_UNTIL_EXPORTED
    while missing := used - set((found := scrape()).series):
        assert time.monotonic() < deadline, f"not exported: {sorted(missing)}"
        time.sleep(3)
    ray.kill(rare)

    assert set(found.label_values("ray_kvcascade_pool_blocks", "model")) == {"small", "large"}
    for model in ("small", "large"):
        # 9,216 tokens in blocks of 32, and the one that vLLM keeps.
        blocks = found.values("ray_kvcascade_pool_blocks", model=model, state="total")
        assert blocks == [289.0]
    directions = found.label_values("ray_kvcascade_mapper_running_handoffs", "direction")
    assert directions == ["large_to_small", "small_to_large"]
    mapped = found.total("ray_kvcascade_handoff_total", outcome="mapped") or 0.0
    timed = found.total("ray_kvcascade_handoff_seconds_count", stage="total", path="mapped")
    assert mapped >= 1 and timed == mapped


def test_gauges_stay_while_nothing_happens(cascade: RealCascade) -> None:
    gauges = {
        "ray_kvcascade_requests_in_flight",
        "ray_kvcascade_realised_fraction",
        "ray_kvcascade_saved_prefill_seconds",
        "ray_kvcascade_pool_blocks",
        "ray_kvcascade_mapper_running_handoffs",
        "ray_kvcascade_mapper_pool_bytes",
    }
    asyncio.run(complete(cascade, conversation(300, 72)))
    # Ray forgets a gauge that no process set for twice its export interval of ten seconds.
    time.sleep(40)
    deadline = time.monotonic() + 15
    while missing := gauges - set(scrape().series):
        assert time.monotonic() < deadline, f"forgotten: {sorted(missing)}"
        time.sleep(1)
