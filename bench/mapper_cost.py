"""What the map costs on this processor: beside the large model's prefill, and beside its products.

`python bench/mapper_cost.py --json cost.json`: the quickstart pair and its mapper, which
`kvcascade models` has prepared, in one process, with as many threads as the served mapper has. The
least of several runs is taken of everything, in turns, so that other work on the machine shows
least; only ratios are worth comparing between machines.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from cluster.demo_findings import machine
from cluster.fitting import hide_loading_bars
from cluster.quickstart.pair import default_home
from mappers.capture import load_model
from mappers.mapper import LinearMapper

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One length, in seconds; `products_s` are the map's matrix products alone."""

    tokens: int
    prefill_s: float
    map_s: float
    reference_s: float
    products_s: float
    products_gflops: float

    @property
    def ratios(self) -> dict[str, float]:
        """What the table shows."""
        return {
            "prefill_over_map": self.prefill_s / self.map_s,
            "reference_over_map": self.reference_s / self.map_s,
            "share_of_product_rate": self.products_s / self.map_s,
        }


def mapped(mapper: LinearMapper, kv_STHD: KV, chunk_tokens: int) -> None:
    """Chunk after chunk, as a handoff does."""
    k_STHD, v_STHD = kv_STHD
    for first in range(0, k_STHD.shape[1], chunk_tokens):
        chunk = slice(first, first + chunk_tokens)
        mapper.apply(k_STHD[:, chunk], v_STHD[:, chunk], first)


def products(mapper: LinearMapper, tokens: int, chunk_tokens: int) -> Callable[[], None]:
    """The same matrix products on features that are already side by side; no outputs are kept."""
    w = mapper.weights
    weights_OF = [m_FO.T for w_LGFO in (w.k_weight_LGFO, w.v_weight_LGFO) for m_FO in w_LGFO[:, 0]]
    sizes = [min(chunk_tokens, tokens - first) for first in range(0, tokens, chunk_tokens)]
    x_TF = torch.randn(chunk_tokens, weights_OF[0].shape[1]).to(weights_OF[0].dtype)

    def work() -> None:
        for size in sizes:
            for weight_OF in weights_OF:
                linear(x_TF[:size], weight_OF)

    return work


def measure(tokens: int, home: Path, chunk_tokens: int, repeats: int, console: Console) -> Row:
    """The least time of each, taken in turns."""
    large = load_model(home / "models" / "large", torch.bfloat16, "cpu")
    mapper = LinearMapper.load(home / "mappers" / "small-to-large")
    if mapper.weights.groups != 1:
        raise typer.BadParameter("the quickstart mapper has support `full`; refit it")
    source = mapper.source
    shape = (source.layers, tokens, source.kv_heads, source.head_dim)
    kv_STHD = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    ids = torch.randint(0, large.config.vocab_size, (1, tokens))
    work: dict[str, Callable[[], object]] = {
        "prefill_s": lambda: large(input_ids=ids, use_cache=True, logits_to_keep=1),
        "map_s": lambda: mapped(mapper, kv_STHD, chunk_tokens),
        "reference_s": lambda: mapper.apply_reference(*kv_STHD, 0),
        "products_s": products(mapper, tokens, chunk_tokens),
    }
    work["map_s"]()
    least = dict.fromkeys(work, float("inf"))
    for _ in track(range(repeats), f"{tokens} tokens", console=console, transient=True):
        for name, run in work.items():
            started = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - started)
    gflops = mapper.flops_per_token * tokens / least["products_s"] / 1e9
    return Row(tokens=tokens, products_gflops=gflops, **least)


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, of all that is timed.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, of which the least counts.")] = 3,
    chunk_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a chunk.")] = 512,
) -> None:
    """Measure 512, 2,048 and 6,000 tokens and print the ratios."""
    console = Console()
    home = default_home()
    if not (home / "mappers" / "small-to-large").is_dir():
        raise typer.BadParameter("no quickstart mapper; run `kvcascade models` first")
    torch.set_num_threads(threads)
    hide_loading_bars()
    with torch.inference_mode():
        rows = [measure(n, home, chunk_tokens, repeats, console) for n in (512, 2048, 6000)]
    columns = ("tokens", "prefill", "map", "prefill : map", "reference : map")
    table = Table(*columns, "share of the products' rate", "products, GFLOP/s")
    for row in rows:
        ratios = row.ratios
        table.add_row(
            f"{row.tokens:,}",
            f"{row.prefill_s:.2f} s",
            f"{row.map_s:.3f} s",
            f"{ratios['prefill_over_map']:.1f}",
            f"{ratios['reference_over_map']:.1f}",
            f"{ratios['share_of_product_rate']:.0%}",
            f"{row.products_gflops:.0f}",
        )
    console.print(table)
    console.print(f"{threads} thread(s); load average {os.getloadavg()[0]:.1f}")
    if json_path is not None:
        found = [asdict(row) | row.ratios for row in rows]
        about = machine() | {"threads": threads, "chunk_tokens": chunk_tokens}
        json_path.write_text(json.dumps({"machine": about, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
