"""How many mappers the waiting work asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from cluster.config import ScalingConfig
from cluster.scaling import BACKLOG_S, ByBacklog, autoscaling


@dataclass
class Context:
    current_num_replicas: int = 1
    aggregated_metrics: dict[str, dict[Any, float]] | None = field(default_factory=dict)


def backlog(*seconds: float) -> Context:
    return Context(len(seconds), {BACKLOG_S: dict(enumerate(seconds))})


@pytest.mark.parametrize(
    ("seconds", "wanted"), [((0.0,), 0.0), ((3.0,), 1.5), ((4.0, 2.0, 0.0), 3.0)]
)
def test_replicas_follow_the_seconds_that_wait(seconds: tuple[float, ...], wanted: float) -> None:
    assert ByBacklog(2.0)(backlog(*seconds)) == (pytest.approx(wanted), {})


@pytest.mark.parametrize("metrics", [None, {}, {"other": {"a": 5.0}}])
def test_without_a_word_from_the_replicas_nothing_changes(metrics: Any) -> None:
    assert ByBacklog(2.0)(Context(3, metrics)) == (3, {})


def test_serve_takes_the_configuration_and_makes_the_policy_of_it() -> None:
    scaling = ScalingConfig(min_replicas=1, max_replicas=4, target_backlog_s=0.5)
    config = AutoscalingConfig.model_validate(autoscaling(scaling))
    assert (config.min_replicas, config.max_replicas) == (1, 4)
    policy = config.policy.get_policy()
    assert policy is ByBacklog
    assert policy(**config.policy.policy_kwargs)(backlog(1.0)) == (2.0, {})


def test_a_fixed_number_of_mappers_is_not_scaled() -> None:
    assert autoscaling(ScalingConfig()) is None
