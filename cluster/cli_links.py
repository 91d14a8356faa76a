"""`kvcascade links`: options and the table. Like `cluster.cli`, it imports late what is heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def links(
    config: Annotated[Path, typer.Argument(help="A Serve config file, as ray_config.yaml.")],
    address: Annotated[
        str, typer.Option(help="Ray cluster with the file's nodes: `auto` or host:port.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Write the file that `mapper.links` takes.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the file instead of the table.")
    ] = False,
) -> None:
    """Measure what NIXL reaches between the nodes of both engines and the mapper's own.

    Says where `place: auto` puts a mapper by it. Takes a minute and fills the links meanwhile.
    """
    from rich.console import Console
    from rich.table import Table

    from cluster import local
    from cluster.config import load_serve_config
    from cluster.links import rows
    from cluster.links_probe import measure_links
    from cluster.place import automatic_place

    _, cascade = load_serve_config(config)
    console = Console(stderr=True)
    with console.status("joining the cluster") as status:
        local.start_local_ray(address=address)
        found = measure_links(cascade, progress=status.update)
    text = found.model_dump_json(indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
        return
    table = Table()
    shown = rows(found)
    for column in shown[0]:
        table.add_column(column, justify="left" if column in ("mapper at", "engine") else "right")
    for row in shown:
        table.add_row(*row.values())
    Console().print(table)
    for back in (False, True) if cascade.mapper.large_to_small else (False,):
        choice = automatic_place(cascade, found, back=back)
        key = "place_back" if back else "place"
        typer.echo(f"mapper.{key}: auto is `{choice.at}`: {choice.reason}")
