"""When memory is flat and pools are empty, on samples that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.load import Outcome, Record
from bench.soak_memory import Resident, growths, process_name, short_lived, total_mb
from bench.soak_page import page, plot, problems
from bench.soak_runs import Measured, Pools, Soak, content_of, read

AT = range(0, 401, 50)
EMPTY = Pools(
    mapper_handoffs=0,
    mapper_bytes=0,
    pinned_blocks={"small": 0, "large": 0},
    loading_blocks={"small": 0, "large": 0},
    free_blocks={"small": 767, "large": 767},
)


def process(pid: int, *mb: float, name: str = "engine") -> list[Resident]:
    found = zip(AT, mb, strict=False)
    return [Resident(handoffs=at, pid=pid, name=name, mb=one) for at, one in found]


def measured(memory: list[Resident], *records: Record, after: Pools = EMPTY) -> Measured:
    return Measured(
        outcome=Outcome(list(records)),
        memory=memory,
        pools=[EMPTY, after],
        emptied_s=1.0,
        load_averages=[2.0, 5.0],
        seconds=240.0,
    )


def record(number: int = 0, **changes: Any) -> Record:
    one = Record(
        number=number, tokens=9, started_s=0.0, ended_s=1.0, path="mapped", handoff_ms=20.0 + number
    )
    return replace(one, **changes)


def test_what_a_process_takes_in_the_first_quarter_is_no_growth() -> None:
    (one,) = growths(process(1, 100, 900, 1_000, *[1_000] * 6))
    assert (one.first_mb, one.last_mb, one.fitted_mb, one.samples) == (1_000, 1_000, 0.0, 7)
    assert one.flat


def test_a_line_through_the_rest_is_the_growth() -> None:
    (one,) = growths(process(1, 0, 0, *(1_000 + 10 * step for step in range(7))))
    assert one.fitted_mb == pytest.approx(60.0)
    assert one.kb_per_handoff == pytest.approx(200.0)
    assert one.allowed_mb == 50.0 and not one.flat


@pytest.mark.parametrize(
    ("last", "flat"), [((1_000, 1_049), True), ((1_000, 1_051), False), ((100, 119), True)]
)
def test_a_twentieth_or_twenty_megabytes_are_allowed(last: tuple[float, float], flat: bool) -> None:
    low, high = last
    (one,) = growths(process(1, 0, 0, *(low + (high - low) * step / 6 for step in range(7))))
    assert one.flat is flat


def test_a_process_that_left_or_came_is_counted_and_not_judged() -> None:
    samples = process(1, *[100.0] * 9) + process(2, *[50.0] * 5)
    assert [one.pid for one in growths(samples)] == [1]
    assert short_lived(samples) == 1
    assert total_mb(samples)[0] == (0, 150.0) and total_mb(samples)[-1] == (400, 100.0)


def test_two_moments_are_no_line() -> None:
    with pytest.raises(ValueError, match="three or more"):
        growths(process(1, 1, 1))


@pytest.mark.parametrize(
    ("cmdline", "name"),
    [
        (b"ray::SERVE_REPLICA::a#large#x1:ServeReplica:a:large.__init__\0", "replica of large"),
        (b"ray::ServeReplica:cascade:mapper.handle_streaming\0\0\0", "replica of mapper"),
        (b"ray::ProxyActor.receive_asgi_messages\0", "ProxyActor"),
        (b"ray::IDLE\0\0", "IDLE"),
        (b"VLLM::EngineCore\0\0", "VLLM::EngineCore"),
        (b"/usr/bin/python3\0/a/b/netns_driver.py\0", "netns_driver.py"),
        (b"/a/b/raylet\0--x=1\0", "raylet"),
        (b"", "ended"),
    ],
)
def test_processes_are_known_by_a_short_name(cmdline: bytes, name: str) -> None:
    assert process_name(cmdline) == name


def test_a_failure_a_leak_and_a_lost_block_are_problems() -> None:
    flat = process(1, *[100.0] * 9)
    soak = Soak(handoffs=2)
    assert problems(soak, measured(flat, record(), record(1))) == []
    failed = measured(flat, record(error="500: gone"), record(path="recompute", reason="expired"))
    assert problems(soak, failed) == ["1 times 500: gone", "1 times recompute: expired"]
    assert problems(soak, measured(flat, record())) == ["1 of 2 requests were made"]
    lost = replace(EMPTY, free_blocks={"small": 767, "large": 766})
    (line,) = problems(soak, measured(flat, record(), record(), after=lost))
    assert line.startswith("pools are not as before") and "766" in line
    leak = process(1, *(100.0 + 10 * step for step in range(9)))
    assert problems(soak, measured(leak, record(), record())) == ["engine grew from 120 to 180 MB"]


def test_the_page_states_verdict_and_numbers_and_a_file_gives_it_again(tmp_path: Path) -> None:
    soak = Soak(handoffs=3)
    found = measured(process(1, *[200.0] * 9), record(), record(1), record(2))
    about = {"cpu": "a processor", "cores": 2}
    text = page(soak, found, about, "the command")
    assert "It held: no failure" in text
    assert "| engine | 1 | 200.0 | 200.0 | +0.0 | +0.0 | yes |" in text
    assert "| large: free blocks | 767 | 767 |" in text
    content = json.loads(json.dumps(content_of(soak, found, about)))
    assert page(Soak(**content["soak"]), read(content), about, "the command") == text
    plot(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_pools_are_read_from_the_status_of_all_replicas() -> None:
    engine = {"pinned_blocks": 1, "loading_blocks": 2, "free_blocks": 30}
    status = {
        "deployments": {
            "small": {"described": [engine, engine]},
            "large": {"described": [engine]},
            "mapper": {"described": [{"running": 2, "pool_in_use_bytes": 64}]},
        }
    }
    pools = Pools.of(status)
    assert (pools.mapper_handoffs, pools.mapper_bytes) == (2, 64)
    assert pools.free_blocks == {"small": 60, "large": 30}
    assert pools.pinned_blocks == {"small": 2, "large": 1}
