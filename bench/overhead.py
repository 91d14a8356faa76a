"""What the router adds to a request, measured against the same engine behind a bare ingress.

`python bench/overhead.py` starts Ray Serve with an engine that only sleeps and two ingresses
before it: one that forwards token ids as they come ("Serve's own hop"), and the router, asked for
a model by its name and for the cascade. All are asked in turn within one run, by clients in a
process of their own. Needs the quickstart models' tokenizer (`kvcascade models`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from idle import processes, shares
from overhead_stats import Answer, Latency, Load, added_ms, latency, percentile, share
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

TEXT = (
    "The harbour was quiet before the first boats came in. Gulls walked along the wall, and a man "
    "mended a net with slow, even movements — he had done it for forty years. Prices, he said, "
    "had gone up again: 3.20 for a kilo of mackerel, 4.75 for cod.\n\n* Boats: 12\n* Crew: 31\n"
)
QUESTION = "Tell me about the harbour in the morning: who is there, and what do they do?"
BARE, NAMED, CASCADE = "Serve's own hop", "router, model by name", "router, cascade"
TOKENS = 128
MAX_ADDED_MS = 2.0
MIN_SHARE = 0.95


@dataclass(frozen=True)
class Endpoint:
    """Where clients ask; `skip_events` events come before the first token."""

    name: str
    url: str
    body: dict[str, Any]
    skip_events: int = 0

    def order(self, *, streams: int, requests: int, tokens: int) -> dict[str, Any]:
        """A line for the clients."""
        return {
            "url": self.url,
            "body": {**self.body, "max_tokens": tokens},
            "skip_events": self.skip_events,
            "streams": streams,
            "requests": requests,
        }


class Clients:
    """The process of the clients."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("overhead_client.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: dict[str, Any]) -> tuple[float, list[Answer]]:
        """(seconds for all, each answer)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the clients ended; what went wrong is above")
        found = json.loads(line)
        return found["wall_s"], [Answer(**one) for one in found["requests"]]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def cascade_args(folder: str) -> dict[str, Any]:
    """The router's configuration: the quickstart's, with both models at one folder."""
    from cluster.cli import QUICKSTART_CONFIG
    from cluster.config import load_serve_config

    cascade = load_serve_config(QUICKSTART_CONFIG)[1].model_dump(mode="json")
    for role in ("small", "large"):
        cascade[role]["source"] = folder
    return cascade


@contextmanager
def deployed(
    console: Console, serve_default: bool, max_chunks_per_s: float
) -> Iterator[tuple[list[Endpoint], Any]]:
    """(endpoints, the engine's handle) on a Ray cluster of its own."""
    from cluster import local
    from cluster.sources import resolve_model

    folder = resolve_model("quickstart:large")
    args = cascade_args(folder)
    with console.status("starting Ray Serve, two ingresses and an engine that sleeps"):
        local.start_local_ray(num_cpus=4)
        try:
            from overhead_engine import ScriptedEngine, ScriptedMapper, make_bare
            from ray import serve
            from tokenizers import Tokenizer

            from deployments.router import CHUNK_TRANSPORT

            port, transport = free_port(), {} if serve_default else CHUNK_TRANSPORT
            encode = Tokenizer.from_file(f"{folder}/tokenizer.json").encode
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            few: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}}
            many: dict[str, Any] = {**few, "max_ongoing_requests": 512}
            engine = serve.run(
                serve.deployment(name="engine", **many)(ScriptedEngine).bind(
                    encode(TEXT).ids, 0.0, max_chunks_per_s
                ),
                name="engine",
                route_prefix=None,
            )
            mapper = serve.deployment(name="mapper", **few)(ScriptedMapper).bind()
            router: Any = "deployments.router.Router"
            serve.run(
                serve.deployment(name="router", **many)(router).bind(args, engine, engine, mapper),
                name="router",
                route_prefix="/router",
            )
            bare = serve.deployment(name="bare", **many)(make_bare()).bind(engine, transport)
            serve.run(bare, name="bare", route_prefix="/bare")
            root = f"http://127.0.0.1:{port}"
            bare_body = {"request_id": "bench", "prompt_token_ids": encode(QUESTION).ids}
            chat = {
                "messages": [{"role": "user", "content": QUESTION}],
                "stream": True,
                "ignore_eos": True,
                "temperature": 0,
            }
            url = f"{root}/router/v1/chat/completions"
            yield (
                [
                    Endpoint(BARE, f"{root}/bare/generate", bare_body),
                    Endpoint(NAMED, url, {**chat, "model": args["small"]["name"]}, 1),
                    Endpoint(CASCADE, url, {**chat, "model": args["cascade_name"]}, 1),
                ],
                engine,
            )
        finally:
            local.stop()


def one_stream(
    clients: Clients, endpoints: list[Endpoint], rounds: int, tokens: int, progress: Progress
) -> dict[str, list[Answer]]:
    """Requests one at a time, each endpoint in turn."""
    answers: dict[str, list[Answer]] = {one.name: [] for one in endpoints}
    for number in progress.track(range(rounds), description="one stream"):
        # Whoever comes first after a change of endpoint must not always be the same.
        turn = number % len(endpoints)
        for endpoint in (*endpoints[turn:], *endpoints[:turn]):
            order = endpoint.order(streams=1, requests=1, tokens=tokens)
            answers[endpoint.name] += clients.ask(order)[1]
    return answers


def many_streams(
    clients: Clients,
    endpoints: list[Endpoint],
    rounds: int,
    streams: int,
    requests: int,
    tokens: int,
    progress: Progress,
    description: str,
) -> dict[str, Load]:
    """All streams at once, each endpoint in turn."""
    rates: dict[str, list[float]] = {one.name: [] for one in endpoints}
    cpu: dict[str, dict[str, float]] = {one.name: {} for one in endpoints}
    answers: dict[str, list[Answer]] = {one.name: [] for one in endpoints}
    count = streams * requests * tokens
    for number in progress.track(range(rounds), description=description):
        turn = number % len(endpoints)
        for endpoint in (*endpoints[turn:], *endpoints[:turn]):
            before, started = processes(), time.monotonic()
            wall_s, found = clients.ask(
                endpoint.order(streams=streams, requests=requests, tokens=tokens)
            )
            elapsed_s = time.monotonic() - started
            rates[endpoint.name].append(count / wall_s)
            answers[endpoint.name] += found
            for one in shares(before, processes(), elapsed_s, None):
                mine = cpu[endpoint.name]
                spent_ms = 10.0 * one.cpu_percent * elapsed_s
                mine[one.role] = mine.get(one.role, 0.0) + spent_ms / (count * rounds)
    return {
        name: Load(
            tokens_per_s=rates[name],
            cpu_ms_per_token={role: ms for role, ms in cpu[name].items() if ms >= 0.005},
            ttft_p50_ms=latency(answers[name]).ttft_p50_ms,
            total_p50_ms=latency(answers[name]).total_p50_ms,
        )
        for name in rates
    }


def main(
    rounds: Annotated[int, typer.Option(help="Requests of one stream per endpoint.", min=2)] = 40,
    load_rounds: Annotated[int, typer.Option(help="Rounds of many streams.", min=1)] = 6,
    streams: Annotated[int, typer.Option(help="Streams at once.", min=1)] = 32,
    step_ms: Annotated[list[float], typer.Option(help="Engine's time per token, repeatable.")] = [  # noqa: B006
        10.0,
        40.0,
    ],
    max_chunks_per_s: Annotated[
        float, typer.Option(help="The engine's `max_chunks_per_s`.", min=1)
    ] = 1_000.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
    serve_default: Annotated[
        bool,
        typer.Option("--serve-default", help="Bare ingress over Ray objects, Serve's default."),
    ] = False,
) -> None:
    """Measure what the router adds; ends with 1 when a target is missed."""
    console = Console(highlight=False)
    with deployed(console, serve_default, max_chunks_per_s) as (endpoints, engine):
        clients = Clients()
        try:
            with Progress(console=console, transient=True) as progress:
                engine.configure.remote(step_ms[0] / 1e3).result()
                one_stream(clients, endpoints, 3, 32, progress)
                alone = one_stream(clients, endpoints, rounds, 32, progress)
                loads = {}
                for ms in step_ms:
                    engine.configure.remote(ms / 1e3).result()
                    loads[ms] = many_streams(
                        clients,
                        endpoints,
                        load_rounds,
                        streams,
                        max(1, round(4_000 / (TOKENS * ms))),
                        TOKENS,
                        progress,
                        f"{streams} streams, {ms:g} ms per token",
                    )
        finally:
            clients.close()
    report(alone, loads, streams, console, json_path)


def report(
    alone: dict[str, list[Answer]],
    loads: dict[float, dict[str, Load]],
    streams: int,
    console: Console,
    json_path: Path | None,
) -> None:
    """Print the tables, write the file, and end."""
    latencies = {name: latency(found) for name, found in alone.items()}
    base = alone[BARE]
    added = {
        name: {
            "ttft_ms": added_ms([a.ttft_s for a in base], [a.ttft_s for a in found]),
            "total_ms": added_ms([a.total_s for a in base], [a.total_s for a in found]),
        }
        for name, found in alone.items()
    }
    console.print(latency_table(latencies, added))
    ratios = {
        ms: {n: share(load[BARE].tokens_per_s, one.tokens_per_s) for n, one in load.items()}
        for ms, load in loads.items()
    }
    for ms, load in loads.items():
        console.print(load_table(f"{streams} streams, {ms:g} ms per token", load, ratios[ms]))
    if json_path is not None:
        content = {
            "cores": os.cpu_count(),
            "one_stream": {name: asdict(one) for name, one in latencies.items()},
            "added": added,
            "load": {
                f"{ms:g}": {n: {**asdict(one), "share": ratios[ms][n]} for n, one in load.items()}
                for ms, load in loads.items()
            },
        }
        json_path.write_text(json.dumps(content, indent=2) + "\n")
    kept = added[CASCADE]["total_ms"] <= MAX_ADDED_MS and all(
        one[CASCADE] >= MIN_SHARE for one in ratios.values()
    )
    raise typer.Exit(0 if kept else 1)


def latency_table(latencies: dict[str, Latency], added: dict[str, dict[str, float]]) -> Table:
    """One stream."""
    table = Table(title="One stream, ms: p50 / p99")
    table.add_column("endpoint", no_wrap=True)
    for name in ("first token", "gap", "whole answer", "added: first", "added: whole"):
        table.add_column(name, justify="right")
    for name, one in latencies.items():
        table.add_row(
            name,
            f"{one.ttft_p50_ms:.1f} / {one.ttft_p99_ms:.1f}",
            f"{one.gap_p50_ms:.1f} / {one.gap_p99_ms:.1f}",
            f"{one.total_p50_ms:.1f} / {one.total_p99_ms:.1f}",
            f"{added[name]['ttft_ms']:+.2f}",
            f"{added[name]['total_ms']:+.2f}",
        )
    return table


def load_table(title: str, load: dict[str, Load], ratios: dict[str, float]) -> Table:
    """Many streams; CPU time of the processes that a token passes."""
    table = Table(title=title)
    table.add_column("endpoint", no_wrap=True)
    for name in ("tokens/s", "of the bare", "first token, ms"):
        table.add_column(name, justify="right")
    for name in ("engine", "ingress", "proxy"):
        table.add_column(f"{name}, CPU ms/token", justify="right")
    for name, one in load.items():
        cpu = one.cpu_ms_per_token
        ingress = cpu.get("bare: replica" if name == BARE else "router: replica", 0.0)
        table.add_row(
            name,
            f"{percentile(one.tokens_per_s, 50):,.0f}",
            f"{ratios[name]:.1%}",
            f"{one.ttft_p50_ms:.1f}",
            f"{cpu.get('engine: replica', 0.0):.2f}",
            f"{ingress:.2f}",
            f"{cpu.get('Ray: ProxyActor', 0.0):.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
