"""The command line `kvcascade`.

Each command parses its options, calls one function and prints the result. Whatever is heavy is
imported by the command that needs it, so that `kvcascade --help` answers at once. It does not
know how anything is done.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cluster.cli_calibrate import calibrate
from cluster.cli_chat import chat
from cluster.cli_links import links
from cluster.cli_mapper import fit, score
from cluster.cli_plan import plan
from cluster.cli_replay import replay
from cluster.cli_status import status, top
from cluster.cli_validate_pair import validate_pair
from cluster.errors import KvcascadeError, UserError

if TYPE_CHECKING:
    from rich.console import Console

QUICKSTART_CONFIG = Path(__file__).with_name("quickstart.yaml")

_EXIT_USER = 2
_EXIT_FAILED = 1


class _Commands(TyperGroup):
    """Turns the project's own errors into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvcascadeError as error:
            typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
            typer.echo(str(error), err=True)
            code = _EXIT_USER if isinstance(error, UserError) else _EXIT_FAILED
            raise typer.Exit(code) from None


app = typer.Typer(
    cls=_Commands,
    help=(
        "A small and a large language model behind one endpoint. The large one takes over from "
        "the small one's KV cache, converted on the way."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(fit)
app.command()(score)
app.command()(plan)
app.command()(links)
app.command()(validate_pair)
app.command()(calibrate)
app.command()(replay)
app.command()(chat)
app.command()(status)
app.command()(top)

PortOption = Annotated[
    int | None, typer.Option(help="HTTP port instead of the file's.", min=1, max=65535)
]
ConfigArgument = Annotated[
    Path, typer.Argument(help="A Serve config file.", show_default="cluster/quickstart.yaml")
]


def _console() -> Console:
    """For progress: on stderr, so that stdout holds results alone."""
    from rich.console import Console

    return Console(stderr=True)


@app.command()
def models(
    back: Annotated[
        bool, typer.Option("--back", help="Also the mapper from the large to the small model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the folders as JSON.")] = False,
) -> None:
    """Prepare the quickstart pair and its mapper; what is there already stays."""
    from cluster.fitting import prepare_quickstart

    folders = prepare_quickstart(_console(), back=back)
    if as_json:
        typer.echo(json.dumps({name: str(folder) for name, folder in folders.items()}))
        return
    for name, folder in folders.items():
        typer.echo(f"{name:12}{folder}")


@app.command()
def validate(
    config: Annotated[Path, typer.Argument(help="A Serve config file, as ray_config.yaml.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail when something could not be checked.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check a config file and its pair of models. Needs no GPU and starts nothing.

    Ends with 0 when nothing is wrong, with 2 when there is a problem, and with 3 when `--strict`
    is given and a check was not possible.
    """
    from dataclasses import asdict

    from cluster.validate import validate as findings_of

    findings = findings_of(config)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        signs = {"ok": ("ok", "green"), "problem": ("PROBLEM", "red"), "unchecked": ("?", "yellow")}
        for finding in findings:
            sign, colour = signs[finding.level]
            typer.secho(f"{sign:8}", fg=colour, nl=False)
            typer.echo(f"{finding.key}: {finding.text}")
    levels = [finding.level for finding in findings]
    problems, unchecked = levels.count("problem"), levels.count("unchecked")
    if not as_json:
        typer.echo(f"problems: {problems}; checks not possible on this machine: {unchecked}")
    if problems:
        raise typer.Exit(_EXIT_USER)
    if unchecked and strict:
        raise typer.Exit(3)


@app.command()
def serve(
    config: ConfigArgument = QUICKSTART_CONFIG,
    address: Annotated[
        str,
        typer.Option(help="Ray cluster to deploy to: `auto` or host:port. Unset: start one here."),
    ] = "local",
    port: PortOption = None,
) -> None:
    """Deploy a config file and serve until Ctrl-C."""
    from cluster import local
    from cluster.config import load_serve_config

    document, cascade = load_serve_config(config)
    if port is not None:
        document.setdefault("http_options", {})["port"] = port
    console = _console()
    with console.status("starting Ray") as status:
        local.start_local_ray(address=address)
        status.update("deploying")
        url = local.deploy(document, progress=lambda states: status.update(_states(states)))
    typer.echo(f"\n{cascade.cascade_name} answers at {url}/v1   (Ctrl-C ends it)\n")
    typer.echo(curl_line(url, cascade.cascade_name))
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        with console.status("stopping"):
            local.stop()


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on serving after the demonstration, until Ctrl-C.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="HTTP port. Unset: 8000, or a free one.", min=1, max=65535),
    ] = None,
) -> None:
    """Run the whole cascade on this machine and show an answer that changes models half-way.

    Ends with 0 only when every handoff was one and was faster than reading again.
    """
    from cluster.demo import run_demo

    raise typer.Exit(run_demo(keep=keep, json_path=json_path, port=port))


def curl_line(url: str, model: str) -> str:
    """A shell command that asks the endpoint a question."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Who are you?"}]})
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def _states(states: dict[str, str]) -> str:
    return "deploying: " + ", ".join(f"{name} {state.lower()}" for name, state in states.items())
