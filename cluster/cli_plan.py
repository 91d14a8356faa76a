"""`kvcascade plan`: its options. Arithmetic is in `cluster.plan`, tables in `cluster.plan_tables`.

Like `cluster.cli`, it imports what is heavy only when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mappers.manifest import Support

# What a handoff adds to a re-prefill at any length: messages, admission, kernel launches. The
# messages took 22 ms on two CPU cores; arXiv 2608.03893 (App. G) needs 14 ms for 64 tokens.
_OVERHEAD_MS = 20.0
_DEFAULT_GPU = "A100"
_LINKS_GBPS = [400.0, 100.0]


def plan(
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
) -> None:
    """Size a mapper and a handoff from two models' shapes, before anything is downloaded.

    Reads config.json files or the built-in catalog only: no weights, no GPU. Times are rooflines,
    which real systems approach from above; --efficiency scales them.
    """
    from cluster.catalog import architecture
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
