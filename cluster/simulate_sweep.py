"""Runs the variants of a fleet over several rates and puts the report together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.simulate import Fleet, Setup
from cluster.simulate_load import requests
from cluster.simulate_point import point
from cluster.simulate_report import Point, SimulationReport, VariantReport
from cluster.simulate_size import size
from cluster.simulate_spec import Pool, Replicas, Targets, Variant, pools_of

_RAISE = 1.1
_MOST_RAISES = 24


class Sweep:
    """Simulations of one setup, each shown as a progress bar on `console`."""

    def __init__(
        self, setup: Setup, targets: Targets, price_per_gpu_hour: float, console: Console
    ) -> None:
        self._setup = setup
        self._targets = targets
        self._price = price_per_gpu_hour
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def run(
        self,
        variants: Sequence[Variant],
        rates: Sequence[float],
        fixed: Mapping[Variant, Replicas],
        *,
        saturate: bool = False,
    ) -> SimulationReport:
        """Simulate every variant at every rate.

        A variant that `fixed` lacks is sized for the first rate. With `saturate` the rate then
        goes up by tenths until the variant cannot keep up.
        """
        setup = self._setup
        seen = requests(setup.load, rates[0])
        with self._progress:
            reports = [
                self._variant(variant, rates, fixed.get(variant), saturate) for variant in variants
            ]
        pools: list[Pool] = ["small", "large"]
        return SimulationReport(
            source=setup.source.name,
            target=setup.target.name,
            scenario=setup.scenario,
            link_gbps=setup.link_gbps,
            load=setup.load,
            rules=setup.rules,
            targets=self._targets,
            price_per_gpu_hour=self._price,
            pool_tokens={pool: setup.engine(pool).pool_tokens for pool in pools},
            mean_prompt_tokens=sum(one.prompt_tokens for one in seen) / max(1, len(seen)),
            mean_answer_tokens=sum(one.answer_tokens for one in seen) / max(1, len(seen)),
            variants=tuple(reports),
        )

    def trial(self, variant: Variant, rate: float, replicas: Replicas) -> Point:
        """One simulation."""
        counts = ", ".join(f"{pool} {replicas.of(pool)}" for pool in pools_of(variant))
        seconds = self._setup.load.seconds
        task = self._progress.add_task(f"{variant} {rate:g}/s: {counts}", total=seconds)
        fleet = Fleet(
            self._setup,
            variant,
            replicas,
            requests(self._setup.load, rate),
            lambda now_s: self._progress.update(task, completed=now_s),
        )
        fleet.run()
        self._progress.remove_task(task)
        return point(fleet, rate, self._targets, self._price)

    def _variant(
        self, variant: Variant, rates: Sequence[float], fixed: Replicas | None, saturate: bool
    ) -> VariantReport:
        replicas = fixed
        if replicas is None:
            first = requests(self._setup.load, rates[0])
            trial = partial(self.trial, variant, rates[0])
            replicas = size(self._setup, variant, rates[0], first, self._targets, trial)
        points = [self.trial(variant, rate, replicas) for rate in rates]
        if saturate:
            rate = max(rates)
            for _ in range(_MOST_RAISES):
                if any(one.saturated is not None for one in points):
                    break
                rate *= _RAISE
                points.append(self.trial(variant, rate, replicas))
        held = [one.rate for one in points if one.saturated is None]
        full = sorted(
            (one for one in points if one.saturated is not None), key=lambda one: one.rate
        )
        return VariantReport(
            variant=variant,
            replicas=replicas,
            sized=fixed is None,
            points=tuple(points),
            holds_rate=max(held, default=None),
            saturates_rate=full[0].rate if full else None,
            bottleneck=full[0].saturated if full else None,
        )
