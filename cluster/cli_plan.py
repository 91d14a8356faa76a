"""`kvcascade plan`: its options. Arithmetic is in `cluster.plan`, tables in `cluster.plan_tables`.

With `--simulate` a fleet under load is simulated (`cluster.simulate_sweep`). Like `cluster.cli`,
it imports what is heavy only when the command runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster import simulate_options as fleet

if TYPE_CHECKING:
    from cluster.plan_report import Scenario
    from cluster.simulate import Setup
    from mappers.manifest import Support

# What a handoff adds to a re-prefill at any length: messages, admission, kernel launches. The
# messages took 22 ms on two CPU cores; arXiv 2608.03893 (App. G) needs 14 ms for 64 tokens.
_OVERHEAD_MS = 20.0
_DEFAULT_GPU = "A100"
_LINKS_GBPS = [400.0, 100.0]
_RATE = 100.0


def plan(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Option(
            help="Model that reads the prompt: a catalog name as `qwen3-14b`, a hub repository, a "
            "folder, or `small`."
        ),
    ] = "small",
    target: Annotated[
        str, typer.Option(help="Model that takes over, named likewise, or `large`.")
    ] = "large",
    tokens: Annotated[int, typer.Option(help="Prompt tokens to hand over.", min=1)] = 32_768,
    gpus: Annotated[int, typer.Option(help="GPUs that read or map together.", min=1)] = 4,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU with data-sheet numbers, as A100, H100 or H200. Unset: A100."),
    ] = None,
    gpu_tflops: Annotated[
        float | None,
        typer.Option(help="Dense bf16 TFLOP/s of one GPU instead of --gpu.", min=0.001),
    ] = None,
    gpu_memory_gb_s: Annotated[
        float | None,
        typer.Option(
            help="Memory GB/s of one GPU. Unset: that of --gpu; with --gpu-tflops memory never "
            "limits.",
            min=0.001,
        ),
    ] = None,
    efficiency: Annotated[
        float, typer.Option(help="Share of the GPU's peaks that is reached.", min=0.001, max=1)
    ] = 1.0,
    link_gbps: Annotated[
        list[float] | None,
        typer.Option(
            help="Gbit/s between the two models; repeat it to compare.",
            min=0.001,
            show_default="400 and 100",
        ),
    ] = None,
    overhead_ms: Annotated[
        float,
        typer.Option(help="Fixed cost of a handoff beyond that of a re-prefill.", min=0),
    ] = _OVERHEAD_MS,
    escalation: Annotated[
        float, typer.Option(help="Share of prompts that go on to the target.", min=0, max=1)
    ] = 0.3,
    support: Annotated[
        str, typer.Option(help="`full`, `head_local` or `both`: what a target head is mapped from.")
    ] = "both",
    k: Annotated[
        int | None,
        typer.Option(
            "-k",
            "--k",
            help="Source layers per target layer. Unset: the paper's for its pairs, else 8.",
            min=1,
        ),
    ] = None,
    models: Annotated[
        int, typer.Option(help="Models of a fleet with a mapper for every directed pair.", min=2)
    ] = 3,
    average_pair_gb: Annotated[
        float | None,
        typer.Option(help="Mean GB of a fleet's mappers. Unset: this pair's size.", min=0),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw time by prompt length to this .png or .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    simulate: fleet.Simulate = False,
    rate: fleet.Rate = None,
    saturate: fleet.Saturate = False,
    variants: fleet.Variants = None,
    seconds: fleet.Seconds = 60.0,
    seed: fleet.Seed = 0,
    burstiness: fleet.Burstiness = 1.0,
    prompt_tokens: fleet.PromptTokens = "1000,4000",
    answer_tokens: fleet.AnswerTokens = "200,800",
    escalate_after: fleet.EscalateAfter = "32,128",
    lengths_file: fleet.LengthsFile = None,
    max_tokens: fleet.MaxTokens = 32_768,
    small_replicas: fleet.SmallReplicas = None,
    large_replicas: fleet.LargeReplicas = None,
    mapper_replicas: fleet.MapperReplicas = None,
    all_large_replicas: fleet.AllLargeReplicas = None,
    small_gpus: fleet.SmallGpus = None,
    large_gpus: fleet.LargeGpus = None,
    mapper_gpus: fleet.MapperGpus = None,
    gpu_memory_gb: fleet.GpuMemoryGb = None,
    mapper_at: fleet.MapperAt = "apart",
    link_latency_ms: fleet.LinkLatencyMs = 0.0,
    chunk_tokens: fleet.ChunkTokens = None,
    read_ahead: fleet.ReadAhead = True,
    step_tokens: fleet.StepTokens = None,
    max_seqs: fleet.MaxSeqs = None,
    lease_s: fleet.LeaseS = None,
    first_token_s: fleet.FirstTokenS = 2.0,
    tpot_ms: fleet.TpotMs = 50.0,
    price: fleet.Price = 3.0,
    measured: fleet.MeasuredFiles = None,
) -> None:
    """Size a mapper and a handoff from two models' shapes, before anything is downloaded.

    Reads config.json files or the built-in catalog only: no weights, no GPU. Times are rooflines,
    which real systems approach from above; --efficiency scales them. With --simulate it sizes a
    fleet under load instead, on the same costs, for the first --link-gbps.
    """
    from cluster.catalog import architecture, catalog
    from cluster.plan_pair import make_plan
    from cluster.plan_report import Scenario

    name, tflops, memory_gb_s = _hardware(gpu, gpu_tflops, gpu_memory_gb_s)
    scenario = Scenario(
        tokens=tokens,
        gpus=gpus,
        gpu_name=name,
        gpu_tflops=tflops,
        gpu_memory_gb_s=memory_gb_s,
        efficiency=efficiency,
        links_gbps=tuple(dict.fromkeys(link_gbps or _LINKS_GBPS)),
        overhead_ms=overhead_ms,
        escalation=escalation,
        models=models,
        average_pair_gb=average_pair_gb,
    )
    supports = _supports(support)
    if simulate or measured:
        known_gb = catalog().gpu(name).memory_gb if name is not None else None
        _simulate(context, scenario, known_gb if gpu_memory_gb is None else gpu_memory_gb, supports)
        return
    _refuse_fleet_options(context)
    report = make_plan(architecture(source), architecture(target), scenario, supports=supports, k=k)
    if plot is not None:
        from cluster.plan_plot import save_plot

        save_plot(report, plot)
        typer.echo(f"plot in {plot}", err=True)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        from cluster.plan_tables import print_plan

        print_plan(report)


def _simulate(
    context: typer.Context,
    scenario: Scenario,
    gpu_memory_gb: float | None,
    supports: tuple[Support, ...],
) -> None:
    """Simulate what the command's parameters say, or compare it with measurements."""
    from rich.console import Console

    from cluster.catalog import architecture
    from cluster.plan_plot import check_plot_path
    from cluster.simulate_sweep import Sweep
    from cluster.simulate_tables import print_simulation

    given = context.params
    pair = architecture(given["source"]), architecture(given["target"])
    setup = fleet.make_setup(given, *pair, scenario, gpu_memory_gb, supports[0])
    if given["measured"]:
        _compare(setup, given["measured"], given["as_json"])
        return
    plot: Path | None = given["plot"]
    if plot is not None:
        check_plot_path(plot)
    variants = fleet.chosen_variants(given["variants"])
    fixed = fleet.fixed_replicas(given)
    sweep = Sweep(setup, fleet.targets(given), given["price"], Console(stderr=True))
    rates = given["rate"] or [_RATE]
    report = sweep.run(variants, rates, fixed, saturate=given["saturate"])
    if plot is not None:
        from cluster.simulate_plot import save_simulation_plot

        save_simulation_plot(report, plot)
        typer.echo(f"plot in {plot}", err=True)
    if given["as_json"]:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_simulation(report)


def _compare(setup: Setup, paths: list[Path], as_json: bool) -> None:
    from cluster.simulate_measured import compare
    from cluster.simulate_runs import read_cases
    from cluster.simulate_tables import print_compared

    rows = compare(read_cases(paths, setup))
    if as_json:
        typer.echo(json.dumps([row.model_dump(mode="json") for row in rows], indent=2))
    else:
        print_compared(rows)


def _refuse_fleet_options(context: typer.Context) -> None:
    """ConfigError for an option that means nothing without --simulate."""
    from cluster.errors import ConfigError

    for one in context.command.params:
        given_in = context.get_parameter_source(one.name or "")
        is_given = given_in is not None and given_in.name == "COMMANDLINE"
        if is_given and getattr(one, "rich_help_panel", None) == fleet.PANEL:
            raise ConfigError(f"{one.opts[0]} is about a fleet; add --simulate")


def _hardware(
    gpu: str | None, tflops: float | None, memory_gb_s: float | None
) -> tuple[str | None, float, float | None]:
    """Name, TFLOP/s and memory GB/s of one GPU; ConfigError when named in two ways."""
    from cluster.catalog import catalog
    from cluster.errors import ConfigError

    if tflops is not None:
        if gpu is not None:
            raise ConfigError("--gpu and --gpu-tflops name two GPUs; give one of them")
        return None, tflops, memory_gb_s
    known = catalog().gpu(gpu or _DEFAULT_GPU)
    return known.name, known.tflops, known.memory_gb_s if memory_gb_s is None else memory_gb_s


def _supports(value: str) -> tuple[Support, ...]:
    from cluster.errors import ConfigError

    choices: dict[str, tuple[Support, ...]] = {
        "full": ("full",),
        "head_local": ("head_local",),
        "both": ("full", "head_local"),
    }
    if value not in choices:
        raise ConfigError(f"support {value!r}: choose `full`, `head_local` or `both`")
    return choices[value]
