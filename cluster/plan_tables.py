"""A plan as tables and sentences on stdout. It decides how numbers look, not what they are."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from cluster.plan_report import HandoffPlan, PlanReport, Scenario


def print_plan(report: PlanReport) -> None:
    """The plan as tables and sentences on stdout."""
    console = Console(highlight=False)
    source, target = report.source.architecture.name, report.target.architecture.name
    console.print(f"\n[bold]{source}[/] to [bold]{target}[/], {_scenario_text(report.scenario)}\n")
    for line in _findings(report):
        console.print(f"  {line}")
    console.print()
    for table in (
        _model_table(report),
        _mapper_table(report),
        *(_handoff_table(report, gbps) for gbps in report.scenario.links_gbps),
        _cascade_table(report),
        _fleet_table(report),
    ):
        console.print(table)
        console.print()
    overhead = f"Handoffs include {report.scenario.overhead_ms:g} ms of overhead."
    console.print(f"[dim]{_FOOTNOTE} {overhead}[/]")
    for note in report.notes:
        console.print(f"[yellow]note[/] {note}")


_FOOTNOTE = (
    "Prefill counts 2 FLOP per parameter, token table and LM head included, and causal attention "
    "(half the context on average). Times are rooflines: the longer of arithmetic and memory "
    "traffic. KV and weights are bf16; sender and receiver have the same GPUs. Overlap: layers are "
    "mapped while others travel. Pays from: prompt tokens from which on it is never slower."
)


def _scenario_text(scenario: Scenario) -> str:
    memory = scenario.gpu_memory_gb_s
    gpu = scenario.gpu_name or "GPU"
    bandwidth = "" if memory is None else f", {memory:,.0f} GB/s"
    reached = "" if scenario.efficiency == 1 else f", {scenario.efficiency:.0%} of it reached"
    return (
        f"{scenario.tokens:,} tokens, {scenario.gpus} x {gpu} "
        f"({scenario.gpu_tflops:,.0f} TFLOP/s{bandwidth} each{reached})"
    )


def _findings(report: PlanReport) -> list[str]:
    """What the tables amount to."""
    best = min(report.handoffs, key=lambda one: one.overlapped_s)
    lines = [
        f"Reading the prompt again takes the target {seconds(report.target.prefill_s)}; the best "
        f"handoff here takes {seconds(best.overlapped_s)} ({_ratio(best)}: {best.support}, mapped "
        f"at the {best.mapped_at}, {best.link_gbps:g} Gbit/s)."
    ]
    if report.map_at is None:
        lines.append("Both caches are of one size: either side may map.")
    else:
        less = report.receiver_saved_bytes
        share = less if report.map_at == "receiver" else -less / (1 - less)
        lines.append(f"Map at the {report.map_at}: {share:.1%} fewer bytes on the link.")
    bare = report.cascades[0]
    lines.append(
        f"At {report.scenario.escalation:.0%} escalation a mapping cascade prefills "
        f"{bare.saved_of_reprefill_cascade:.0%} less than a re-prefilling one and "
        f"{bare.saved_of_all_large:.0%} less than the target alone."
    )
    return lines


def new_table(title: str, first: str, *columns: str) -> Table:
    """A plain table with a left column and columns of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _model_table(report: PlanReport) -> Table:
    models = report.source, report.target
    table = new_table("models", "", *(short(one.architecture.name) for one in models))
    shapes = [one.architecture for one in models]
    rows = (
        (
            "layers, KV heads, head_dim",
            [f"{one.layers}, {one.kv_heads}, {one.head_dim}" for one in shapes],
        ),
        (
            "hidden, MLP, query heads",
            [
                f"{one.hidden_size:,}, {one.intermediate_size:,}, {one.attention_heads}"
                for one in shapes
            ],
        ),
        ("RoPE and its theta", [_rope(one.rope_type, one.rope_theta) for one in shapes]),
        ("positions", [f"{one.max_position_tokens:,}" for one in shapes]),
        ("parameters", [_count(one.parameters) for one in models]),
        ("weights", [size(one.weights_bf16_bytes) for one in models]),
        ("KV of a token", [f"{one.kv_bytes_per_token:,} B" for one in models]),
        ("KV of the prompt", [size(one.kv_bytes) for one in models]),
        ("prefill of a token", [_gflop(one.prefill_flop_per_token) for one in models]),
        (
            "  its table and LM head",
            [_gflop(one.table_head_flop_per_token) for one in models],
        ),
        ("prefill of the prompt", [seconds(one.prefill_s) for one in models]),
    )
    for label, values in rows:
        table.add_row(label, *values)
    return table


def _mapper_table(report: PlanReport) -> Table:
    mappers = report.mappers
    table = new_table(
        f"mapper, k = {mappers[0].k} ({report.k_origin})", "", *(one.support for one in mappers)
    )
    rows = (
        ("features per output", [f"{one.width:,}" for one in mappers]),
        ("weights", [_count(one.weights) for one in mappers]),
        ("size in fp32, bf16", [f"{size(m.fp32_bytes)}, {size(m.bf16_bytes)}" for m in mappers]),
        ("map of a token", [_gflop(one.flop_per_token) for one in mappers]),
        ("fewer FLOP than re-prefill", [f"{_three(one.reprefill_flop_ratio)}x" for one in mappers]),
        ("map of the prompt", [seconds(one.map_s) for one in mappers]),
        ("re-prefill minus map", [seconds(one.sooner_s) for one in mappers]),
        ("calibration tokens, at least", [f"{m.minimum_calibration_tokens:,}" for m in mappers]),
        ("  comfortable", [f"{one.comfortable_calibration_tokens:,}" for one in mappers]),
        ("fit memory, all layers in one pass", [size(m.fit_one_pass_bytes) for m in mappers]),
        ("  first pass that only chooses layers", [size(m.fit_choosing_bytes) for m in mappers]),
        (
            "  second pass, chosen layers together",
            [size(one.fit_chosen_together_bytes) for one in mappers],
        ),
        (
            "  second pass, one target layer at a time",
            [size(one.fit_chosen_one_by_one_bytes) for one in mappers],
        ),
    )
    for label, values in rows:
        table.add_row(label, *values)
    return table


def _handoff_table(report: PlanReport, link_gbps: float) -> Table:
    rows = [one for one in report.handoffs if one.link_gbps == link_gbps]
    best = min(rows, key=lambda one: one.overlapped_s)
    table = new_table(
        f"handoff over {link_gbps:g} Gbit/s (re-prefill: {seconds(report.target.prefill_s)})",
        "mapped at",
        "moved",
        "transfer",
        "map",
        "serial",
        "overlap",
        "speed-up",
        "pays from",
    )
    for number, row in enumerate(rows):
        if number == 0 or row.support != rows[number - 1].support:
            table.add_row(row.support)
        table.add_row(
            f"  {row.mapped_at}",
            size(row.moved_bytes),
            seconds(row.transfer_s),
            seconds(row.map_s),
            seconds(row.serial_s),
            seconds(row.overlapped_s),
            f"{_three(row.reprefill_ratio)}x",
            "never" if row.break_even_tokens is None else f"{row.break_even_tokens:,}",
            style="green" if row is best and row.reprefill_ratio > 1 else None,
        )
    return table


def _cascade_table(report: PlanReport) -> Table:
    table = new_table(
        f"GFLOP of prefill per prompt token at {report.scenario.escalation:.0%} escalation",
        "mapping",
        "cascade",
        "re-prefilling",
        "saved",
        "all on target",
        "saved",
    )
    for row in report.cascades:
        table.add_row(
            "not counted" if row.support is None else row.support,
            _three(row.cascade_flop / 1e9),
            _three(row.reprefill_cascade_flop / 1e9),
            f"{row.saved_of_reprefill_cascade:.1%}",
            _three(row.all_large_flop / 1e9),
            f"{row.saved_of_all_large:.1%}",
        )
    return table


def _fleet_table(report: PlanReport) -> Table:
    first = report.fleets[0]
    table = new_table(
        f"mappers of {first.models} models: {first.directed_pairs} directed pairs",
        "each of",
        "one mapper",
        "all of them",
    )
    for row in report.fleets:
        table.add_row(row.basis, size(row.pair_bytes), size(row.total_bytes))
    return table


def seconds(value_s: float) -> str:
    """A duration in ms below one second, else in s."""
    return f"{_three(value_s * 1e3)} ms" if abs(value_s) < 1 else f"{_three(value_s)} s"


def size(value_bytes: float) -> str:
    """Decimal MB below one GB, else GB."""
    if value_bytes < 1e9:
        return f"{_three(value_bytes / 1e6)} MB"
    return f"{_three(value_bytes / 1e9)} GB"


def _three(value: float) -> str:
    """Three significant digits, or all that stand before the point."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 3 - whole)}f}"


def _count(value: int) -> str:
    return f"{_three(value / 1e9)} B" if value >= 1e9 else f"{_three(value / 1e6)} M"


def _gflop(value: float) -> str:
    return f"{_three(value / 1e9)} GFLOP"


def _ratio(row: HandoffPlan) -> str:
    """How a handoff compares with a re-prefill, in words that cannot be misread."""
    if row.reprefill_ratio >= 1:
        return f"{row.reprefill_ratio:.1f}x faster"
    return f"{1 / row.reprefill_ratio:.1f}x slower"


def short(name: str) -> str:
    """A repository without its owner, a folder without its parents."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def _rope(kind: str, theta: float | None) -> str:
    return kind if theta is None else f"{kind}, {theta:g}".replace("e+0", "e")
