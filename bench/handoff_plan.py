"""What the planner says of measured handoffs, and which of its terms is to blame where it is off.

The planner gets rates that the same run measured: how fast this machine maps and prefills at one
length, what a handoff costs besides, and how fast its links are without a limit. Pure arithmetic
on recorded runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal

from bench.handoff_runs import Run
from cluster import plan
from cluster.catalog import Architecture
from cluster.plan_pair import handoff_s, make_plan
from cluster.plan_report import MapperPlan, Scenario, Side

TOLERANCE = 0.25
_SIDES: dict[str, Side] = {"source": "sender", "target": "receiver"}
_OVERHEAD = ("ticket", "queue", "admit")
_ANY_TFLOPS = 1.0

Term = Literal["fixed", "moving", "mapping", "overlap", "prefill"]


@dataclass(frozen=True)
class Rates:
    """What the planner is told about this machine; all medians of this run.

    `at_tokens` is the length that they were taken at, but for `overhead_ms`: that is ticket,
    queue and admission of the shortest handoffs.
    """

    at_tokens: int
    map_tokens_per_s: float
    prefill_tokens_per_s: float
    overhead_ms: float
    unlimited_gbps: float


@dataclass(frozen=True)
class Row:
    """One cell without first handoffs: medians of `runs` runs, and the planner's time.

    `terms_ms` explain the difference: they add up to what was measured less what was predicted.
    """

    place: str | None
    rate_gbps: float | None
    tokens: int
    prompt_tokens: int
    runs: int
    measured_ms: float
    least_ms: float
    most_ms: float
    predicted_ms: float
    stages_ms: dict[str, float]
    terms_ms: dict[Term, float]

    @property
    def off(self) -> float:
        """How much more or less the planner says, as a share of what was measured."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def blame(self) -> Term | None:
        """The largest term in the direction of the error; None within TOLERANCE."""
        if abs(self.off) <= TOLERANCE:
            return None
        sign = 1 if self.measured_ms > self.predicted_ms else -1
        return max(self.terms_ms, key=lambda term: sign * self.terms_ms[term])


class Planner:
    """`cluster.plan` and `cluster.plan_pair`, told this machine's rates."""

    def __init__(
        self, source: Architecture, target: Architecture, k: int, runs: Sequence[Run]
    ) -> None:
        self.source, self.target, self._k = source, target, k
        self._runs = [run for run in runs if run.good and not run.first]

    @cached_property
    def rates(self) -> Rates:
        """Taken at the middle length, over all places; ValueError when runs are missing."""
        mapped = [run for run in self._runs if run.path == "mapped"]
        again = [run for run in self._runs if run.path == "recompute"]
        lengths = sorted({run.tokens for run in mapped} & {run.tokens for run in again})
        if not lengths:
            raise ValueError("no length was both handed over and read again; nothing to compare")
        at = lengths[len(lengths) // 2]
        fastest = max(_gbps(run) for run in mapped)
        here = [run for run in mapped if run.tokens == at]
        widest = [run for run in here if run.rate_gbps is None] or here
        shortest = [run for run in mapped if run.tokens == lengths[0]]
        quick = [run for run in shortest if run.rate_gbps == _widest(shortest)]
        return Rates(
            at_tokens=at,
            map_tokens_per_s=median(1e3 * r.covered_tokens / r.stages_ms["map"] for r in widest),
            prefill_tokens_per_s=median(
                1e3 * r.prompt_tokens / r.handoff_ms for r in again if r.tokens == at
            ),
            overhead_ms=median(_fixed_ms(run.stages_ms) for run in quick),
            unlimited_gbps=median(map(_gbps, widest)) if widest[0].rate_gbps is None else fastest,
        )

    def handoff_ms(self, place: str, rate_gbps: float | None, tokens: int) -> float:
        """The planner's handoff of `tokens`.

        It knows mappers at the sender and at the receiver. For one on a node of its own its two
        formulas are joined: the source's KV crosses one link and the target's another, both
        overlapped with the map.
        """
        gbps = self.rates.unlimited_gbps if rate_gbps is None else rate_gbps
        if place in _SIDES:
            side = _SIDES[place]
            scenario = self._scenario(self._map_tflops)
            seconds = handoff_s(
                self.source, self.target, self._mapper, side, gbps, scenario, tokens
            )
            return 1e3 * seconds
        read_s, write_s = (
            plan.transfer_s(tokens * plan.kv_bytes_per_token(one.geometry), gbps)
            for one in (self.source, self.target)
        )
        map_s = tokens / self.rates.map_tokens_per_s
        return self.rates.overhead_ms + 1e3 * self._joined_s(read_s, map_s, write_s)

    def prefill_ms(self, tokens: int) -> float:
        """The planner's re-prefill of `tokens`."""
        at = self.rates.at_tokens
        flop = plan.prefill_flop_per_token(self.target, at) * self.rates.prefill_tokens_per_s
        return 1e3 * plan.prefill_s(self.target, tokens, plan.Gpus(flop / 1e12, None))

    def rows(self) -> list[Row]:
        """Every cell: handoffs by place, rate and length, then reading again by length."""
        cells: dict[tuple[str, float | None, int], list[Run]] = {}
        again: dict[int, list[Run]] = {}
        for run in self._runs:
            if run.path == "mapped":
                cells.setdefault((run.place, run.rate_gbps, run.tokens), []).append(run)
            else:
                again.setdefault(run.tokens, []).append(run)
        rows = [self._mapped(*cell, runs) for cell, runs in cells.items()]
        rows += [self._recomputed(tokens, runs) for tokens, runs in sorted(again.items())]
        return rows

    def _mapped(self, place: str, rate_gbps: float | None, tokens: int, runs: list[Run]) -> Row:
        covered = round(median(run.covered_tokens for run in runs))
        predicted_ms = self.handoff_ms(place, rate_gbps, covered)
        measured_ms = median(run.handoff_ms for run in runs)
        stages = {name: median(run.stages_ms[name] for run in runs) for name in runs[0].stages_ms}
        # Each term of the planner's is replaced by what was measured, one after the other.
        fixed_ms = _fixed_ms(stages)
        map_s = covered / self.rates.map_tokens_per_s
        moved_s = (stages["read"] / 1e3, stages["write"] / 1e3)
        after_moving = fixed_ms + 1e3 * self._joined_s(moved_s[0], map_s, moved_s[1])
        after_mapping = fixed_ms + 1e3 * self._joined_s(moved_s[0], stages["map"] / 1e3, moved_s[1])
        after_fixed = predicted_ms - self.rates.overhead_ms + fixed_ms
        terms: dict[Term, float] = {
            "fixed": after_fixed - predicted_ms,
            "moving": after_moving - after_fixed,
            "mapping": after_mapping - after_moving,
            "overlap": measured_ms - after_mapping,
        }
        return _row(place, rate_gbps, tokens, runs, predicted_ms, stages, terms)

    def _recomputed(self, tokens: int, runs: list[Run]) -> Row:
        predicted_ms = self.prefill_ms(round(median(run.prompt_tokens for run in runs)))
        measured_ms = median(run.handoff_ms for run in runs)
        terms: dict[Term, float] = {"prefill": measured_ms - predicted_ms}
        return _row(None, None, tokens, runs, predicted_ms, {}, terms)

    def _joined_s(self, read_s: float, map_s: float, write_s: float) -> float:
        inward_s = plan.overlapped_s(map_s, read_s, self.source.layers)
        return plan.overlapped_s(inward_s, write_s, self.target.layers)

    @property
    def _map_tflops(self) -> float:
        flop = plan.map_flop_per_token(self._mapper.weights)
        return flop * self.rates.map_tokens_per_s / 1e12

    @cached_property
    def _mapper(self) -> MapperPlan:
        scenario = self._scenario(_ANY_TFLOPS)
        made = make_plan(self.source, self.target, scenario, supports=("full",), k=self._k)
        return made.mappers[0]

    def _scenario(self, tflops: float) -> Scenario:
        return Scenario(
            tokens=self.rates.at_tokens,
            gpus=1,
            gpu_name=None,
            gpu_tflops=tflops,
            gpu_memory_gb_s=None,
            efficiency=1.0,
            links_gbps=(self.rates.unlimited_gbps,),
            overhead_ms=self.rates.overhead_ms,
            escalation=1.0,
            models=2,
            average_pair_gb=None,
        )


def _row(
    place: str | None,
    rate_gbps: float | None,
    tokens: int,
    runs: list[Run],
    predicted_ms: float,
    stages_ms: dict[str, float],
    terms_ms: dict[Term, float],
) -> Row:
    times = [run.handoff_ms for run in runs]
    return Row(
        place=place,
        rate_gbps=rate_gbps,
        tokens=tokens,
        prompt_tokens=round(median(run.prompt_tokens for run in runs)),
        runs=len(runs),
        measured_ms=median(times),
        least_ms=min(times),
        most_ms=max(times),
        predicted_ms=predicted_ms,
        stages_ms=stages_ms,
        terms_ms=terms_ms,
    )


def _fixed_ms(stages_ms: dict[str, float]) -> float:
    return sum(stages_ms[name] for name in _OVERHEAD)


def _gbps(run: Run) -> float:
    """What NIXL reached while it moved something."""
    moved_ms = run.stages_ms["read"] + run.stages_ms["write"]
    return (run.bytes_read + run.bytes_written) * 8 / moved_ms / 1e6


def _widest(runs: Sequence[Run]) -> float | None:
    rates = [run.rate_gbps for run in runs]
    return None if None in rates else max(rate for rate in rates if rate is not None)
