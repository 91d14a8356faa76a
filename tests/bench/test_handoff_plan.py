"""The handoff bench's planner, against runs whose times were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.handoff_page import page, reason
from bench.handoff_plan import Planner
from bench.handoff_plot import plot
from bench.handoff_runs import Matrix, Run
from cluster import plan
from cluster.catalog import architecture

SOURCE, TARGET = architecture("Qwen/Qwen3-0.6B"), architecture("Qwen/Qwen3-1.7B")
KV_BYTES = plan.kv_bytes_per_token(SOURCE.geometry)
OVERHEAD_MS = 100.0
MAP_TOKENS_PER_S = 2_000.0
STAGES = {"ticket": 20.0, "queue": 0.0, "admit": 80.0}


def mapped(place: str, rate_gbps: float | None, tokens: int, **changes: object) -> Run:
    """A handoff that a machine makes which is just as the planner has it, at 4 Gb/s at most."""
    gbps = rate_gbps or 4.0
    read_s = 0.0 if place == "source" else tokens * KV_BYTES * 8 / gbps / 1e9
    write_s = 0.0 if place == "target" else tokens * KV_BYTES * 8 / gbps / 1e9
    map_s = tokens / MAP_TOKENS_PER_S
    inward_s = max(map_s, read_s) + min(map_s, read_s) / SOURCE.layers
    whole_s = max(inward_s, write_s) + min(inward_s, write_s) / TARGET.layers
    run = Run(
        place=place,
        rate_gbps=rate_gbps,
        tokens=tokens,
        first=False,
        wanted="mapped",
        path="mapped",
        reason=None,
        temperature="warm",
        prompt_tokens=tokens,
        covered_tokens=tokens,
        bytes_read=round(read_s * gbps * 1e9 / 8),
        bytes_written=round(write_s * gbps * 1e9 / 8),
        handoff_ms=OVERHEAD_MS + 1e3 * whole_s,
        stages_ms={**STAGES, "read": 1e3 * read_s, "map": 1e3 * map_s, "write": 1e3 * write_s},
        target_received_bytes=0,
    )
    return replace(run, **changes)


def again(tokens: int, handoff_ms: float) -> Run:
    run = mapped("own", None, tokens)
    return replace(run, wanted="recompute", path="recompute", handoff_ms=handoff_ms, stages_ms={})


def planner(*runs: Run) -> Planner:
    return Planner(SOURCE, TARGET, 8, runs)


def test_models_of_one_cache_size_are_what_these_numbers_were_made_for() -> None:
    assert plan.kv_bytes_per_token(TARGET.geometry) == KV_BYTES == 114_688


@pytest.mark.parametrize("place", ["source", "target", "own"])
@pytest.mark.parametrize("rate_gbps", [0.1, 1.0, None])
def test_a_machine_that_is_as_the_planner_has_it_is_met_at_every_place_and_rate(
    place: str, rate_gbps: float | None
) -> None:
    runs = [mapped(place, rate, n) for rate in (rate_gbps, None) for n in (512, 2_048, 6_144)]
    runs += [again(n, n / 400 * 1e3) for n in (512, 2_048, 6_144)]
    made = planner(*runs)
    assert made.rates.at_tokens == 2_048
    assert made.rates.map_tokens_per_s == pytest.approx(MAP_TOKENS_PER_S)
    assert made.rates.prefill_tokens_per_s == pytest.approx(400)
    assert made.rates.overhead_ms == pytest.approx(OVERHEAD_MS)
    assert made.rates.unlimited_gbps == pytest.approx(4.0, rel=1e-6)
    for row in made.rows():
        if row.place is not None:
            assert row.predicted_ms == pytest.approx(row.measured_ms, rel=1e-6)
            assert row.blame is None


def test_re_prefill_is_met_at_the_length_of_the_rates_and_grows_by_attention_elsewhere() -> None:
    runs = [mapped("own", 1.0, n) for n in (512, 2_048, 6_144)]
    made = planner(*runs, *(again(n, 5_000.0) for n in (512, 2_048, 6_144)))
    assert made.prefill_ms(2_048) == pytest.approx(5_000)
    flop = [plan.prefill_flop_per_token(TARGET, n) * n for n in (2_048, 6_144)]
    assert made.prefill_ms(6_144) == pytest.approx(5_000 * flop[1] / flop[0])
    assert flop[1] / flop[0] > 3.05


@pytest.mark.parametrize(
    ("stages", "blame"),
    [
        ({"admit": 3_080.0}, "fixed"),
        ({"map": 4_000.0}, "mapping"),
        ({"read": 4_500.0, "write": 4_500.0}, "moving"),
        ({}, "overlap"),
    ],
)
def test_the_term_that_changed_is_the_one_to_blame(stages: dict[str, float], blame: str) -> None:
    fine = [mapped("own", rate, n) for rate in (1.0, None) for n in (512, 2_048)]
    slow = mapped("own", 1.0, 2_048)
    slow = replace(slow, handoff_ms=slow.handoff_ms + 3_000, stages_ms={**slow.stages_ms, **stages})
    runs = [one for one in fine if (one.rate_gbps, one.tokens) != (1.0, 2_048)]
    made = planner(*runs, slow, again(512, 800), again(2_048, 5_000))
    # The shorter length is where the overhead is from; the longer one's rates are unlimited.
    row = next(one for one in made.rows() if (one.rate_gbps, one.tokens) == (1.0, 2_048))
    assert row.off < -0.25
    assert row.blame == blame
    assert sum(row.terms_ms.values()) == pytest.approx(row.measured_ms - row.predicted_ms)
    assert reason(row, made.rates).startswith("+")


def test_first_and_failed_runs_are_in_no_row() -> None:
    cold = mapped("own", 1.0, 512, temperature="cold", first=True, handoff_ms=9e9)
    failed = mapped("own", 1.0, 512, path="recompute", reason="mapper_gone", handoff_ms=9e9)
    made = planner(cold, failed, mapped("own", 1.0, 512), again(512, 800))
    assert [(row.place, row.runs) for row in made.rows()] == [("own", 1), (None, 1)]
    with pytest.raises(ValueError, match="nothing to compare"):
        planner(cold, again(512, 800)).rows()


def test_the_page_names_every_cell_and_what_went_wrong(tmp_path: Path) -> None:
    cold = mapped("target", None, 560, temperature="cold", first=True, handoff_ms=4_200.0)
    failed = mapped("own", 1.0, 560, path="recompute", reason="mapper_gone")
    slow = mapped("target", 0.1, 2_060, handoff_ms=60_000.0)
    quick = [mapped(place, None, n) for place in ("target", "own") for n in (560, 2_060)]
    runs = [cold, failed, slow, mapped("target", 0.1, 560), *quick, again(560, 800)]
    runs.append(again(2_060, 5_000))
    made = planner(*runs)
    machine = {"cpu": "a processor", "cores": 2}
    text = page(made.rows(), runs, made.rates, machine, {"all": 120.0}, [1.0, 2.0])
    assert "| the target's node | 560 | 4.20 s | " in text and " | 1 of 1 |" in text
    assert "| the target's node | 0.1 Gb/s | 2,060 | 60.00 s (60.00 s to 60.00 s) |" in text
    assert "* 2,060 tokens, 0.1 Gb/s, the target's node: -6" in text
    assert "1 of 10 requests did not go the way that they should have (mapper_gone)" in text
    plot(made.rows(), [cold], tmp_path / "handoff.png")
    assert (tmp_path / "handoff.png").read_bytes()[:4] == b"\x89PNG"


def test_a_round_visits_every_cell_once_and_the_cold_one() -> None:
    assert Matrix().steps == 3 * (3 * (1 + 1 + 4 * 3) + 3)
