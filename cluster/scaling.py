"""How many mappers: by the seconds of work that wait, not by the requests that do.

Ray Serve's controller calls the policy with what the replicas recorded
(`deployments.mapper.MapperServer.record_autoscaling_stats`); delays and bounds are Serve's.
"""

from __future__ import annotations

from typing import Any, Protocol

from cluster.config import ScalingConfig

BACKLOG_S = "backlog_s"
"""Name of the recorded number: seconds that a replica still needs, by its map or its links,
whichever is the limit."""


class ScalingContext(Protocol):
    """What the policy reads of `ray.serve.config.AutoscalingContext`."""

    current_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] | None


class ByBacklog:
    """Wants as many replicas as keep each one's backlog at `target_backlog_s`."""

    def __init__(self, target_backlog_s: float) -> None:
        self._target_backlog_s = target_backlog_s

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, Any]]:
        """(replicas wanted, no state); a replica that said nothing yet counts as idle."""
        recorded = (context.aggregated_metrics or {}).get(BACKLOG_S, {})
        if not recorded:
            return context.current_num_replicas, {}
        return sum(recorded.values()) / self._target_backlog_s, {}


def autoscaling(scaling: ScalingConfig) -> dict[str, Any] | None:
    """Serve's `autoscaling_config` for a mapper deployment, or None when it has a fixed size."""
    if scaling.max_replicas is None:
        return None
    return {
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "upscale_delay_s": scaling.upscale_delay_s,
        "downscale_delay_s": scaling.downscale_delay_s,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 2.0,
        "policy": {
            "policy_function": "cluster.scaling:ByBacklog",
            "policy_kwargs": {"target_backlog_s": scaling.target_backlog_s},
        },
    }
