"""Compares measurements with the simulation of the same setting.

A measurement is the time from the decision to escalate to the large model's first token, of one
request in an idle fleet; or how many handoffs a second mappers finish while a number of them is in
flight. Knows nothing of how either was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

from cluster.errors import ConfigError
from cluster.simulate import Fleet, Setup
from cluster.simulate_cost import HandoffCost
from cluster.simulate_load import Request
from cluster.simulate_loop import handoffs_per_s
from cluster.simulate_spec import Replicas, Variant

AGREEMENT = 0.25
"""A simulation agrees with a measurement when they differ by at most this share of it."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Frozen):
    """One takeover. `path` says whether the large model got mapped KV or read again.

    `at` is the node of the mapper: its source's, its target's or its `own`; unset, as simulated
    otherwise. Without `link_gbps` nothing limited the links.
    """

    prompt_tokens: PositiveInt
    link_gbps: PositiveFloat | None
    path: Literal["mapped", "recompute"]
    seconds: PositiveFloat
    at: Literal["source", "target", "own"] | None = None

    @property
    def value(self) -> float:
        return self.seconds


class MeasuredLoop(_Frozen):
    """Handoffs of `tokens` that `mappers` finish while `in_flight` are always under way.

    Each mapper has a link of `link_gbps`, and nothing else limits but, where it is given, the
    engines' links of `engine_gbps`. `besides_ms` is what a request takes outside of its mapper.
    Unset fields are the pair's and the configuration's.
    """

    mappers: PositiveInt
    link_gbps: PositiveFloat
    in_flight: PositiveInt
    tokens: PositiveInt
    handoffs_per_s: PositiveFloat
    engine_gbps: PositiveFloat | None = None
    besides_ms: NonNegativeFloat | None = None
    map_tokens_per_s: PositiveFloat | None = None
    read_bytes_per_token: PositiveFloat | None = None
    write_bytes_per_token: PositiveFloat | None = None
    chunk_tokens: PositiveInt | None = None
    concurrent_handoffs: PositiveInt | None = None

    @property
    def value(self) -> float:
        return self.handoffs_per_s


@dataclass(frozen=True)
class Case:
    """A measurement, and the setting in which it is simulated."""

    measured: Measured | MeasuredLoop
    setup: Setup


class Compared(_Frozen):
    """A measurement beside its simulation, in seconds or in handoffs per second.

    `error` is (simulated - measured) / measured.
    """

    measured: Measured | MeasuredLoop
    simulated: float
    error: float

    @property
    def agrees(self) -> bool:
        return abs(self.error) <= AGREEMENT


def compare(cases: Sequence[Case]) -> list[Compared]:
    """Simulate each case."""
    results = []
    for case in cases:
        measured = case.measured
        if isinstance(measured, MeasuredLoop):
            simulated = _loop_per_s(case.setup, measured)
        else:
            variant: Variant = "handoff" if measured.path == "mapped" else "reprefill"
            simulated = lone_takeover(case.setup, variant, measured.prompt_tokens).large_s
        error = (simulated - measured.value) / measured.value
        results.append(Compared(measured=measured, simulated=simulated, error=error))
    return results


def _loop_per_s(setup: Setup, row: MeasuredLoop) -> float:
    changed = {"place": "apart"} | {
        name: value
        for name in ("chunk_tokens", "concurrent_handoffs")
        if (value := getattr(row, name)) is not None
    }
    setup = replace(setup, rules=setup.rules.model_copy(update=changed))
    usual, rate = setup.handoff, row.map_tokens_per_s
    cost = HandoffCost(
        overhead_s=usual.overhead_s if row.besides_ms is None else row.besides_ms / 1e3,
        read_bytes_per_token=row.read_bytes_per_token or usual.read_bytes_per_token,
        write_bytes_per_token=row.write_bytes_per_token or usual.write_bytes_per_token,
        map_s=usual.map_s if rate is None else lambda tokens: tokens / rate,
        chunk_tokens=usual.chunk_tokens,
        layers=usual.layers,
    )
    return handoffs_per_s(
        cost,
        setup.rules,
        mappers=row.mappers,
        link_gbps=row.link_gbps,
        engine_gbps=row.engine_gbps,
        in_flight=row.in_flight,
        tokens=row.tokens,
    )


class Takeover(BaseModel):
    """One takeover in an idle fleet, from the decision: until the target holds mapped KV, and
    until its first token.
    """

    handoff_s: float | None
    large_s: float


def lone_takeover(setup: Setup, variant: Variant, prompt_tokens: int) -> Takeover:
    """Escalate one request after its first token, with a replica of everything.

    Its context is one token longer than the prompt; by default the target reads that one itself.
    """
    rules = setup.rules.model_copy(update={"min_handoff_tokens": 1})
    load = setup.load.model_copy(update={"warmup": 0.0})
    alone = replace(setup, rules=rules, load=load)
    request = Request(0, 0.0, prompt_tokens, answer_tokens=2, small_tokens=1, escalates=True)
    fleet = Fleet(alone, variant, Replicas(small=1, large=1, mapper=1), [request])
    fleet.run()
    if fleet.recomputed:
        raise ConfigError(
            f"{prompt_tokens:,} tokens were not handed over: {', '.join(fleet.recomputed)}; raise "
            "--lease-s or give the small replica more GPUs"
        )
    handoffs = fleet.samples.handoff
    return Takeover(
        handoff_s=handoffs[0] if handoffs else None, large_s=fleet.samples.large_first_token[0]
    )
