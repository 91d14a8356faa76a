"""`serve deploy` of changed configurations during long streams: what is cut, what waits.

`python bench/upgrade.py` serves the quickstart cascade on a Ray of its own, keeps streams of about
a minute running on both models and across them, and deploys one changed file after another: a
routing key, mappers alone, a key of the mapper with their number, keys of the engines, a key of the
router. Ends with 1 when a stream was cut or a request failed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.upgrade_runs import Upgrade, Wish, changed, hear_all, upgrade
from cluster import local
from cluster.cli import QUICKSTART_CONFIG
from cluster.config import load_serve_config
from cluster.demo_findings import machine
from cluster.fitting import prepare_quickstart

_PROBE_TOKENS = 128
_WARM_TOKENS = 8
_PORT = 8077

Document = Mapping[str, Any]


def _mappers(document: Document, replicas: int) -> dict[str, Any]:
    copy = changed(document)
    entries = copy["applications"][0]["deployments"]
    next(entry for entry in entries if entry["name"] == "mapper")["num_replicas"] = replicas
    return copy


def _live(document: Document, routing: dict[str, Any]) -> dict[str, Any]:
    copy = changed(document)
    router = {"name": "router", "user_config": {"routing": routing}}
    copy["applications"][0]["deployments"].append(router)
    return copy


CHANGES: dict[str, Callable[[Document], dict[str, Any]]] = {
    "routing": lambda document: changed(document, routing={"margin_threshold": 0.5}),
    "mappers": lambda document: _mappers(document, 2),
    "mapper": lambda document: _mappers(changed(document, mapper={"chunk_tokens": 256}), 1),
    "engines": lambda document: changed(
        document, small={"max_ongoing_requests": 200}, large={"max_num_seqs": 12}
    ),
    "router": lambda document: changed(document, router={"max_requests": 200}),
    "live-routing": lambda document: _live(document, {"margin_threshold": 0.5}),
}
"""Each is applied to the file that runs."""


def main(
    change: Annotated[
        list[str] | None, typer.Option(help="Which changes, in order; repeatable. Unset: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of the streams.", min=5)] = 60.0,
    streams: Annotated[int, typer.Option(help="Streams of each kind.", min=1)] = 2,
    start_first: Annotated[
        bool, typer.Option("--start-first/--stop-first", help="`upgrade.start_first`.")
    ] = True,
    drain_s: Annotated[
        float | None, typer.Option(help="`upgrade.drain_s`. Unset: the file's.")
    ] = None,
    num_cpus: Annotated[
        float | None,
        typer.Option(help="CPUs that each part reserves; Ray has two. Unset: 0.1, all fit twice."),
    ] = None,
    patience_s: Annotated[
        float, typer.Option(help="After so long a new version that does not run is given up.")
    ] = 600.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything to this file.")
    ] = None,
) -> None:
    """Deploy changed configurations under streams and count what was cut."""
    console = Console(highlight=False)
    names = change or list(CHANGES)
    if unknown := set(names) - set(CHANGES):
        raise typer.BadParameter(f"{sorted(unknown)}: changes are {', '.join(CHANGES)}")
    prepare_quickstart(console)
    document, _ = load_serve_config(QUICKSTART_CONFIG)
    document["http_options"]["port"] = _PORT
    settings: dict[str, Any] = {"start_first": start_first}
    if drain_s is not None:
        settings["drain_s"] = drain_s
    document = changed(document, upgrade=settings)
    if num_cpus is not None:
        placement = {"placement": {"num_cpus": num_cpus}}
        parts = dict.fromkeys(("small", "large", "mapper", "router"), placement)
        document = changed(document, **parts)
    found: list[Upgrade] = []
    try:
        with console.status("starting Ray and the cascade"):
            local.start_local_ray(num_cpus=2)
            url = local.deploy(document)
        with console.status("warming up"):
            wishes = _wishes(url, seconds, streams)
        console.print(f"streams: {', '.join(f'{one.kind} {one.tokens}' for one in wishes)} tokens")
        for number, name in enumerate(names, start=1):
            document = CHANGES[name](document)
            with console.status(f"{name}: streaming and deploying"):
                one = upgrade(name, document, url, wishes, 1_000 * number, patience_s=patience_s)
            found.append(one)
            console.print(_line(one))
            if one.stuck is not None:
                console.print(one.stuck, markup=False)
            for heard in (*one.streams, *one.arrivals):
                if heard.fault is not None:
                    console.print(f"  {heard.kind}: {heard.fault}", markup=False)
            if one.stuck is not None:
                break
    finally:
        local.stop()
    console.print(_table(found))
    if json_path is not None:
        content = {
            "machine": machine(),
            "settings": {**settings, "seconds": seconds, "num_cpus": num_cpus},
            "wishes": [asdict(one) for one in wishes],
            "upgrades": [asdict(one) for one in found],
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n")
    everything = [heard for one in found for heard in (*one.streams, *one.arrivals)]
    raise typer.Exit(any(heard.fault is not None for heard in everything))


def _wishes(url: str, seconds: float, streams: int) -> list[Wish]:
    """Streams that take so long while all of them run; escalations are spread over that time."""
    escalating = Wish("cascade", _WARM_TOKENS, escalate_after_tokens=2)
    hear_all(url, [Wish("small", _WARM_TOKENS), Wish("large", _WARM_TOKENS), escalating], seed=1)
    kinds = ("small", "large", "small", "large")
    probes = [Wish(model, _PROBE_TOKENS) for model in kinds for _ in range(streams)]
    rates: dict[str, float] = {}
    for heard in hear_all(url, probes, seed=10):
        if heard.fault is not None:
            raise RuntimeError(f"the cascade does not answer: {heard.fault}")
        rates[heard.kind] = max(rates.get(heard.kind, 0.0), heard.tokens / heard.seconds)
    wishes = [
        Wish(model, round(rates[model] * seconds)) for model in kinds[:2] for _ in range(streams)
    ]
    for number in range(streams):
        # The first before the new version can be there, the last after.
        share = (number + 0.5) / streams
        first = round(rates["small"] * seconds * share)
        wishes.append(Wish("cascade", first + round(rates["large"] * seconds * (1 - share)), first))
    return wishes


def _line(one: Upgrade) -> str:
    whole = sum(heard.fault is None for heard in one.streams)
    answered = sum(heard.fault is None for heard in one.arrivals)
    return (
        f"{one.change}: {whole} of {len(one.streams)} streams whole, {answered} of "
        f"{len(one.arrivals)} arriving requests answered; replaced {', '.join(one.replaced) or '-'}"
    )


def _table(found: Sequence[Upgrade]) -> Table:
    table = Table(title="serve deploy during streams")
    table.add_column("change")
    for one in found:
        table.add_column(one.change, justify="right")
    columns = [_column(one) for one in found]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _column(one: Upgrade) -> dict[str, str]:
    whole = sum(heard.fault is None for heard in one.streams)
    answered = [heard.seconds for heard in one.arrivals if heard.fault is None]
    paths = Counter(heard.path for heard in (*one.streams, *one.arrivals) if heard.path)
    return {
        "replaced": "\n".join(one.replaced) or "-",
        "new version runs after, s": _seconds(one.new_s),
        "old version is gone after, s": _seconds(one.gone_s),
        "streams whole": f"{whole} of {len(one.streams)}",
        "longest stream, s": _seconds(max(heard.seconds for heard in one.streams)),
        "longest pause in one, s": f"{max(heard.longest_pause_s for heard in one.streams):.1f}",
        "requests answered": f"{len(answered)} of {len(one.arrivals)}",
        "slowest of them, s": f"{max(answered, default=0.0):.1f}",
        "escalations by handoff": str(paths["mapped"]),
        "by reading again": str(paths["recompute"]),
        "replicas at most": str(one.most_replicas),
        "least free memory, GB": f"{one.least_free_bytes / 1e9:.1f}",
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


if __name__ == "__main__":
    typer.run(main)
