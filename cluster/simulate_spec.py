"""What a simulated fleet is: its load, its pools and its rules. Holds settings, computes nothing.

Models, GPUs and links come from the planner's `Scenario` (`cluster.plan_report`); here is what a
fleet adds to them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from cluster.config import HandoffConfig, MapperConfig, ModelConfig
from mappers.manifest import Support

Variant = Literal["handoff", "reprefill", "all_large"]
VARIANTS: tuple[Variant, ...] = ("handoff", "reprefill", "all_large")
Pool = Literal["small", "large", "mapper"]
POOLS: tuple[Pool, ...] = ("small", "large", "mapper")
Resource = Literal["small", "large", "mapper", "link"]
"""What can be short: a pool of engines, the mappers' arithmetic, or links."""
Place = Literal["receiver", "sender", "apart"]

_ENGINE = ModelConfig.model_fields
_HANDOFF = HandoffConfig.model_fields
_MAPPER = MapperConfig.model_fields


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Lengths(_Frozen):
    """Log-normal token counts by their median and 95th percentile; equal ones make a constant."""

    median_tokens: PositiveInt
    p95_tokens: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> Lengths:
        if self.p95_tokens < self.median_tokens:
            raise ValueError(
                f"p95 of {self.p95_tokens} tokens is below the median of {self.median_tokens}"
            )
        return self


class Load(_Frozen):
    """Requests that arrive for `seconds`.

    `burstiness` is the shape of gamma-distributed gaps: 1 is Poisson, less is burstier (the
    squared coefficient of variation is its inverse). A share `escalation` of the requests goes on
    to the large model after `escalate_after` tokens of its answer, but not after its last. Prompt
    and answer together stay within `max_tokens`. `lengths_file` replaces prompt and answer lengths.
    Requests that arrive in the first `warmup` share of the time are served and not measured.
    """

    seconds: PositiveFloat = 60.0
    warmup: float = Field(0.25, ge=0, lt=1)
    burstiness: PositiveFloat = 1.0
    prompt: Lengths = Lengths(median_tokens=1_000, p95_tokens=8_000)
    answer: Lengths = Lengths(median_tokens=200, p95_tokens=800)
    escalate_after: Lengths = Lengths(median_tokens=32, p95_tokens=128)
    escalation: float = Field(0.3, ge=0, le=1)
    lengths_file: Path | None = None
    max_tokens: PositiveInt = 32_768
    seed: NonNegativeInt = 0


class Rules(_Frozen):
    """How engines, mappers and links work. Defaults are those of the configuration.

    `place` is where mappers stand: beside the target (`receiver`) or the source (`sender`), where
    one of the two copies costs no link, or `apart` from both. Every replica has one port of the
    scenario's link rate in each direction; `link_latency_ms` is waited for once per transfer. The
    copy that crosses no link takes no time, or goes at `local_gbps`.
    A handoff is read, mapped and written in chunks of `chunk_tokens`; None stands for the planner's
    assumption, as many equal parts as layers. With `read_ahead` a mapper gives an order a place
    before its target has blocks, as the product does; without, only once it has.
    `pool_fraction` is the part of GPU memory that weights and KV pool may take.
    """

    gpu_memory_gb: PositiveFloat
    small_gpus: PositiveInt
    large_gpus: PositiveInt
    mapper_gpus: PositiveInt
    place: Place = "apart"
    support: Support = "full"
    k: PositiveInt | None = None
    link_latency_ms: NonNegativeFloat = 0.0
    local_gbps: PositiveFloat | None = None
    chunk_tokens: PositiveInt | None = _MAPPER["chunk_tokens"].default
    read_ahead: bool = True
    step_tokens: PositiveInt = _ENGINE["max_num_batched_tokens"].default
    max_seqs: PositiveInt = _ENGINE["max_num_seqs"].default
    pool_fraction: float = Field(0.9, gt=0, le=1)
    lease_s: PositiveFloat = _HANDOFF["lease_s"].default
    deadline_s: PositiveFloat = _HANDOFF["deadline_s"].default
    max_pinned_fraction: float = _HANDOFF["max_pinned_fraction"].default
    native_suffix_tokens: PositiveInt = _HANDOFF["native_suffix_tokens"].default
    min_handoff_tokens: PositiveInt = _HANDOFF["min_handoff_tokens"].default
    concurrent_handoffs: PositiveInt = _MAPPER["max_concurrent_handoffs"].default

    @model_validator(mode="after")
    def _check(self) -> Rules:
        if self.step_tokens < self.max_seqs:
            raise ValueError(
                f"a step of {self.step_tokens} tokens has no room for {self.max_seqs} requests; "
                "raise step_tokens or lower max_seqs"
            )
        return self

    @property
    def long_prefill_tokens(self) -> int:
        """Most tokens of one prompt in a step, as `deployments.engine_setup` sets it."""
        return max(1, self.step_tokens * 3 // 4)

    def gpus(self, pool: Pool) -> int:
        return {"small": self.small_gpus, "large": self.large_gpus, "mapper": self.mapper_gpus}[
            pool
        ]


class Replicas(_Frozen):
    """Replicas of each pool. A variant without a pool has 0 of it."""

    small: NonNegativeInt
    large: PositiveInt
    mapper: NonNegativeInt

    def of(self, pool: Pool) -> int:
        return {"small": self.small, "large": self.large, "mapper": self.mapper}[pool]


class Targets(_Frozen):
    """What a fleet is sized for. `first_token_s` bounds the p99 of the first token of an answer
    and of the large model's first token after an escalation; `tpot_s` the p99 of the mean time per
    output token of an answer's part.
    """

    first_token_s: PositiveFloat = 2.0
    tpot_s: PositiveFloat = 0.05


def pools_of(variant: Variant) -> tuple[Pool, ...]:
    """The pools that a variant has."""
    if variant == "all_large":
        return ("large",)
    return POOLS if variant == "handoff" else ("small", "large")
