"""What steps, maps and copies of a simulated fleet cost: `cluster.plan`'s formulas, cut into parts.

Adds no number of its own about models or GPUs. The parts of a prompt add up to what the planner
says of the whole.
"""

from __future__ import annotations

from cluster import plan
from cluster.catalog import Architecture
from cluster.errors import ConfigError
from cluster.plan_pair import choose_k
from cluster.plan_report import Scenario
from cluster.simulate_spec import Rules


class EngineCost:
    """Step times of one replica and the size of its KV pool.

    The FLOP of a prompt's tokens a to b are the planner's for b tokens less those for a. A step
    moves the weights once, the KV that is written, and the KV that earlier tokens have left.
    """

    def __init__(self, model: Architecture, gpus: plan.Gpus, rules: Rules) -> None:
        self._model = model
        self._gpus = gpus
        self._weights_bytes = plan.parameters(model).total * plan.BF16_BYTES
        self._token_flop = plan.prefill_flop_per_token(model, 0)
        # Half the context on average: two positions cost one full look-back.
        self._position_flop = plan.prefill_flop_per_token(model, 2) - self._token_flop
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


class HandoffCost:
    """Bytes and GPU seconds of one handoff by its tokens, and in how many parts it is pipelined."""

    def __init__(
        self, source: Architecture, target: Architecture, scenario: Scenario, rules: Rules
    ) -> None:
        k, _ = choose_k(source, target, rules.k)
        shapes = source.geometry, target.geometry
        self._weights = plan.mapper_weights(rules.support, k, *shapes)
        self._shapes = shapes
        self._gpus = plan.Gpus(
            scenario.gpu_tflops,
            scenario.gpu_memory_gb_s,
            rules.mapper_gpus,
            scenario.efficiency,
        )
        self.overhead_s = scenario.overhead_ms / 1e3
        self.stages = target.layers if rules.place == "sender" else source.layers
        self.read_bytes_per_token = plan.kv_bytes_per_token(source.geometry)
        self.write_bytes_per_token = plan.kv_bytes_per_token(target.geometry)

    def map_s(self, tokens: int) -> float:
        """Time of mapping on one otherwise idle mapper replica."""
        return plan.map_s(self._weights, *self._shapes, tokens, self._gpus)


def engine_cost(model: Architecture, gpus: int, scenario: Scenario, rules: Rules) -> EngineCost:
    """The cost of a replica of `gpus` of the scenario's GPUs."""
    hardware = plan.Gpus(scenario.gpu_tflops, scenario.gpu_memory_gb_s, gpus, scenario.efficiency)
    return EngineCost(model, hardware, rules)
