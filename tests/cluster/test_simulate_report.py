"""Sizing, sweeps, comparison with measurements, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.errors import ConfigError
from cluster.simulate_load import requests
from cluster.simulate_measured import Case, Measured, compare, lone_takeover
from cluster.simulate_report import SimulationReport
from cluster.simulate_size import size
from cluster.simulate_spec import Replicas, Targets, Variant
from cluster.simulate_sweep import Sweep
from tests.cluster.fleet import FLEET, setup

PAIR = (
    *("plan", "--source", "qwen3-14b", "--target", "qwen3-32b", "--gpu", "H200"),
    *("--gpus", "1", "--efficiency", "0.5", "--support", "full"),
)
SHORT = ("--simulate", "--seconds", "12", "--rate", "10")
FIXED = (
    *("--small-replicas", "4", "--large-replicas", "3", "--mapper-replicas", "1"),
    *("--all-large-replicas", "6"),
)


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [*PAIR, *words], env={"COLUMNS": "80"})


def sweep(targets: Targets, **load: Any) -> Sweep:
    return Sweep(setup({"seconds": 20.0} | load), targets, 3.0, Console(file=StringIO()))


# Sizing.


@pytest.mark.parametrize("variant", ["handoff", "reprefill", "all_large"])
def test_a_sized_fleet_meets_its_targets_and_a_smaller_one_does_not(variant: Variant) -> None:
    targets, rate = Targets(first_token_s=1.5, tpot_s=0.04), 20.0
    made = sweep(targets)
    trial = partial(made.trial, variant, rate)
    drawn = requests(setup({"seconds": 20.0}).load, rate)
    replicas = size(setup({"seconds": 20.0}), variant, rate, drawn, targets, trial)
    assert trial(replicas).meets_targets
    fewer = replicas.model_dump()
    fewer["large" if variant == "all_large" else "small"] -= 1
    assert not trial(Replicas(**fewer)).meets_targets


def test_targets_that_nothing_meets_are_refused_with_what_was_reached() -> None:
    targets = Targets(first_token_s=2.0, tpot_s=0.001)
    with pytest.raises(ConfigError, match="large model's time per token 0.0"):
        sweep(targets, seconds=5.0).run(["all_large"], [5.0], {})


def test_a_rate_goes_up_until_the_variant_falls_behind() -> None:
    alone = Replicas(small=0, large=2, mapper=0)
    report = sweep(Targets()).run(["all_large"], [3.0], {"all_large": alone}, saturate=True)
    (one,) = report.variants
    assert one.holds_rate is not None and one.saturates_rate is not None
    assert one.saturates_rate == pytest.approx(1.1 * one.holds_rate)
    assert one.bottleneck == "large" and [p.saturated for p in one.points[:-1]] == [None] * (
        len(one.points) - 1
    )


def test_cost_is_the_gpus_for_as_long_as_a_million_requests_take() -> None:
    report = sweep(Targets()).run(["handoff"], [20.0], {"handoff": FLEET})
    point = report.variants[0].at_design
    assert point.gpus == 6 + 4 + 2
    assert point.gpu_hours_per_million == pytest.approx(12 * 1e6 / 20 / 3_600)
    assert point.cost_per_million == pytest.approx(3 * point.gpu_hours_per_million)


# Measurements.


def made_up(factor: float) -> list[Measured]:
    """A table that is off by a factor from what the simulation will say."""
    settings: list[tuple[int, float, str, Variant]] = [
        (500, 100.0, "mapped", "handoff"),
        (6_000, 10.0, "mapped", "handoff"),
        (6_000, 10.0, "recompute", "reprefill"),
    ]
    rows = []
    for tokens, gbps, path, variant in settings:
        alone = lone_takeover(setup(link_gbps=gbps), variant, tokens)
        rows.append(
            Measured.model_validate(
                {
                    "prompt_tokens": tokens,
                    "link_gbps": gbps,
                    "path": path,
                    "seconds": alone.large_s * factor,
                }
            )
        )
    return rows


def test_measurements_agree_up_to_a_quarter_and_no_further() -> None:
    close, far = (
        compare([Case(row, setup(link_gbps=row.link_gbps or 1.0)) for row in made_up(factor)])
        for factor in (1.2, 2.0)
    )
    assert [row.error for row in close] == pytest.approx([1 / 1.2 - 1] * 3)
    assert all(row.agrees for row in close) and not any(row.agrees for row in far)


def test_the_command_compares_a_file_of_measurements(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    rows = [row.model_dump() for row in made_up(1.2)]
    path.write_text(json.dumps(rows))
    assert "3 of 3 agree within 25%" in run("--measured", str(path)).stdout
    answered = json.loads(run("--measured", str(path), "--json").stdout)
    assert [row["measured"] for row in answered] == rows
    assert all(row["simulated"] > 0 for row in answered)


def test_a_wrong_measurement_is_named(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_text('[{"prompt_tokens": 5, "link_gbps": 1, "path": "guessed", "seconds": 1}]')
    result = run("--measured", str(path))
    assert result.exit_code == 2 and "0.path: Input should be 'mapped'" in result.stderr


# The command.


def test_tables_show_the_three_variants_and_fit_80_columns() -> None:
    shown = run(*SHORT, *FIXED, "--rate", "12").stdout
    for text in ("handoff", "re-prefill", "all large", "GPU-hours per million", "busiest link"):
        assert text in shown
    assert max(len(line) for line in shown.splitlines()) <= 80 and "…" not in shown
    assert "handoff: keeps up with" in shown


def test_a_run_too_short_to_fill_a_fleet_says_so() -> None:
    words = ("--simulate", "--seconds", "3", *FIXED, "--rate", "10")
    assert "raise --seconds" in " ".join(run(*words).stdout.split())
    assert "raise --seconds" not in run(*words, "--answer-tokens", "5,5").stdout


def test_json_is_the_report_and_a_plot_is_drawn(tmp_path: Path) -> None:
    plot = tmp_path / "fleet.png"
    result = run(*SHORT, *FIXED, "--json", "--plot", str(plot), "--price", "2")
    report = SimulationReport.model_validate_json(result.stdout)
    assert [one.variant for one in report.variants] == ["handoff", "reprefill", "all_large"]
    handoff = report.variants[0].at_design
    assert handoff.cost_per_million == pytest.approx(2 * handoff.gpu_hours_per_million)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_pools_without_a_number_are_sized() -> None:
    words = (*SHORT, "--variant", "all_large", "--json")
    (one,) = SimulationReport.model_validate_json(run(*words).stdout).variants
    assert one.sized and one.at_design.meets_targets


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate", "5"), "--rate is about a fleet; add --simulate"),
        (("--simulate", "--prompt-tokens", "5"), "--prompt-tokens '5': give a median"),
        (("--simulate", "--answer-tokens", "9,3"), "not below it"),
        (("--simulate", "--mapper-at", "home"), "choose `receiver`, `sender` or `apart`"),
        (("--simulate", "--variant", "cheap"), "choose `handoff`, `reprefill` or `all_large`"),
        (("--simulate", "--small-replicas", "3"), "together"),
        (("--simulate", "--step-tokens", "3"), "raise step_tokens or lower max_seqs"),
        (("--simulate", "--lengths", "nowhere.jsonl"), "name a JSONL file of lengths"),
        (("--simulate", "--plot", "a.pdf"), "end its name in one of these"),
        (("--measured", "nowhere.json"), "name a JSON file of measurements"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_gpu_of_unknown_memory_is_asked_for() -> None:
    words = ("plan", "--source", "qwen3-14b", "--target", "qwen3-32b", "--gpu-tflops", "100")
    result = CliRunner().invoke(app, [*words, "--simulate"])
    assert result.exit_code == 2 and "give --gpu-memory-gb" in result.stderr


def test_a_plan_without_a_fleet_loads_no_simulator() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from cluster.cli import app; "
        f"assert CliRunner().invoke(app, {list(PAIR)!r}).exit_code == 0; "
        "print([name for name in ('simpy', 'cluster.simulate') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
