"""The Triton path: its cases run in a process of their own, interpreted or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

H100 = ("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
"""What a thread block of an H100 or H200 may have."""


def run_cases(repository: Path, **environment: str) -> None:
    """Triton decides on import whether it interprets, and other tests may have imported it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/mappers/triton_cases.py"],
        cwd=repository,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_kernels_equal_the_reference_under_tritons_interpreter(repository: Path) -> None:
    run_cases(repository, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_kernels_equal_the_reference_on_a_gpu(repository: Path) -> None:
    run_cases(repository, TRITON_INTERPRET="0")


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("tokens", [64, 8192])
@pytest.mark.parametrize("turned", [128, 0])
def test_the_kernel_of_qwen3_14b_to_32b_compiles_for_an_h100(
    groups: int, tokens: int, turned: int
) -> None:
    """Needs no GPU: tensor core instructions, loads in as many stages as asked, and it fits."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mappers.triton_kernels import map_kernel
    from mappers.triton_map import tiles_for

    tiles = tiles_for(tokens, groups, 8 // groups, 128, 128)
    constants: dict[str, Any] = {
        "X_HAS_TABLE": True,
        "OUT_HAS_TABLE": True,
        "SOURCE_DIM": 128,
        "SOURCE_HEADS": 8 // groups,
        "CHOSEN": 8,
        "HEAD_DIM": 128,
        "GROUP_HEADS": 8 // groups,
        "TURNED": turned,
        "HEADS": tiles.heads,
        "BLOCK_T": tiles.tokens,
        "BLOCK_K": tiles.k,
        "WIDEN": False,
    }
    pointers = {"x": "*bf16", "weight_LGOF": "*bf16", "out": "*bf16", "bias_LGO": "*fp32"}
    pointers |= {"cos_TR": "*fp32", "sin_TR": "*fp32"}
    pointers |= dict.fromkeys(("x_table", "out_table", "chosen_LK"), "*i32")
    names = map_kernel.arg_names
    types = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    # What the launcher finds out by itself: addresses and strides are multiples of 16.
    divisible = [["tt.divisibility", 16]]
    loose = {"x_first", "out_first", "tokens", "layers", "groups", "near"}
    source = ASTSource(
        map_kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): divisible for i, n in enumerate(names) if n not in loose | constants.keys()},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled = triton.compile(source, target=GPUTarget(*H100), options=options)
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    stage_bytes = 2 * tiles.k * (tiles.tokens + tiles.heads * 128)
    assert tiles.stages * stage_bytes <= compiled.metadata.shared <= SHARED_BYTES
