"""What mapping costs on one GPU, in the shapes of Qwen3-14B to Qwen3-32B, beside a re-prefill.

`python bench/gpu_mapper.py --json gpu.json`, in at most 8 minutes: no downloads, random weights.
Needs the repository and its packages torch, triton, transformers, pydantic and safetensors. First
the Triton path is compared with the reference; then the card's own ceilings, the map by torch and
by Triton (eager, from a CUDA graph, and into paged blocks) and a prefill of the 32B body without
its LM head are timed. What the time does not suffice for is left out and named. Ends with 1 when
the paths differ. `--cpu-shapes` runs the same on tiny shapes under Triton's interpreter, to test
this script; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.qwen3_shapes import TINY, Shapes, cache, random_body, random_mapper

if TYPE_CHECKING:
    from mappers.mapper import LinearMapper

# Milliseconds on one node of eight H100s: arXiv 2608.03893, 14B to 32B, mapping and re-prefill.
PAPER_MS = {64: (14.0, 61.7), 8192: (67.8, 1154.8), 32768: (277.6, 6975.3)}
TARGETS_MS = {("full", 32768): 110.0, ("head_local", 32768): 25.0, ("full", 64): 1.0}
TARGETS_MS[("head_local", 64)] = 1.0
GRAPH_TOKENS = 1024
BLOCK_TOKENS = 16


class Clock:
    """Times work on a device, and knows when to stop."""

    def __init__(self, device: torch.device, minutes: float) -> None:
        self.device = device
        self._end_s = time.monotonic() + 60 * minutes
        self.left_out: list[str] = []

    def has(self, seconds: float, what: str) -> bool:
        """Whether so many seconds are left; if not, `what` is noted as left out."""
        if time.monotonic() + seconds < self._end_s:
            return True
        self.left_out.append(what)
        print(f"left out for want of time: {what}", flush=True)
        return False

    def ms(self, work: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> float:
        """Median milliseconds. Long work is repeated less."""
        if self.device.type == "cpu":
            warm_up, repeats = 0, 1
        for _ in range(warm_up):
            work()
        self._wait()
        spent_ms: list[float] = []
        while len(spent_ms) < repeats and sum(spent_ms) < 4000:
            started = time.perf_counter()
            work()
            self._wait()
            spent_ms.append(1000 * (time.perf_counter() - started))
        return statistics.median(spent_ms)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Timing:
    """One way of mapping one number of tokens; `bytes_moved` is what must move at least."""

    support: str
    tokens: int
    way: str
    ms: float
    flops: int
    bytes_moved: int


def ceilings(shapes: Shapes, clock: Clock) -> dict[str, float]:
    """The card's own bf16 product and copy, measured now."""
    n, device = shapes.matrix, clock.device
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = clock.ms(lambda: a @ b)
    source = torch.zeros(shapes.copy_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_ms = clock.ms(lambda: target.copy_(source))
    return {"tflops": 2 * n**3 / product_ms / 1e9, "gbps": 2 * len(source) / copy_ms / 1e6}


def largest_error(mapper: LinearMapper, shapes: Shapes) -> float:
    """Of the Triton path against the reference, as a share of the largest element."""
    from mappers.triton_map import TritonMap

    tokens = min(300, max(shapes.tokens))
    k_STHD, v_STHD = cache(shapes, tokens, mapper.device)
    slow = mapper.apply_reference(k_STHD, v_STHD, 1000)
    fast = [torch.empty_like(part) for part in slow]
    TritonMap(*mapper.parts).run(k_STHD, v_STHD, 1000, *fast)
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(fast, slow, strict=True)
    )


def ways(
    mapper: LinearMapper, shapes: Shapes, tokens: int
) -> list[tuple[str, Callable[[], object]]]:
    """Every way of mapping so many tokens."""
    from mappers.torch_map import TorchMap
    from mappers.triton_map import KVMemory, TritonMap

    device = mapper.device
    k_STHD, v_STHD = cache(shapes, tokens, device)
    s = shapes
    size = (s.target_layers, tokens, s.kv_heads, s.head_dim)
    out = [torch.empty(size, device=device, dtype=torch.bfloat16) for _ in range(2)]
    blocks = -(-tokens // BLOCK_TOKENS)
    paged = torch.empty(
        (s.target_layers, blocks, s.kv_heads, BLOCK_TOKENS, 2 * s.head_dim),
        device=device,
        dtype=torch.bfloat16,
    )
    table = torch.randperm(blocks, device=device).int()
    fast, plain = TritonMap(*mapper.parts), TorchMap(*mapper.parts)
    positions = torch.arange(tokens, device=device)
    source = KVMemory.plain(k_STHD), KVMemory.plain(v_STHD)
    target = KVMemory.plain(out[0]), KVMemory.plain(out[1])
    found: list[tuple[str, Callable[[], object]]] = [
        ("torch", lambda: plain.run(k_STHD, v_STHD, 0, out[0], out[1])),
        ("triton", lambda: fast.launch(source, positions, target)),
        (
            "triton, paged",
            lambda: fast.launch(source, positions, KVMemory.paged(paged, table)),
        ),
    ]
    if device.type == "cuda" and tokens <= GRAPH_TOKENS:
        found.append(("triton, graph", graphed(found[1][1])))
    return found


def graphed(work: Callable[[], object]) -> Callable[[], object]:
    """The same work, launched at once from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_maps(mapper: LinearMapper, support: str, shapes: Shapes, clock: Clock) -> list[Timing]:
    """All ways at all lengths, as far as the time goes; the longest first, it matters most."""
    found = []
    width = shapes.kv_heads * shapes.head_dim
    for tokens in sorted(shapes.tokens, reverse=True):
        if not clock.has(30, f"map, {support}, {tokens} tokens"):
            continue
        for way, work in ways(mapper, shapes, tokens):
            moved = 4 * tokens * width * (shapes.source_layers + shapes.target_layers)
            timing = Timing(
                support=support,
                tokens=tokens,
                way=way,
                ms=clock.ms(work),
                flops=mapper.flops_per_token * tokens,
                bytes_moved=moved + mapper.flops_per_token,  # 2 bytes and 2 operations a weight
            )
            found.append(timing)
            print(f"{support:10} {tokens:6} tokens {way:14} {timing.ms:10.3f} ms", flush=True)
    return found


def tile_search(mapper: LinearMapper, support: str, shapes: Shapes, clock: Clock) -> dict[str, Any]:
    """Milliseconds of other tiles at the second longest length: is the choice of tiles right?"""
    from triton.runtime.errors import OutOfResources

    from mappers.triton_map import TritonMap, tiles_for

    tokens = sorted(shapes.tokens)[-2]
    groups = mapper.weights.groups
    usual = tiles_for(tokens, groups, shapes.kv_heads // groups, shapes.head_dim, shapes.head_dim)
    others = [
        usual._replace(warps=12 - usual.warps),
        usual._replace(stages=usual.stages + 1),
        usual._replace(tokens=64, warps=4),
        *(usual._replace(near_tokens=near) for near in (512, 2048, 4096)),
    ]
    k_STHD, v_STHD = cache(shapes, tokens, mapper.device)
    size = (shapes.target_layers, tokens, shapes.kv_heads, shapes.head_dim)
    out = [torch.empty(size, device=mapper.device, dtype=torch.bfloat16) for _ in range(2)]
    found: dict[str, float | str] = {}
    for tiles in dict.fromkeys([usual, *others]):
        if not clock.has(20, f"tiles, {support}: {tiles}"):
            break
        fast = TritonMap(*mapper.parts, tiles=tiles)
        name = " ".join(f"{key}={value}" for key, value in tiles._asdict().items())
        try:
            found[name] = clock.ms(partial(fast.run, k_STHD, v_STHD, 0, out[0], out[1]))
        except OutOfResources as error:  # a card with less shared memory has no room for it
            found[name] = str(error)
        print(f"{support:10} {tokens:6} tokens {name}: {found[name]}", flush=True)
    return {"tokens": tokens, "usual": str(usual), "ms": found}


def prefill(shapes: Shapes, clock: Clock) -> dict[str, Any]:
    """Prefill of the large model's body; fewer layers, and the time scaled, where memory is short.

    Layers are alike, so what they take is proportional; embedding and last norm take next to
    nothing.
    """
    s, device = shapes, clock.device
    layers = s.target_layers
    if device.type == "cuda":
        torch.cuda.empty_cache()
        attention = 2 * s.hidden * (s.heads + s.kv_heads) * s.head_dim
        layer_bytes = 2 * (attention + 3 * s.hidden * s.intermediate)
        kv_bytes = 4 * max(s.tokens) * s.kv_heads * s.head_dim
        step_bytes = 2 * max(s.tokens) * (4 * s.intermediate + 8 * s.hidden)
        room = torch.cuda.mem_get_info()[0] - step_bytes - 2 * s.vocabulary * s.hidden - (2 << 30)
        layers = min(layers, int(room // (layer_bytes + kv_bytes)))
    if layers < 1 or not clock.has(60, "re-prefill"):
        return {"layers": 0, "ms": {}}
    model = random_body(s, layers, device)
    found = {}
    for tokens in sorted(s.tokens):
        if not clock.has(5 + tokens / 1500, f"re-prefill, {tokens} tokens"):
            continue
        ids = torch.randint(0, s.vocabulary, (1, tokens), device=device)
        work = partial(model, input_ids=ids, use_cache=True)
        found[tokens] = clock.ms(work, repeats=3, warm_up=1) * s.target_layers / layers
        print(f"re-prefill {tokens:6} tokens {found[tokens]:25.3f} ms", flush=True)
    return {"layers": layers, "ms": found}


def table(timings: list[Timing], limits: dict[str, float], prefill_ms: dict[int, float]) -> str:
    """Markdown: every timing beside the re-prefill of this run, the ceilings, paper and targets."""
    lines = [
        "| support | tokens | way | ms | TFLOP/s (of ceiling) | GB/s (of ceiling) "
        "| re-prefill here | paper: map, re-prefill (8 x H100) | target |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for t in timings:
        tflops, gbps = t.flops / t.ms / 1e9, t.bytes_moved / t.ms / 1e6
        again_ms = prefill_ms.get(t.tokens)
        again = "" if again_ms is None else f"{again_ms:,.1f} ms ({again_ms / t.ms:.1f} x)"
        paper = ""
        if t.support == "full" and t.tokens in PAPER_MS:
            paper = "{:,} ms, {:,} ms".format(*PAPER_MS[t.tokens])
        target_ms = TARGETS_MS.get((t.support, t.tokens))
        target = "" if target_ms is None or t.way == "torch" else f"{target_ms:g} ms: "
        if target and target_ms is not None:
            target += "met" if t.ms <= target_ms else "missed"
        lines.append(
            f"| {t.support} | {t.tokens:,} | {t.way} | {t.ms:,.3f} "
            f"| {tflops:,.1f} ({tflops / limits['tflops']:.0%}) "
            f"| {gbps:,.0f} ({gbps / limits['gbps']:.0%}) | {again} | {paper} | {target} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write; 1 when the Triton path is not the reference's equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--minutes", type=float, default=7.5, help="stop starting work after this")
    parser.add_argument("--cpu-shapes", action="store_true", help="tiny shapes, interpreted")
    arguments = parser.parse_args()
    if arguments.cpu_shapes:
        # Triton decides on import.
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        parser.error("no CUDA device; --cpu-shapes tests the script without one")
    device = torch.device("cpu" if arguments.cpu_shapes else "cuda")
    shapes = TINY if arguments.cpu_shapes else Shapes()
    card = "CPU (no measurement)" if arguments.cpu_shapes else torch.cuda.get_device_name()
    torch.manual_seed(0)
    clock = Clock(device, arguments.minutes)
    result: dict[str, Any] = {"card": card, "torch": torch.__version__, "shapes": asdict(shapes)}
    result["ceilings"] = ceilings(shapes, clock)
    print(f"{card}: {result['ceilings']}", flush=True)
    errors: dict[str, float] = {}
    timings: list[Timing] = []
    tiles: dict[str, Any] = {}
    mappers = {}
    for support in ("full", "head_local"):
        mappers[support] = random_mapper(shapes, support, device)
        errors[support] = largest_error(mappers[support], shapes)
        print(f"{support}: largest error {errors[support]:.1e} of the largest element", flush=True)
        timings += time_maps(mappers[support], support, shapes, clock)
    again = prefill(shapes, clock)
    for support, mapper in mappers.items():
        tiles[support] = tile_search(mapper, support, shapes, clock)
    # Features and results are rounded to bf16 once each; the interpreter cuts them off.
    allowed = 2**-6 if arguments.cpu_shapes else 2**-7
    equal = all(error < allowed for error in errors.values())
    print(f"\n{card}, torch {torch.__version__}\n")
    print(table(timings, result["ceilings"], again["ms"]))
    if again["layers"] not in (0, shapes.target_layers):
        print(f"\nRe-prefill: {again['layers']} layers were timed and scaled, for want of memory.")
    if not equal:
        print(f"\nTHE PATHS DIFFER: {errors}, allowed {allowed}")
    result |= {
        "largest_error": errors,
        "equal": equal,
        "timings": [asdict(timing) for timing in timings],
        "prefill": again,
        "tiles": tiles,
        "left_out": clock.left_out,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
