"""How an overview looks: one table with a row per replica, and a line of totals below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cluster.status import Overview

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {"HEALTHY": "green", "UNHEALTHY": "red", "DEPLOY_FAILED": "red"}
_NODE_CHARACTERS = 8


def print_overview(console: Console, overview: Overview) -> None:
    """The table, the totals, and a line for each problem."""
    if overview.serve is not None:
        console.print(status_table(overview.serve))
    elif overview.health is not None:
        console.print(", ".join(f"{part}: {text}" for part, text in overview.health.items()))
    if overview.stats is not None:
        console.print(totals(overview.stats), highlight=False, soft_wrap=True)
    if overview.locked:
        console.print("for more, give a key with --api-key or KVCASCADE_API_KEY", highlight=False)
    for problem in overview.problems:
        console.print("PROBLEM ", style="red", end="")
        console.print(problem, markup=False, highlight=False, soft_wrap=True)
    if not overview.problems:
        console.print(f"healthy: {overview.url}", style="green", highlight=False)


def status_table(serve: Mapping[str, Any]) -> Table:
    """A row per described replica, or per deployment where none describes itself."""
    from rich import box
    from rich.table import Table

    title = f"{serve['application']}: {serve['status'].lower()}"
    table = Table(box=box.SIMPLE_HEAD, title=title, collapse_padding=True, pad_edge=False)
    for name in ("part", "state", "running", "node"):
        table.add_column(name, no_wrap=True)
    for name in ("used", "pinned", "loading", "free", "handoffs", "pool"):
        table.add_column(name, justify="right")
    for row in _rows(serve):
        table.add_row(*row)
    table.caption = "used to free: KV blocks. handoffs, pool: what a mapper works on and holds."
    return table


def _rows(serve: Mapping[str, Any]) -> Iterator[list[str]]:
    nodes = serve.get("nodes", {})
    for name, deployment in serve["deployments"].items():
        state = deployment.get("status", "unknown")
        style = _STYLES.get(state, "yellow")
        replicas = deployment.get("replicas", {})
        wanted = sum(replicas.values())
        head = [name, f"[{style}]{state.lower()}[/]", f"{replicas.get('RUNNING', 0)}/{wanted}"]
        for one in deployment.get("described") or [{}]:
            node = one.get("node_id")
            place = "-" if node is None else nodes.get(node, node[:_NODE_CHARACTERS])
            yield [*head, place, *_pool(one), *_work(one)]
            head = ["", "", ""]


def _pool(one: Mapping[str, Any]) -> list[str]:
    if "num_blocks" not in one:
        return ["-"] * 4
    # vLLM keeps one block for itself.
    used = one["num_blocks"] - 1 - one["free_blocks"]
    return [str(n) for n in (used, one["pinned_blocks"], one["loading_blocks"], one["free_blocks"])]


def _work(one: Mapping[str, Any]) -> list[str]:
    if "pool_in_use_bytes" not in one:
        return ["-"] * 2
    return [str(one["running"]), size(one["pool_in_use_bytes"])]


def totals(stats: Mapping[str, Any]) -> str:
    """The numbers of `/v1/cascade/stats` in one line."""
    handoffs = stats["handoffs"]
    counts = ", ".join(f"{number} {name}" for name, number in handoffs.items())
    refused = stats["refused_routing"]
    return (
        f"{stats['policy']}: {fraction(stats['realised_fraction'])} of {stats['requests']} answers "
        f"escalated, target {fraction(stats['target_fraction'])}; handoffs {counts}; "
        f"{stats['saved_prefill_s']:.1f} s of prefill saved"
        + ("" if refused is None else f"; a change of routing was refused: {refused}")
    )


def fraction(value: float | None) -> str:
    """A share in per cent, `-` when unknown."""
    return "-" if value is None else f"{value:.1%}"


def size(number: float) -> str:
    """Bytes with a decimal prefix, as networks count them."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"
