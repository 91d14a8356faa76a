"""What an idle cascade costs: the CPU share of each of its processes, by role, from /proc.

`python bench/idle.py` watches the Ray cluster that runs on this machine; with `--deploy` it starts
the quickstart cascade, has it do one handoff, lets it rest and watches that. Ends with 1 when a
process is above the limit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

PROC = Path("/proc")
REST_S = 30.0

_PARTS = {
    "gcs_server": "Ray: control store",
    "raylet": "Ray: raylet",
    "dashboard.py": "Ray: dashboard head",
    "log_monitor.py": "Ray: log monitor",
    "monitor.py": "Ray: autoscaler",
}


@dataclass(frozen=True)
class Process:
    """One process of the cluster, when it was looked at. `cpu_s` is user plus system time."""

    pid: int
    parent: int
    command: str
    cpu_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Share:
    """What one process used over the interval, in percent of one core."""

    role: str
    pid: int
    cpu_percent: float
    memory_bytes: int


def processes(proc: Path = PROC) -> dict[int, Process]:
    """All processes of this machine that can be looked at."""
    found = {}
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            stat = (folder / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or is another user's
        # The name in parentheses may hold spaces; what follows it may not.
        fields = stat[stat.rindex(")") + 2 :].split()
        found[int(folder.name)] = Process(
            pid=int(folder.name),
            parent=int(fields[1]),
            command=command,
            cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
            memory_bytes=int(fields[21]) * page,
        )
    return found


def cluster_of(everything: dict[int, Process], raylet: int | None) -> list[Process]:
    """The processes of one Ray cluster's node: what the raylet started, and its siblings.

    Raises typer.BadParameter when there is no cluster, or more than one and none was named.
    """
    raylets = [p.pid for p in everything.values() if _program(p.command) == "raylet"]
    if raylet is None:
        if len(raylets) != 1:
            raise typer.BadParameter(
                "no Ray cluster runs on this machine; use --deploy"
                if not raylets
                else f"several raylets run on this machine ({raylets}); name one with --raylet"
            )
        raylet = raylets[0]
    if raylet not in everything:
        raise typer.BadParameter(f"--raylet {raylet}: no such process")
    # Ray's own processes share the session's folder in their arguments.
    session = next(part for part in everything[raylet].command.split("/") if "session_" in part)
    return [
        process
        for process in everything.values()
        if raylet in _ancestors(process, everything)
        or (session in process.command and _program(process.command) in _PARTS)
    ]


def role_of(process: Process, everything: dict[int, Process]) -> str:
    """What a process is for, in the cascade's words."""
    title = process.command
    if title.startswith("ray::ServeReplica:"):
        return f"{title.split(':')[4].split('.')[0]}: replica"
    for pid in _ancestors(process, everything)[1:]:
        if pid in everything and everything[pid].command.startswith("ray::ServeReplica:"):
            name = everything[pid].command.split(":")[4].split(".")[0]
            part = "resource tracker" if "resource_tracker" in title else title
            return f"{name}: {part.removeprefix('VLLM::')}"
    if title.startswith("ray::"):
        return f"Ray: {title.removeprefix('ray::').split('.')[0]}"
    return _PARTS.get(_program(title), title[:40])


def shares(
    before: dict[int, Process], after: dict[int, Process], elapsed_s: float, raylet: int | None
) -> list[Share]:
    """CPU use of the cluster's processes between two looks; the busiest first."""
    found = [
        Share(
            role=role_of(process, after),
            pid=process.pid,
            cpu_percent=100.0 * (process.cpu_s - before[process.pid].cpu_s) / elapsed_s,
            memory_bytes=process.memory_bytes,
        )
        for process in cluster_of(after, raylet)
        if process.pid in before
    ]
    return sorted(found, key=lambda share: share.cpu_percent, reverse=True)


def _program(command: str) -> str:
    """The name of the program or Python script that a command line runs."""
    words = command.split()
    scripts = [word for word in words[1:4] if word.endswith(".py")]
    return Path(scripts[0] if scripts else words[0]).name if words else ""


def _ancestors(process: Process, everything: dict[int, Process]) -> list[int]:
    """The process itself, its parent and so on."""
    line = [process.pid]
    while (parent := everything[line[-1]].parent) in everything:
        line.append(parent)
    return line


@contextmanager
def deployed(console: Console) -> Iterator[None]:
    """The quickstart cascade after one handoff, resting."""
    from cluster import local
    from cluster.cli import QUICKSTART_CONFIG
    from cluster.config import load_serve_config
    from cluster.demo import choose_port
    from cluster.demo_client import ask, connect
    from cluster.fitting import prepare_quickstart

    document, cascade = load_serve_config(QUICKSTART_CONFIG)
    choose_port(document, None, console)
    prepare_quickstart(console)
    try:
        with console.status("deploying"):
            local.start_local_ray()
            url = local.deploy(document)
        text = "Say what these numbers are. " + " ".join(str(number) for number in range(200))
        ask(
            connect(url),
            cascade.cascade_name,
            [{"role": "user", "content": text}],
            max_tokens=12,
            min_tokens=12,
            cascade={"escalate_after_tokens": 8},
        )
        for _ in track(range(int(REST_S)), "resting", console=console, transient=True):
            time.sleep(1.0)
        yield
    finally:
        with console.status("stopping"):
            local.stop()


def watch(seconds: float, raylet: int | None, console: Console) -> list[Share]:
    """The shares of a running cluster over `seconds`."""
    cluster_of(processes(), raylet)
    started, before = time.monotonic(), processes()
    for _ in track(range(int(seconds)), "watching", console=console, transient=True):
        time.sleep(1.0)
    return shares(before, processes(), time.monotonic() - started, raylet)


def main(
    seconds: Annotated[float, typer.Option(help="How long to watch.", min=1)] = 20.0,
    limit: Annotated[float, typer.Option(help="Percent of a core that is allowed.")] = 5.0,
    deploy: Annotated[bool, typer.Option("--deploy", help="Start the quickstart first.")] = False,
    raylet: Annotated[int | None, typer.Option(help="Process id of the node's raylet.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
) -> None:
    """Show what each process of an idle cascade uses."""
    console = Console(highlight=False)
    if deploy:
        with deployed(console):
            found = watch(seconds, raylet, console)
    else:
        found = watch(seconds, raylet, console)
    table = Table(title=f"An idle cascade over {seconds:.0f} s")
    for name, justify in (("process", "left"), ("CPU, % of a core", "right"), ("MiB", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for share in found:
        style = "red" if share.cpu_percent >= limit else ""
        table.add_row(
            share.role,
            f"{share.cpu_percent:.1f}",
            f"{share.memory_bytes / 2**20:,.0f}",
            style=style,
        )
    total = sum(share.cpu_percent for share in found)
    console.print(table)
    over = [share for share in found if share.cpu_percent >= limit]
    console.print(
        f"together {total:.1f} % of a core; {len(over)} of {len(found)} processes at {limit:.0f} % "
        "or more"
    )
    if json_path is not None:
        content: dict[str, Any] = {
            "seconds": seconds,
            "total_percent": total,
            "processes": [asdict(share) for share in found],
        }
        json_path.write_text(json.dumps(content, indent=2) + "\n")
    raise typer.Exit(1 if over or not found else 0)


if __name__ == "__main__":
    typer.run(main)
