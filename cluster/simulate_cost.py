"""What steps, maps and copies of a simulated fleet cost: `cluster.plan`'s formulas, cut into parts.

Adds no number of its own about models or GPUs. The parts of a prompt add up to what the planner
says of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster import plan
from cluster.catalog import Architecture
from cluster.errors import ConfigError
from cluster.plan_pair import choose_k
from cluster.plan_report import Scenario
from cluster.simulate_spec import Rules


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates that were measured, instead of a scenario's GPUs: one engine, and one mapper."""

    engine: plan.Gpus
    attention: float
    map_tokens_per_s: float


class EngineCost:
    """Step times of one replica and the size of its KV pool.

    The FLOP of a prompt's tokens a to b are the planner's for b tokens less those for a. A step
    moves the weights once, the KV that is written, and the KV that earlier tokens have left. A FLOP
    of attention takes `attention` times as long as any other.
    """

    def __init__(
        self, model: Architecture, gpus: plan.Gpus, rules: Rules, attention: float = 1.0
    ) -> None:
        self._model = model
        self._gpus = gpus
        self._weights_bytes = plan.parameters(model).total * plan.BF16_BYTES
        self._token_flop = plan.prefill_flop_per_token(model, 0)
        # Half the context on average: two positions cost one full look-back.
        position_flop = plan.prefill_flop_per_token(model, 2) - self._token_flop
        self._position_flop = attention * position_flop
        self.kv_bytes_per_token = plan.kv_bytes_per_token(model.geometry)
        memory_bytes = rules.gpu_memory_gb * 1e9 * gpus.count * rules.pool_fraction
        self.pool_tokens = int((memory_bytes - self._weights_bytes) / self.kv_bytes_per_token)
        if self.pool_tokens < 1:
            raise ConfigError(
                f"{model.name} does not fit {gpus.count} GPUs of {rules.gpu_memory_gb:g} GB; "
                "give its replicas more GPUs"
            )

    def read_flop(self, first_tokens: int, last_tokens: int) -> float:
        """FLOP of reading the tokens after `first_tokens` up to `last_tokens` of a prompt."""
        return self._whole_flop(last_tokens) - self._whole_flop(first_tokens)

    def _whole_flop(self, tokens: int) -> float:
        return (self._token_flop + self._position_flop * tokens / 2) * tokens

    def step_s(
        self, decodes: int, decode_context_tokens: int, read_flop: float, read: int, behind: int
    ) -> tuple[float, float]:
        """Time of one step, and what its arithmetic alone would take.

        `decodes` requests with `decode_context_tokens` of KV among them write a token each;
        `read` tokens of prompts take `read_flop` and look back at `behind` cached tokens.
        """
        flop = read_flop + decodes * self._token_flop
        flop += self._position_flop * (decode_context_tokens + decodes / 2)
        kv_tokens = decode_context_tokens + decodes + read + behind
        moved_bytes = self._weights_bytes + kv_tokens * self.kv_bytes_per_token
        return self._gpus.seconds(flop, moved_bytes), self._gpus.seconds(flop, 0.0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The work of one part of a handoff."""

    read_bytes: float
    map_s: float
    write_bytes: float


@dataclass(frozen=True, slots=True)
class HandoffCost:
    """Bytes and seconds of a handoff by its tokens, and the chunks that it is made in.

    `map_s` is the time on one otherwise idle mapper. Without `chunk_tokens` there are `layers`
    equal parts.
    """

    overhead_s: float
    read_bytes_per_token: float
    write_bytes_per_token: float
    map_s: Callable[[int], float]
    chunk_tokens: int | None
    layers: int

    def chunks(self, tokens: int) -> list[Chunk]:
        """What is read, mapped and written as one. Every chunk moves the mapper's weights."""
        size = self.chunk_tokens
        if size is None:
            return [self._chunk(tokens, self.layers)] * self.layers
        return [self._chunk(min(size, tokens - first), 1) for first in range(0, tokens, size)]

    def _chunk(self, tokens: int, parts: int) -> Chunk:
        return Chunk(
            read_bytes=tokens * self.read_bytes_per_token / parts,
            map_s=self.map_s(tokens) / parts,
            write_bytes=tokens * self.write_bytes_per_token / parts,
        )


def handoff_cost(
    source: Architecture,
    target: Architecture,
    scenario: Scenario,
    rules: Rules,
    machine: Machine | None = None,
) -> HandoffCost:
    """Handoffs of a pair of models, on the scenario's GPUs or a measured machine."""
    k, _ = choose_k(source, target, rules.k)
    shapes = source.geometry, target.geometry
    weights = plan.mapper_weights(rules.support, k, *shapes)
    gpus = plan.Gpus(
        scenario.gpu_tflops, scenario.gpu_memory_gb_s, rules.mapper_gpus, scenario.efficiency
    )

    def map_s(tokens: int) -> float:
        if machine is not None:
            return tokens / machine.map_tokens_per_s
        return plan.map_s(weights, *shapes, tokens, gpus)

    return HandoffCost(
        overhead_s=scenario.overhead_ms / 1e3,
        read_bytes_per_token=plan.kv_bytes_per_token(source.geometry),
        write_bytes_per_token=plan.kv_bytes_per_token(target.geometry),
        map_s=map_s,
        chunk_tokens=rules.chunk_tokens,
        layers=target.layers if rules.place == "sender" else source.layers,
    )


def engine_cost(
    model: Architecture,
    gpus: int,
    scenario: Scenario,
    rules: Rules,
    machine: Machine | None = None,
) -> EngineCost:
    """The cost of a replica of `gpus` of the scenario's GPUs, or of a measured machine's engine."""
    if machine is not None:
        return EngineCost(model, machine.engine, rules, machine.attention)
    hardware = plan.Gpus(scenario.gpu_tflops, scenario.gpu_memory_gb_s, gpus, scenario.efficiency)
    return EngineCost(model, hardware, rules)
