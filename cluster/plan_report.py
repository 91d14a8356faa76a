"""The document that a plan of one ordered pair of models is, as `kvcascade plan --json` prints it.

Every field carries its unit in its name; times are rooflines. How they come about is in
`cluster.plan_pair`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from cluster import plan
from cluster.catalog import Architecture
from mappers.manifest import Support

Side = Literal["sender", "receiver"]
SIDES: tuple[Side, ...] = ("sender", "receiver")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Scenario(_Frozen):
    """The circumstances that a plan is made for."""

    tokens: int
    gpus: int
    gpu_name: str | None
    gpu_tflops: float
    gpu_memory_gb_s: float | None
    efficiency: float
    links_gbps: tuple[float, ...]
    overhead_ms: float
    escalation: float
    models: int
    average_pair_gb: float | None

    @property
    def hardware(self) -> plan.Gpus:
        return plan.Gpus(self.gpu_tflops, self.gpu_memory_gb_s, self.gpus, self.efficiency)


class ModelPlan(_Frozen):
    """One of the two models. `table_head_flop_per_token` is the part an engine does not spend."""

    architecture: Architecture
    parameters: int
    active_parameters: int
    weights_bf16_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    prefill_flop_per_token: float
    table_head_flop_per_token: int
    prefill_s: float


class MapperPlan(_Frozen):
    """A mapper of one support. `sooner_s` is re-prefill less mapping, without any transfer."""

    support: Support
    k: int
    width: int
    weights: int
    biases: int
    fp32_bytes: int
    bf16_bytes: int
    flop_per_token: int
    reprefill_flop_ratio: float
    map_s: float
    sooner_s: float
    minimum_calibration_tokens: int
    comfortable_calibration_tokens: int
    fit_one_pass_bytes: int
    fit_choosing_bytes: int
    fit_chosen_together_bytes: int
    fit_chosen_one_by_one_bytes: int


class HandoffPlan(_Frozen):
    """One way to hand a prompt over. `serial_s` and `overlapped_s` include the fixed overhead.

    `break_even_tokens` is the shortest prompt from which on the overlapped handoff is never
    slower than re-prefill, up to the models' positions; None when there is no such length.
    """

    support: Support
    mapped_at: Side
    link_gbps: float
    moved_bytes: int
    transfer_s: float
    map_s: float
    serial_s: float
    overlapped_s: float
    reprefill_ratio: float
    break_even_tokens: int | None


class CascadePlan(_Frozen):
    """Prefill FLOP per prompt token at an escalation rate, and shares saved.

    `support` None leaves the mapping out, as published figures do.
    """

    support: Support | None
    cascade_flop: float
    reprefill_cascade_flop: float
    all_large_flop: float
    saved_of_reprefill_cascade: float
    saved_of_all_large: float


class FleetPlan(_Frozen):
    """All mappers of a fleet in which every directed pair takes `pair_bytes`."""

    basis: str
    models: int
    directed_pairs: int
    pair_bytes: float
    total_bytes: float


class PlanReport(_Frozen):
    """The whole plan. `receiver_saved_bytes` is the share of bytes saved by mapping there."""

    scenario: Scenario
    source: ModelPlan
    target: ModelPlan
    k_origin: str
    map_at: Side | None
    receiver_saved_bytes: float
    mappers: tuple[MapperPlan, ...]
    handoffs: tuple[HandoffPlan, ...]
    cascades: tuple[CascadePlan, ...]
    fleets: tuple[FleetPlan, ...]
    notes: tuple[str, ...]
