"""Compares measured takeovers with the simulation of the same setting: one request, idle fleet.

A measurement is the time from the decision to escalate to the large model's first token. Knows
nothing of how it was taken.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from cluster.errors import ConfigError
from cluster.simulate import Fleet, Setup
from cluster.simulate_load import Request
from cluster.simulate_spec import Replicas, Variant

AGREEMENT = 0.25
"""A simulation agrees with a measurement when they differ by at most this share of it."""


class Measured(BaseModel):
    """One measurement. `path` says whether the large model got mapped KV or read again."""

    model_config = ConfigDict(frozen=True)

    prompt_tokens: PositiveInt
    link_gbps: PositiveFloat
    path: Literal["mapped", "recompute"]
    seconds: PositiveFloat


class Compared(BaseModel):
    """A measurement beside its simulation; `error` is (simulated - measured) / measured."""

    model_config = ConfigDict(frozen=True)

    measured: Measured
    simulated_s: float
    error: float

    @property
    def agrees(self) -> bool:
        return abs(self.error) <= AGREEMENT


def read_measured(path: Path) -> list[Measured]:
    """A JSON list of measurements. Raises ConfigError that names the first wrong entry."""
    try:
        return TypeAdapter(list[Measured]).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a JSON file of measurements") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{path}: {where or 'the file'}: {first['msg']}; write a list of "
            '{"prompt_tokens", "link_gbps", "path": "mapped" or "recompute", "seconds"}'
        ) from None


def compare(setup: Setup, rows: list[Measured]) -> list[Compared]:
    """Simulate each row's prompt, link and path with the models, GPUs and rules of `setup`."""
    results = []
    for row in rows:
        variant: Variant = "handoff" if row.path == "mapped" else "reprefill"
        at_link = replace(setup, link_gbps=row.link_gbps)
        simulated_s = lone_takeover(at_link, variant, row.prompt_tokens).large_s
        error = (simulated_s - row.seconds) / row.seconds
        results.append(Compared(measured=row, simulated_s=simulated_s, error=error))
    return results


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
