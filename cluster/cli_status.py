"""`kvcascade status` and `kvcascade top`: options, exit codes and the loop of the live view.

Like `cluster.cli`, it imports what is heavy only when a command runs.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

_DEFAULT_URL = "http://127.0.0.1:8000"
_EXIT_UNHEALTHY = 1

UrlOption = Annotated[str, typer.Option(help="Where the cascade answers.")]
KeyOption = Annotated[
    str | None, typer.Option(help="Sent as Bearer token.", envvar="KVCASCADE_API_KEY")
]


def status(
    url: UrlOption = _DEFAULT_URL,
    api_key: KeyOption = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to ask when the endpoint does not know its state: `auto` or "
            "host:port, on one of its nodes."
        ),
    ] = None,
    application: Annotated[
        str, typer.Option(help="Name of the application in the Serve config, for --ray-address.")
    ] = "cascade",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the table.")
    ] = False,
) -> None:
    """Show deployments, replicas, KV pools, mappers and handoffs of a running cascade.

    Ends with 0 when it is healthy and with 1 when it is not, or when nothing answers.
    """
    from cluster.status import overview

    found = overview(url, api_key=api_key, ray_address=ray_address, app=application)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        from rich.console import Console

        from cluster.status_view import print_overview

        print_overview(Console(), found)
    if found.problems:
        raise typer.Exit(_EXIT_UNHEALTHY)


def top(
    url: UrlOption = _DEFAULT_URL,
    api_key: KeyOption = None,
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between two looks.", min=0.2)
    ] = 5.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print what was counted since the start, and leave.")
    ] = False,
) -> None:
    """Watch handoffs per second, bytes per second and times of a running cascade until Ctrl-C."""
    from contextlib import suppress

    from rich.console import Console
    from rich.live import Live

    from cluster.status_endpoint import Endpoint
    from cluster.status_top import Top

    console, view = Console(), Top()
    with Endpoint(url, api_key=api_key) as endpoint:
        view.add(endpoint.metrics())
        frame = view.frame(endpoint.optional_json("/v1/cascade/stats"))
        if once:
            console.print(frame)
            return
        with suppress(KeyboardInterrupt), Live(frame, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                view.add(endpoint.metrics())
                frame = view.frame(endpoint.optional_json("/v1/cascade/stats"))
                live.update(frame, refresh=True)
