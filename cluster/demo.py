"""`kvcascade demo`: the quickstart cascade on this machine, shown with real requests.

It prepares the pair, deploys `quickstart.yaml` on a Ray cluster of its own, has `demo_scenes.py`
ask and measure, and says whether everything was as promised.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import local
from cluster.cli import QUICKSTART_CONFIG, curl_line
from cluster.demo_client import connect
from cluster.demo_findings import Findings, machine
from cluster.demo_scenes import Conversations, Scenes
from cluster.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_DEPLOY_TIMEOUT_S = 600.0

# A conversation ends at most 30 tokens short of what is asked for.
_MARGIN_TOKENS = 60


def run_demo(*, keep: bool, json_path: Path | None, port: int | None = None) -> int:
    """Show the cascade; return the exit code: 0 when all went as promised, 1 when it did not.

    `port` replaces the configuration's HTTP port; without it a free one is taken when that is
    busy. Raises ConfigError before anything is started, and EngineError when the cascade does not
    come up. Whatever was started is stopped again, with `keep` only after Ctrl-C.
    """
    from rich.console import Console

    from cluster.config import load_serve_config
    from cluster.fitting import prepare_quickstart

    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"--json {json_path}: the folder does not exist; make it first")
    console = Console(highlight=False)
    document, cascade = load_serve_config(QUICKSTART_CONFIG)
    choose_port(document, port, console)
    found = Findings(started=datetime.now(UTC).isoformat(timespec="seconds"), machine=machine())
    introduce(found.machine, console)
    served = False
    try:
        with _timed(found, "prepare"):
            folders = prepare_quickstart(console)
            talks = conversations(folders["large"])
        try:
            url = _deploy(document, found, console)
            try:
                with _timed(found, "scenes"):
                    Scenes(connect(url), cascade.cascade_name, talks, found, console).play()
            except EngineError as error:
                found.error = str(error)
            served = True
            conclude(found, console)
            if json_path is not None:
                json_path.write_text(json.dumps(found.as_json(), indent=2) + "\n")
                console.print(f"The numbers are in {json_path}.")
            _say_where(url, cascade.cascade_name, keep, console)
            while keep:
                time.sleep(3600)
        finally:
            with console.status("stopping everything"):
                local.stop()
    except KeyboardInterrupt:
        console.print("\nstopped")
        if not (keep and served):
            return EXIT_INTERRUPTED
    return EXIT_FAILED if found.problems else 0


def choose_port(document: dict[str, Any], port: int | None, console: Console) -> None:
    """Put a port that nobody listens on into the Serve config `document`.

    Raises ConfigError when the `port` that was asked for is taken.
    """
    options = document.setdefault("http_options", {})
    host = options.get("host", "127.0.0.1")
    wanted = port or options.get("port", 8000)
    with socket.socket() as probe:
        # As the server does: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            if port is not None:
                raise ConfigError(
                    f"port {port} on {host} is not free ({error.strerror}); choose another --port"
                ) from None
            probe.bind((host, 0))
            console.print(f"Port {wanted} is taken; using {probe.getsockname()[1]}.")
        options["port"] = probe.getsockname()[1]


def introduce(about: dict[str, Any], console: Console) -> None:
    """Where this runs, and a warning when other work would spoil the numbers."""
    console.print(
        f"[bold]kvcascade[/] on {about['cpu']}, {about['cores']} cores, "
        f"{about['memory_bytes'] / 2**30:.0f} GiB"
    )
    load = about["load_average_1min"]
    if load > about["cores"]:
        console.print(
            f"[yellow]This machine is busy (load {load:.1f} on {about['cores']} cores): "
            "all times below will be longer than on a quiet one.[/]"
        )


def conversations(model: Path) -> Conversations:
    """Long held-out conversations, counted with the tokenizer of the model in a folder.

    Every (length, repetition) is a conversation of its own, the same one in every demonstration.
    """
    from transformers import PreTrainedTokenizerFast

    from cluster.quickstart.text import long_conversation_messages

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model))

    def talk(tokens: int, repetition: int) -> list[dict[str, str]]:
        return long_conversation_messages(
            tokens + _MARGIN_TOKENS, tokenizer, seed=100 * tokens + repetition
        )

    return talk


def conclude(found: Findings, console: Console) -> None:
    """One line when everything held, else what did not."""
    console.print()
    if not found.problems:
        console.print("[bold green]Everything went as promised.[/]")
        return
    console.print("[bold red]This did not go as promised:[/]")
    for problem in found.problems:
        console.print(f"  {problem}", markup=False)


def _deploy(document: dict[str, Any], found: Findings, console: Console) -> str:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        ray = progress.add_task("Ray", total=1)
        with _timed(found, "ray"):
            local.start_local_ray()
        progress.update(ray, completed=1)
        tasks = {}

        def show(states: dict[str, str]) -> None:
            for name, state in states.items():
                if name not in tasks:
                    tasks[name] = progress.add_task(name, total=1)
                done = 1 if state == "HEALTHY" else 0
                progress.update(tasks[name], completed=done, description=f"{name} {state.lower()}")

        with _timed(found, "deploy"):
            return local.deploy(document, progress=show, timeout_s=_DEPLOY_TIMEOUT_S)


def _say_where(url: str, model: str, keep: bool, console: Console) -> None:
    if keep:
        console.print(f"\n{model} goes on answering at {url}/v1   (Ctrl-C ends it)\n")
    else:
        console.print(f"\nWith --keep the endpoint goes on answering, at {url}/v1. Try then:\n")
    console.print(curl_line(url, model), soft_wrap=True, markup=False)


@contextmanager
def _timed(found: Findings, name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        found.seconds[name] = round(time.monotonic() - started, 1)
