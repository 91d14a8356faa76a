from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.plan_report import PlanReport
from cluster.plan_tables import seconds, size

PAIR = ("plan", "--source", "qwen3-14b", "--target", "qwen3-32b")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "80"})


def test_the_tables_show_what_a_reader_wants_to_know() -> None:
    shown = run(*PAIR).stdout
    for text in (
        "Map at the receiver: 37.5% fewer bytes",
        "prefills 41% less than a re-prefilling one",
        "mapper, k = 8 (as in arXiv 2608.03893 for this pair)",
        "46.5x",
        "372x",
        "handoff over 400 Gbit/s (re-prefill: 2.62 s)",
    ):
        assert text in " ".join(shown.split()), text


def test_tables_fit_a_terminal_of_80_columns() -> None:
    assert "…" not in run(*PAIR).stdout
    assert (
        "…" not in run("plan", "--source", "ministral-3-3b", "--target", "ministral-3-14b").stdout
    )


def test_json_is_the_report_and_nothing_else() -> None:
    words = (
        "--tokens",
        "8192",
        "--link-gbps",
        "25",
        "--support",
        "full",
        "-k",
        "4",
        "--gpu",
        "h200",
    )
    report = PlanReport.model_validate_json(run(*PAIR, *words, "--json").stdout)
    assert report.scenario.gpu_name == "H200"
    assert [one.k for one in report.mappers] == [4]
    assert [(one.link_gbps, one.mapped_at) for one in report.handoffs] == [
        (25, "sender"),
        (25, "receiver"),
    ]
    assert report.handoffs[1].moved_bytes == 8192 * 163_840


def test_a_gpu_without_a_memory_speed_is_bound_by_arithmetic_alone() -> None:
    words = ("--gpu-tflops", "100", "--gpus", "1", "--tokens", "1", "--json")
    report = json.loads(run(*PAIR, *words).stdout)
    flop = report["target"]["prefill_flop_per_token"]
    assert report["scenario"]["gpu_memory_gb_s"] is None
    assert report["target"]["prefill_s"] == pytest.approx(flop / 1e14)


def test_a_plot_is_drawn_in_either_format(tmp_path: Path) -> None:
    png, svg = tmp_path / "a.png", tmp_path / "a.svg"
    result = run(*PAIR, "--plot", str(png), "--json")
    assert f"plot in {png}" in result.stderr
    assert json.loads(result.stdout)["target"]["kv_bytes_per_token"] == 262_144
    assert png.read_bytes().startswith(b"\x89PNG")
    assert run(*PAIR, "--plot", str(svg), "--link-gbps", "10").exit_code == 0
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--source", "qwen9"), "is not in the catalog"),
        (("--source", "./nowhere"), "no such folder"),
        (("-k", "41"), "give 1 to 40"),
        (("--gpu", "abacus"), "give --gpu-tflops"),
        (("--gpu", "H100", "--gpu-tflops", "900"), "give one of them"),
        (("--support", "half"), "choose `full`, `head_local` or `both`"),
        (("--plot", "a.pdf"), "end its name in one of these"),
        (("--plot", "nowhere/a.png"), "no such folder"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(words: tuple[str, ...], said: str) -> None:
    result = run(*PAIR, *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and said in result.stderr
    assert result.stderr.count("\n") == 1


def test_planning_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cluster.cli import app; "
        f"assert CliRunner().invoke(app, {list(PAIR)!r}).exit_code == 0; "
        "heavy = ('torch', 'transformers', 'vllm', 'ray', 'matplotlib', 'huggingface_hub'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.6226, "2.62 s"), (0.0563852, "56.4 ms"), (0.000312, "0.312 ms"), (1234.5, "1,234 s")],
)
def test_durations_keep_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text


def test_sizes_are_decimal() -> None:
    assert [size(value) for value in (537_395_200, 4_295_491_584)] == ["537 MB", "4.30 GB"]
