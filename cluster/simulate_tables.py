"""Prints a simulation and a comparison with measurements as tables. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from cluster.plan_tables import new_table, seconds, short
from cluster.simulate_measured import AGREEMENT, Compared, Measured, MeasuredLoop
from cluster.simulate_report import Percentiles, Point, PoolUse, SimulationReport, VariantReport
from cluster.simulate_spec import POOLS, Lengths, Pool, Variant

NAMES: dict[Variant, str] = {
    "handoff": "handoff",
    "reprefill": "re-prefill",
    "all_large": "all large",
}

# Times that a request stays, below which a fleet is still filling up.
_SHORT = 4


def print_simulation(report: SimulationReport) -> None:
    """The whole report, on stdout."""
    console = Console()
    console.print()
    for line in scenario_lines(report):
        console.print(line)
    console.print()
    console.print(_design_table(report))
    console.print()
    if any(len(one.points) > 1 for one in report.variants):
        console.print(_sweep_table(report))
        console.print()
    for line in findings(report):
        console.print(line)


def scenario_lines(report: SimulationReport) -> list[str]:
    """What was simulated."""
    load, rules, scenario = report.load, report.rules, report.scenario
    if load.lengths_file is None:
        lengths = f"prompts {_lengths(load.prompt)}, answers {_lengths(load.answer)}"
    else:
        lengths = f"lengths from {load.lengths_file.name}"
    arrivals = "Poisson" if load.burstiness == 1 else f"gamma (shape {load.burstiness:g})"
    gpu = scenario.gpu_name or f"{scenario.gpu_tflops:g} TFLOP/s GPU"
    return [
        f"[bold]{short(report.source)} to {short(report.target)}[/]: {load.seconds:g} s of "
        f"{arrivals} arrivals, seed {load.seed}, {lengths} tokens (median, p95); "
        f"{load.escalation:.0%} escalate after {_lengths(load.escalate_after)} tokens.",
        f"{gpu} at {scenario.efficiency:.0%}: {rules.small_gpus}, {rules.large_gpus} and "
        f"{rules.mapper_gpus} per small, large and mapper replica; {report.link_gbps:g} Gbit/s a "
        f"replica, mappers {'apart' if rules.place == 'apart' else f'at the {rules.place}'}, "
        f"{rules.support} support.",
        f"Targets: p99 of {report.targets.first_token_s:g} s to first tokens, "
        f"{report.targets.tpot_s * 1e3:g} ms per output token.",
    ]


def findings(report: SimulationReport) -> list[str]:
    """Where each variant saturates."""
    lines = []
    for one in report.variants:
        name = NAMES[one.variant]
        if one.saturates_rate is None:
            lines.append(f"{name}: keeps up with {one.holds_rate:,.0f} requests/s, the most tried.")
        elif one.holds_rate is None:
            lines.append(f"{name}: cannot keep up; {one.bottleneck} falls behind.")
        else:
            lines.append(
                f"{name}: keeps up with {one.holds_rate:,.0f} requests/s, falls behind at "
                f"{one.saturates_rate:,.0f} ({one.bottleneck})."
            )
    longest_s = max(point.mean_request_s for one in report.variants for point in one.points)
    if report.load.seconds < _SHORT * longest_s:
        lines.append(
            f"[yellow]note[/] requests stay up to {seconds(longest_s)} on average: "
            f"{report.load.seconds:g} s are too few to tell filling up from falling behind; raise "
            "--seconds"
        )
    return lines


def print_compared(rows: Sequence[Compared]) -> None:
    """Measurements beside simulations, on stdout."""
    console = Console()
    takeovers = [row for row in rows if isinstance(row.measured, Measured)]
    loops = [row for row in rows if isinstance(row.measured, MeasuredLoop)]
    for title, some, names in (
        ("decision to first large token", takeovers, ("tokens", "link", "path", "mapper at")),
        ("handoffs per second", loops, ("tokens", "link", "mappers", "in flight")),
    ):
        if some:
            table = new_table(title, *names, "measured", "simulated", "error")
            for row in some:
                table.add_row(*compared_cells(row), style=None if row.agrees else "red")
            console.print(table)
    console.print(agreement(rows))


def compared_cells(row: Compared) -> tuple[str, ...]:
    """One row of a table of takeovers or of loops."""
    one = row.measured
    link = "unlimited" if one.link_gbps is None else f"{one.link_gbps:g} Gbit/s"
    if isinstance(one, Measured):
        what = [f"{one.prompt_tokens:,}", link, one.path, one.at or ""]
        values = [seconds(one.seconds), seconds(row.simulated)]
    else:
        what = [f"{one.tokens:,}", link, str(one.mappers), str(one.in_flight)]
        values = [f"{one.handoffs_per_s:.3g}", f"{row.simulated:.3g}"]
    return *what, *values, f"{row.error:+.0%}"


def agreement(rows: Sequence[Compared]) -> str:
    """How many agree."""
    agreeing = sum(row.agrees for row in rows)
    return f"{agreeing} of {len(rows)} agree within {AGREEMENT:.0%}."


def _design_table(report: SimulationReport) -> Table:
    table = new_table(
        f"{report.variants[0].at_design.rate:g} requests/s",
        "",
        *(NAMES[one.variant] for one in report.variants),
    )
    rows: list[tuple[str, Callable[[Point], str]]] = [
        ("GPUs", lambda point: f"{point.gpus:,}"),
        *((f"  {pool}", _of(pool, lambda use: f"{use.gpus:,}")) for pool in POOLS),
        ("first token, p50", lambda point: _one(point.first_token, 50)),
        ("first token, p99", lambda point: _one(point.first_token, 99)),
        ("large's first after escalation, p50", lambda point: _one(point.large_first_token, 50)),
        ("large's first after escalation, p99", lambda point: _one(point.large_first_token, 99)),
        ("KV handed over, p50", lambda point: _one(point.handoff, 50)),
        ("KV handed over, p99", lambda point: _one(point.handoff, 99)),
        ("small, time per token, p99", lambda point: _one(point.small_tpot, 99)),
        ("large, time per token, p99", lambda point: _one(point.large_tpot, 99)),
        *((f"{pool} busy", _of(pool, lambda use: f"{use.busy:.0%}")) for pool in POOLS),
        *((f"{pool} FLOP used", _of(pool, lambda use: f"{use.arithmetic:.0%}")) for pool in POOLS),
        *((f"{pool} KV pool held", _of(pool, _held)) for pool in POOLS[:2]),
        *((f"{pool} link out, in", _of(pool, _links)) for pool in POOLS),
        ("busiest link", _busiest),
        ("handoffs, read again", _handed),
        ("GPU-hours per million", lambda point: f"{point.gpu_hours_per_million:,.1f}"),
        (
            f"cost per million at {report.price_per_gpu_hour:g}/h",
            lambda point: f"{point.cost_per_million:,.0f}",
        ),
        ("meets the targets", lambda point: "yes" if point.meets_targets else "no"),
    ]
    for label, show in rows:
        table.add_row(label, *(show(one.at_design) for one in report.variants))
    return table


def _sweep_table(report: SimulationReport) -> Table:
    table = new_table(
        "load: p99 to first tokens; to the large model's after escalation", "requests/s"
    )
    for one in report.variants:
        table.add_column(NAMES[one.variant], justify="right")
    rates = sorted({point.rate for one in report.variants for point in one.points})
    for rate in rates:
        table.add_row(f"{rate:,.0f}", *(_at(one, rate) for one in report.variants))
    return table


def _at(variant: VariantReport, rate: float) -> str:
    for point in variant.points:
        if point.rate == rate:
            late = _one(point.large_first_token, 99)
            text = f"{_one(point.first_token, 99)}; {late}"
            return text if point.saturated is None else f"[red]{text} ({point.saturated})[/]"
    return ""


def _of(pool: Pool, show: Callable[[PoolUse], str]) -> Callable[[Point], str]:
    return lambda point: show(point.pools[pool]) if pool in point.pools else "-"


def _held(use: PoolUse) -> str:
    return "-" if use.kv_held is None else f"{use.kv_held:.0%}"


def _links(use: PoolUse) -> str:
    return f"{use.link_out:.1%}, {use.link_in:.1%}"


def _busiest(point: Point) -> str:
    return f"{max(use.link_busiest for use in point.pools.values()):.1%}"


def _handed(point: Point) -> str:
    return f"{point.handoffs:,}, {sum(point.recomputed.values()):,}"


def _one(value: Percentiles | None, percent: int) -> str:
    if value is None:
        return "-"
    return seconds(value.p50_s if percent == 50 else value.p99_s)


def _lengths(one: Lengths) -> str:
    return f"{one.median_tokens:,}, {one.p95_tokens:,}"
