"""Pipelines by chunks, closed loops, and what is made of measured runs."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import simpy
from typer.testing import CliRunner

from cluster import plan
from cluster.catalog import architecture
from cluster.cli import app
from cluster.errors import ConfigError
from cluster.simulate import Setup
from cluster.simulate_cost import HandoffCost
from cluster.simulate_loop import handoffs_per_s
from cluster.simulate_measured import Case, Measured, MeasuredLoop, compare, lone_takeover
from cluster.simulate_pipeline import Pipeline, Step
from cluster.simulate_point import places_held
from cluster.simulate_runs import TCP_SHARE, machine_of, read_cases
from cluster.simulate_share import FairShare, Port, Window
from cluster.simulate_spec import Replicas
from tests.cluster.fleet import always, ran, setup

# Chunks.


def finished_s(amounts: list[list[float]], allocated_s: float, ahead: list[int | None]) -> float:
    """The recurrence that a pipeline with two buffers between neighbours follows."""
    steps, chunks = len(amounts), len(amounts[0])
    ends = [[0.0] * chunks for _ in range(steps)]
    for chunk in range(chunks):
        for step in range(steps):
            begins_s = ends[step][chunk - 1] if chunk else 0.0
            if step:
                begins_s = max(begins_s, ends[step - 1][chunk])
            if step < steps - 1 and chunk >= 2:
                begins_s = max(begins_s, ends[step + 1][chunk - 2])
            limit = ahead[step]
            if limit is not None and chunk >= limit:
                begins_s = max(begins_s, allocated_s)
            ends[step][chunk] = begins_s + amounts[step][chunk]
    return ends[-1][-1]


def happen(
    env: simpy.Environment, event: simpy.Event, at_s: float
) -> Generator[simpy.Event, Any, None]:
    yield env.timeout(at_s)
    event.succeed()


@pytest.mark.parametrize("allocated_s", [0.0, 2.5, 40.0])
@pytest.mark.parametrize(
    "amounts",
    [
        [[1.0, 1.0, 1.0], [3.0, 3.0, 3.0], [2.0, 2.0, 2.0]],
        [[4.0, 4.0, 4.0, 0.5], [1.0, 1.0, 1.0, 0.1], [2.0, 2.0, 2.0, 0.3]],
        [[1.0, 1.0, 1.0, 1.0, 0.2], [1.5, 1.5, 1.5, 1.5, 0.2], [6.0, 6.0, 6.0, 6.0, 1.0]],
        [[2.0], [1.0], [5.0]],
    ],
)
def test_a_pipeline_ends_when_its_recurrence_says(
    amounts: list[list[float]], allocated_s: float
) -> None:
    env = simpy.Environment()
    ahead: list[int | None] = [None, 1, 0]
    allocated = env.event()
    env.process(happen(env, allocated, allocated_s))
    steps = [
        Step(one, (Port(1.0),), "link", limit) for one, limit in zip(amounts, ahead, strict=True)
    ]
    pipeline = Pipeline(env, FairShare(env, Window(0.0, 1.0)), steps, allocated)
    env.run(until=pipeline.done)
    assert env.now == pytest.approx(finished_s(amounts, allocated_s, ahead))


def test_a_pipeline_says_what_it_waits_for() -> None:
    env = simpy.Environment()
    allocated = env.event()
    steps = [
        Step([1.0, 1.0], (Port(1.0),), "link"),
        Step([5.0, 5.0], (Port(1.0),), "mapper", 1),
        Step([2.0, 2.0], (Port(1.0),), "link", 0),
    ]
    pipeline = Pipeline(env, FairShare(env, Window(0.0, 1.0)), steps, allocated)
    seen = []
    for until_s in (0.5, 1.5, 9.0, 9.5, 14.5):
        env.run(until=until_s)
        if until_s == 9.0:
            seen.append(pipeline.waits_for)
            allocated.succeed()
            continue
        seen.append(pipeline.waits_for)
    # The first chunk is mapped until 6 s; then nothing goes on before the target has blocks.
    assert seen == ["link", "mapper", "large", "mapper", "link"]


def test_a_handoff_that_is_not_over_by_its_deadline_is_read_again() -> None:
    load = {"prompt": always(2_000), "seconds": 20.0}
    fleet = ran(setup(load, {"deadline_s": 0.5}, link_gbps=5.0), "handoff", 10.0)
    escalated = sum(one.escalates for one in fleet.requests)
    # 2,000 tokens take 0.84 s to write alone.
    assert fleet.recomputed == {"deadline": escalated} and escalated > 20
    assert fleet.ended == len(fleet.requests)


def test_a_mapper_that_begins_only_for_ready_targets_holds_no_place_for_others() -> None:
    def held(read_ahead: bool) -> float:
        rules = {"max_seqs": 16, "read_ahead": read_ahead, "lease_s": 1e6, "deadline_s": 1e6}
        fleet = ran(setup(rules=rules), "handoff", 40.0, Replicas(small=30, large=3, mapper=1))
        return places_held(fleet).get("large", 0.0)

    assert held(True) > 0.7 and held(False) == 0


# Loops.

RULES = setup().rules
COST = HandoffCost(
    overhead_s=0.05,
    read_bytes_per_token=1_000.0,
    write_bytes_per_token=3_000.0,
    map_s=lambda tokens: tokens * 1e-5,
    chunk_tokens=500,
    layers=4,
)


def looped(mappers: int, in_flight: int, engine_gbps: float | None = None) -> float:
    return handoffs_per_s(
        COST,
        RULES,
        mappers=mappers,
        link_gbps=0.08,
        engine_gbps=engine_gbps,
        in_flight=in_flight,
        tokens=1_000,
    )


def test_one_handoff_after_the_other_takes_what_each_takes() -> None:
    # Two chunks at 10 MB/s: read 0.05 s, map 0.005 s, write 0.15 s each.
    assert looped(1, 1) == pytest.approx(1 / (0.05 + 0.05 + 0.005 + 2 * 0.15))


def test_many_handoffs_fill_the_links_of_all_mappers() -> None:
    assert looped(1, 8) == pytest.approx(1 / 0.3, rel=0.01)
    assert looped(3, 24) == pytest.approx(3 / 0.3, rel=0.01)


def test_a_link_of_the_engines_limits_all_mappers_together() -> None:
    assert looped(3, 24, engine_gbps=0.1) == pytest.approx(1 / 0.24, rel=0.01)


def test_an_entry_of_a_loop_brings_its_own_costs(tmp_path: Path) -> None:
    entry = {
        "mappers": 2,
        "link_gbps": 0.08,
        "in_flight": 16,
        "tokens": 1_000,
        "handoffs_per_s": 8.0,
        "besides_ms": 50,
        "map_tokens_per_s": 1e5,
        "read_bytes_per_token": 1_000,
        "write_bytes_per_token": 3_000,
        "chunk_tokens": 500,
    }
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps({"title": "of no interest", "measured": [entry]}))
    (row,) = compare(read_cases([path], setup()))
    assert row.simulated == pytest.approx(2 / 0.3, rel=0.01)
    assert row.error == pytest.approx(row.simulated / 8 - 1) and row.agrees


# What `bench/handoff.py` writes.

SMALL, LARGE = architecture("small"), architecture("large")
SMALL_BYTES, LARGE_BYTES = (plan.kv_bytes_per_token(one.geometry) for one in (SMALL, LARGE))
# Seconds that this made-up machine takes: of a prompt, of its square, besides, and to map a token.
TOKEN_S, SQUARE_S, BESIDES_S, MAP_S, WIDE_GBPS = 1e-3, 4e-7, 0.07, 5e-4, 4.0


def pair() -> Setup:
    made = setup()
    return Setup(SMALL, LARGE, made.scenario, made.link_gbps, made.load, made.rules)


def read_s(tokens: int) -> float:
    return TOKEN_S * tokens + SQUARE_S * tokens**2


def one_run(place: str, rate_gbps: float | None, tokens: int, path: str, /, **changes: Any) -> Any:
    covered = (tokens - 20) // 32 * 32 if path == "mapped" else 0
    return {
        "place": place,
        "rate_gbps": rate_gbps,
        "tokens": tokens,
        "first": False,
        "wanted": path,
        "path": path,
        "prompt_tokens": tokens,
        "covered_tokens": covered,
        "bytes_written": covered * LARGE_BYTES,
        "handoff_ms": 1_000.0 if path == "mapped" else 1e3 * read_s(tokens),
        "stages_ms": {"map": 1.0} if path == "mapped" else {},
        "of": "no interest",
    } | changes


def document(*runs: Any) -> Any:
    rest_s = read_s(561) - read_s(512)
    rates = {
        "map_tokens_per_s": 1 / MAP_S,
        "overhead_ms": 1e3 * (BESIDES_S + rest_s),
        "unlimited_gbps": WIDE_GBPS,
        "prefill_tokens_per_s": 1.0,
    }
    return {"rates": rates, "runs": list(runs)}


def written(folder: Path, content: Any) -> Path:
    path = folder / "handoff.json"
    path.write_text(json.dumps(content))
    return path


AGAIN = [one_run("own", None, tokens, "recompute") for tokens in (560, 2_060, 6_060)]


def test_a_machine_is_found_in_prompts_of_three_lengths() -> None:
    found = machine_of(LARGE, {tokens: read_s(tokens) for tokens in (560, 2_060, 6_060)}, 100.0)
    made = Setup(LARGE, LARGE, pair().scenario, 1.0, pair().load, pair().rules, found)
    engine = made.engine("large")
    for tokens in (100, 1_000, 8_000):
        flop = engine.read_flop(0, tokens)
        assert engine.step_s(0, 0, flop, tokens, 0)[0] == pytest.approx(read_s(tokens), rel=1e-6)


def test_one_length_gives_every_flop_the_same_time() -> None:
    found = machine_of(LARGE, {2_000: 4.0}, 100.0)
    assert found.attention == 1
    assert plan.prefill_s(LARGE, 2_000, found.engine) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("place", "rate_gbps", "read_gbps", "write_gbps"),
    [
        ("own", 1.0, TCP_SHARE, TCP_SHARE),
        ("own", None, WIDE_GBPS, WIDE_GBPS),
        ("own", 5.0, WIDE_GBPS, WIDE_GBPS),
        ("source", 0.1, WIDE_GBPS, 0.1 * TCP_SHARE),
        ("target", 0.1, 0.1 * TCP_SHARE, WIDE_GBPS),
    ],
)
def test_a_cell_is_simulated_with_the_rates_of_its_run(
    tmp_path: Path, place: str, rate_gbps: float | None, read_gbps: float, write_gbps: float
) -> None:
    runs = [one_run("own", None, 560, "mapped"), one_run(place, rate_gbps, 2_060, "mapped")]
    content = document(*runs, *AGAIN) | {"chunk_tokens": 512}
    cases = read_cases([written(tmp_path, content)], pair())
    row = next(one for one in compare(cases) if getattr(one.measured, "prompt_tokens", 0) == 2_060)
    covered = 2_016
    chunks = [512, 512, 512, 480]
    expected_s = BESIDES_S + finished_s(
        [
            [plan.transfer_s(one * SMALL_BYTES, read_gbps) for one in chunks],
            [one * MAP_S for one in chunks],
            [plan.transfer_s(one * LARGE_BYTES, write_gbps) for one in chunks],
        ],
        0.0,
        [None, None, None],
    )
    expected_s += read_s(2_061) - read_s(covered)
    assert row.simulated == pytest.approx(expected_s, rel=0.01)


def test_chunks_are_as_small_as_a_mapper_would_make_them(tmp_path: Path) -> None:
    content = document(one_run("own", 0.1, 2_060, "mapped"), *AGAIN)
    (chosen, *_) = read_cases([written(tmp_path, content)], pair())
    (fixed, *_) = read_cases([written(tmp_path, content | {"chunk_tokens": 512})], pair())
    size = chosen.setup.rules.chunk_tokens
    assert size is not None and size < 512 and size % 32 == 0
    sooner, later = compare([chosen, fixed])
    assert sooner.simulated < later.simulated


def test_cells_are_medians_of_warm_runs_that_went_as_they_were_meant_to(tmp_path: Path) -> None:
    runs = [
        one_run("own", 1.0, 560, "mapped", handoff_ms=spent_ms) for spent_ms in (900, 700, 2_000)
    ]
    runs += [
        one_run("own", 1.0, 560, "mapped", handoff_ms=9e9, first=True),
        one_run("own", 1.0, 560, "mapped", handoff_ms=9e9, path="recompute"),
    ]
    cases = read_cases([written(tmp_path, document(*runs, *AGAIN[:1]))], pair())
    assert [case.measured for case in cases] == [
        Measured(prompt_tokens=560, link_gbps=1.0, path="mapped", seconds=0.9, at="own")
    ]


def test_what_reading_a_length_again_takes_is_learned_from_the_other_lengths(
    tmp_path: Path,
) -> None:
    def simulated(own_ms: float) -> list[float]:
        again = [*AGAIN[:2], AGAIN[2] | {"handoff_ms": own_ms}]
        content = document(one_run("own", None, 560, "mapped"), *again)
        rows = compare(read_cases([written(tmp_path, content)], pair()))
        return [row.simulated for row in rows if getattr(row.measured, "path", "") == "recompute"]

    slow, slower = simulated(1e4), simulated(2e4)
    assert slow[2] == slower[2] == pytest.approx(read_s(6_061), rel=1e-6)
    assert slow[0] != slower[0] and slow[1] < slower[1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"runs": []}, "has no rates; `python bench/handoff.py --from"),
        (document(), "needs warm handoffs"),
        (
            document(one_run("own", None, 560, "mapped", bytes_written=5), *AGAIN),
            "measured with another large model than",
        ),
        (document({"place": "own"}), "runs.0.rate_gbps: Field required"),
        ([{"mappers": 1, "handoffs_per_s": 3.0}], "0.link_gbps: Field required"),
        ({"measured": [{"seconds": 0}]}, "0.prompt_tokens: Field required"),
        (7, "the file: Input should be"),
    ],
)
def test_a_file_that_says_too_little_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_cases([written(tmp_path, content)], pair())


def test_the_command_takes_several_files_at_once(tmp_path: Path) -> None:
    runs = [one_run("own", None, 560, "mapped"), one_run("own", 1.0, 560, "mapped")]
    handoffs = written(tmp_path, document(*runs, *AGAIN))
    loops = tmp_path / "scaling.json"
    row = MeasuredLoop(mappers=3, link_gbps=1, in_flight=12, tokens=960, handoffs_per_s=8)
    loops.write_text(json.dumps({"measured": [row.model_dump()]}))
    words = ["plan", "--simulate", "--measured", str(handoffs), "--measured", str(loops)]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "80"}).stdout
    assert "decision to first large token" in shown and "handoffs per second" in shown
    assert " of 6 agree within 25%" in shown
    answered = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [one["measured"].get("at") for one in answered[:2]] == ["own", "own"]
    assert answered[5]["measured"]["handoffs_per_s"] == 8


def test_a_listed_takeover_may_say_where_its_mapper_was(tmp_path: Path) -> None:
    rows = [
        {"prompt_tokens": 3_000, "link_gbps": 10, "path": "mapped", "seconds": 1, "at": at}
        for at in ("source", "target", "own")
    ]
    found = compare(read_cases([written(tmp_path, rows)], setup()))
    by_place = [
        lone_takeover(setup(rules={"place": place}, link_gbps=10.0), "handoff", 3_000).large_s
        for place in ("sender", "receiver", "apart")
    ]
    assert [row.simulated for row in found] == by_place and len(set(by_place)) == 3


def test_a_loop_of_the_pair_uses_the_pairs_costs() -> None:
    row = MeasuredLoop(mappers=1, link_gbps=10, in_flight=8, tokens=2_000, handoffs_per_s=1)
    (found,) = compare([Case(row, setup())])
    assert found.simulated == pytest.approx(10e9 / 8 / (2_000 * 262_144), rel=0.02)
