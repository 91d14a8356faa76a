"""The document that a simulation is, as `kvcascade plan --simulate --json` prints it.

Every field carries its unit in its name; a percentile that nothing was measured for is null.
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict

from cluster.plan_report import Scenario
from cluster.simulate_spec import Load, Pool, Replicas, Resource, Rules, Targets, Variant


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentiles(_Frozen):
    """Median and 99th percentile of a duration over the measured requests."""

    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, values_s: list[float]) -> Percentiles | None:
        if not values_s:
            return None
        p50_s, p99_s = np.percentile(values_s, (50, 99))
        return cls(p50_s=float(p50_s), p99_s=float(p99_s))


class PoolUse(_Frozen):
    """How busy a pool is. `busy` is the share of time in which a step or a map is under way, and
    `arithmetic` the share of the reachable FLOP that is used; a step that waits for memory is busy.

    `kv_held` is the share of the KV pools that is reserved, `link_out` and `link_in` the mean use
    of its ports, `link_busiest` that of the port with the most. `growth_per_s` is by how many
    requests a second the pool fills up in the second half of the measured time.
    """

    replicas: int
    gpus: int
    busy: float
    arithmetic: float
    kv_held: float | None
    link_out: float
    link_in: float
    link_busiest: float
    growth_per_s: float


class Point(_Frozen):
    """One variant at one rate.

    `first_token` counts from arrival. `large_first_token` counts from the decision to escalate to
    the large model's first token; in `all_large` there is none. `handoff` ends when the target
    holds the mapped KV. The two `tpot` are per part of an answer. `recomputed` are escalations
    that were read again, by reason. `mean_request_s` is how long a request stays. `places_held` is
    the share of the mappers' places that are taken in the second half of the measured time, by
    what their handoffs wait for: blocks of the large pool, the map, or links. `saturated` is what
    cannot keep up: requests that wait for it become more during that half.
    """

    rate: float
    requests: int
    escalated: int
    handoffs: int
    recomputed: dict[str, int]
    link_bytes: float
    first_token: Percentiles | None
    large_first_token: Percentiles | None
    handoff: Percentiles | None
    small_tpot: Percentiles | None
    large_tpot: Percentiles | None
    pools: dict[Pool, PoolUse]
    gpus: int
    gpu_hours_per_million: float
    cost_per_million: float
    mean_request_s: float
    places_held: dict[Resource, float]
    saturated: Resource | None
    meets_targets: bool


class VariantReport(_Frozen):
    """One variant over all rates. It keeps up with `holds_rate` and saturates at
    `saturates_rate`, the neighbouring rates that were tried; null where none was.
    """

    variant: Variant
    replicas: Replicas
    sized: bool
    points: tuple[Point, ...]
    holds_rate: float | None
    saturates_rate: float | None
    bottleneck: Resource | None

    @property
    def at_design(self) -> Point:
        """The point at the first rate, the one that pools are sized for."""
        return self.points[0]


class SimulationReport(_Frozen):
    """A whole simulation."""

    source: str
    target: str
    scenario: Scenario
    link_gbps: float
    load: Load
    rules: Rules
    targets: Targets
    price_per_gpu_hour: float
    pool_tokens: dict[Pool, int]
    mean_prompt_tokens: float
    mean_answer_tokens: float
    variants: tuple[VariantReport, ...]
