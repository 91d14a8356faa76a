"""The command `kvcascade validate-pair`: a pair of models and their mappers, judged in depth.

Like `cluster.cli`, it imports what is heavy only when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli_mapper import (
    DeviceOption,
    HeldoutTextOption,
    JsonOption,
    MapperOption,
    SourceOption,
    SuffixOption,
    TargetOption,
)

if TYPE_CHECKING:
    from mappers.judging.report import DirectionReport, DriftReport

_EXIT_REFUSED = 3


def validate_pair(
    mapper: MapperOption = "quickstart",
    source: SourceOption = "small",
    target: TargetOption = "large",
    reverse: Annotated[
        str | None,
        typer.Option(help="Folder of the mapper from target to source. Needed for handoffs back."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Held-out tokens to read. Unset: 16 windows.", min=1),
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of mapped prefix, and as many scored after it. Unset: 1024, or less for "
            "small models.",
            min=2,
        ),
    ] = None,
    native_suffix_tokens: SuffixOption = 1,
    text: HeldoutTextOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and report.json. Unset: <mapper>-report."),
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Judge a pair of models in depth, with every control, and write one page about it.

    The verdict and the bounds it was held to go into the mapper's manifest.json; serving refuses
    a mapper that is judged `refuse`. Ends with 0 when every direction is accepted, else with 3.
    """
    from rich.console import Console

    from cluster import judging
    from cluster.cli_mapper import print_score

    report, folder = judging.validate_pair(
        source,
        target,
        mapper,
        reverse=reverse,
        tokens=tokens,
        prefix_tokens=prefix_tokens,
        native_suffix_tokens=native_suffix_tokens,
        text=text,
        out=out,
        device=device,
        console=Console(stderr=True),
    )
    directions = [report.forward] + ([report.reverse] if report.reverse else [])
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        for direction in directions:
            typer.echo(f"{direction.source} to {direction.target}")
            print_score(direction.score)
            _print_generation(direction)
            for caution in direction.cautions:
                typer.echo(f"caution: {caution}")
        if report.drift is not None:
            _print_drift(report.drift)
        for note in report.notes:
            typer.echo(note)
        typer.echo(f"report: {folder / judging.PAGE_FILE}")
    if any(direction.score.verdict == "refuse" for direction in directions):
        raise typer.Exit(_EXIT_REFUSED)


def _print_drift(drift: DriftReport) -> None:
    typer.echo(f"KL to native over {len(drift.kept)} alternating handoffs:")
    for name, turns in (("own tokens kept", drift.kept), ("all mapped anew", drift.remapped)):
        for owner in dict.fromkeys(turn.owner for turn in turns):
            of_owner = [f"{turn.kl_to_native:.3f}" for turn in turns if turn.owner == owner]
            typer.echo(f"  {name}, {owner}: {' '.join(of_owner)}")


def _print_generation(direction: DirectionReport) -> None:
    generation = direction.generation
    answers = ", ".join(f"{row.name} {row.correct}" for row in generation.rows)
    typer.echo(f"planted facts recalled, of {generation.rows[0].asked}: {answers}")
    typer.echo(
        f"greedy continuations share {generation.common_tokens:.1f} of "
        f"{generation.continuation_tokens} tokens with native before they part"
    )
