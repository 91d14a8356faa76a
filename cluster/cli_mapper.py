"""The commands of `kvcascade` that make and judge mappers.

Like `cluster.cli`, it imports what is heavy only when a command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mappers.judging.records import ScoreReport

SourceOption = Annotated[
    str,
    typer.Option(help="Model that reads the prompt: a folder, a hub repository, or `small`."),
]
TargetOption = Annotated[
    str,
    typer.Option(help="Model that takes over: a folder, a hub repository, or `large`."),
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        help="Your own text: .jsonl with a `text` in every line, or plain text. Unset: the text "
        "that comes with the quickstart pair."
    ),
]
MapperOption = Annotated[
    str, typer.Option(help="Folder of the mapper, `quickstart` or `identity`.")
]
HeldoutTextOption = Annotated[
    Path | None,
    typer.Option(help="Held-out text, .jsonl or plain. Unset: the quickstart pair's."),
]
DeviceOption = Annotated[str, typer.Option(help="Torch device, as `cuda:0`.")]
SuffixOption = Annotated[
    int,
    typer.Option(
        help="Last tokens of a prefix that the target reads itself, as "
        "`handoff.native_suffix_tokens` in serving.",
        min=1,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def fit(
    out: Annotated[Path, typer.Option(help="Folder to write the mapper to.")],
    source: SourceOption = "small",
    target: TargetOption = "large",
    k: Annotated[
        int, typer.Option(help="Source layers that every target layer is mapped from.", min=1)
    ] = 8,
    support: Annotated[
        str,
        typer.Option(help="`full`: from all KV heads; `head_local`: from the matching head only."),
    ] = "full",
    tokens: Annotated[int, typer.Option(help="Calibration tokens to read.", min=1)] = 32_768,
    ridge_lambda: Annotated[
        float, typer.Option(help="Ridge penalty after centring, absolute.", min=0)
    ] = 0.01,
    relative_lambda: Annotated[
        bool,
        typer.Option(
            "--relative-lambda", help="Take --ridge-lambda as a share of the mean variance."
        ),
    ] = False,
    selection: Annotated[
        str,
        typer.Option(
            help="`top`: the source layers that explain most, each alone; `greedy`: one after the "
            "other, each what is left."
        ),
    ] = "top",
    attention_weights: Annotated[
        bool,
        typer.Option(
            "--attention-weights",
            help="Weight tokens by what the target's attention reads of them; reads twice.",
        ),
    ] = False,
    attention_power: Annotated[
        float,
        typer.Option(
            help="Power of those weights: 1 as published, less spreads them over more tokens.",
            min=0.01,
            max=1,
        ),
    ] = 0.5,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Try every k and both supports, and write the best."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Image file to draw the sweep's curves into.")
    ] = None,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback",
            help="If the linear map is refused, train networks on top of it and keep them if they "
            "are accepted. Takes long.",
        ),
    ] = False,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Load one model after the other, the source's cache on disk between. Chosen by "
            "itself where both do not fit into memory.",
        ),
    ] = False,
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of checkpoints, from which a rerun goes on. Unset: OUT.work."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="Read one share of the text only, as `2/4`, and leave it in --work."),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Finish from this many shares in --work.", min=1)
    ] = None,
    text: TextOption = None,
    heldout: Annotated[
        Path | None,
        typer.Option(help="Text to judge on. Unset: the last tenth of --text is kept for it."),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Fit a mapper from one model's KV cache to another's, and judge it on held-out text.

    The folder's manifest.json records both models, the data and the scores; serving refuses a
    mapper that was made for other models or that failed its test.
    """
    from rich.console import Console

    from cluster.errors import MapperError
    from cluster.fitting import fit_pair, fit_pair_shard, fit_settings

    if plot is not None and not sweep:
        raise MapperError("--plot draws what --sweep tries; give both")
    settings = fit_settings(
        k=k,
        support=support,
        tokens=tokens,
        ridge_lambda=ridge_lambda,
        relative_lambda=relative_lambda,
        selection=selection,
        attention_weights=attention_weights,
        attention_power=attention_power,
        sweep=sweep,
        fallback=fallback,
    )
    where: dict[str, Any] = {
        "text": text,
        "heldout": heldout,
        "device": device,
        "sequential": sequential or None,
        "work": work,
        "console": Console(stderr=True),
    }
    if shard is not None:
        typer.echo(fit_pair_shard(source, target, out, settings, shard, **where))
        return
    report = fit_pair(source, target, out, settings, shards=shards, **where)
    if report.sweep is not None and plot is not None:
        from mappers.fitting.sweep import plot_sweep

        plot_sweep(report.sweep, plot)
    manifest = report.manifest
    if as_json:
        typer.echo(manifest.model_dump_json(indent=2))
        return
    if report.sweep is not None:
        from cluster.sweep_table import print_sweep

        print_sweep(report.sweep, Console())
    stages = ", ".join(f"{name} {spent_s:.1f} s" for name, spent_s in report.seconds.items())
    typer.echo(f"mapper {report.mapper_id} in {report.folder}")
    typer.echo(f"{report.parameters / 1e6:.1f} M parameters; {stages}")
    typer.echo(
        f"held-out R2: keys {manifest.heldout_r2.mean_k:.3f}, "
        f"values {manifest.heldout_r2.mean_v:.3f}"
    )
    if manifest.score is None:
        typer.echo("not judged: both models do not fit into memory; run `kvcascade score`")
    else:
        print_score(manifest.score)
        if manifest.score.verdict == "refuse":
            typer.echo(
                "try more --tokens, --support head_local, --attention-weights or --fallback; "
                "`kvcascade validate-pair` shows where it fails"
            )


def score(
    mapper: MapperOption = "quickstart",
    source: SourceOption = "small",
    target: TargetOption = "large",
    text: HeldoutTextOption = None,
    tokens: Annotated[int, typer.Option(help="Held-out tokens to read.", min=1)] = 8_192,
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens before and after which every window is cut.", min=2)
    ] = 256,
    native_suffix_tokens: SuffixOption = 1,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure what a mapper costs in quality: the large model going on from a mapped cache.

    Beside the mapped cache stand its controls: the target's own cache, another text's, a random
    mapper's, the source's unmapped, no cache, and the source alone.
    """
    from rich.console import Console

    from cluster.fitting import score_pair

    report = score_pair(
        source,
        target,
        mapper,
        text=text,
        tokens=tokens,
        prefix_tokens=prefix_tokens,
        native_suffix_tokens=native_suffix_tokens,
        device=device,
        console=Console(stderr=True),
    )
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_score(report)


def print_score(report: ScoreReport) -> None:
    """The rows of a score as a table, and the verdict, on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report.windows} held-out windows: {report.prefix_tokens} tokens of prefix, the "
        "last "
        f"{report.native_suffix_tokens} read natively, then {report.scored_tokens} scored"
    )
    table.add_column("cache of the target")
    for name in ("perplexity", "KL to native", "top-1 agreement", "attention cosine"):
        table.add_column(name, justify="right")
    for row in report.rows:
        cosine = "" if row.attention_cosine is None else f"{row.attention_cosine:.3f}"
        table.add_row(
            row.name,
            f"{row.perplexity:,.1f}",
            f"{row.kl_to_native:.3f}",
            f"{row.top1_agreement:.2f}",
            cosine,
        )
    console = Console()
    console.print(table)
    if report.recovered_gap is not None:
        console.print(
            f"The mapped cache closes {report.recovered_gap:.0%} of the gap between no cache "
            "and native."
        )
    console.print(f"verdict: {report.verdict}")
    for reason in report.reasons:
        console.print(f"  {reason}")
