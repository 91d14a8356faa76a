"""The section of a page that says how far the simulation is from measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.fleet_measured import HEADING, quickstart, scaling_loops, section, with_section
from cluster.simulate_measured import Case, Compared, Measured, MeasuredLoop, compare


def takeover(seconds: float, simulated: float, at: str | None, path: str = "mapped") -> Compared:
    measured = Measured.model_validate(
        {"prompt_tokens": 2_120, "link_gbps": 0.1, "path": path, "seconds": seconds, "at": at}
    )
    return Compared(measured=measured, simulated=simulated, error=simulated / seconds - 1)


def test_a_section_has_a_column_for_each_place_and_names_what_is_far_off() -> None:
    loop = MeasuredLoop(mappers=3, link_gbps=1, in_flight=12, tokens=960, handoffs_per_s=8)
    rows = [
        takeover(2.0, 2.2, "source"),
        takeover(1.0, 1.5, "own"),
        takeover(6.0, 5.4, None, "recompute"),
        Compared(measured=loop, simulated=8.4, error=0.05),
    ]
    text = section(rows)
    assert "| 2,120 | 0.1 Gbit/s | 2.00 s, 2.20 s (+10%) | 1.00 s, 1.50 s (+50%) |" in text
    assert "Read again instead: 2,120 tokens 6.00 s, 5.40 s (-10%)." in text
    assert "| 960 | 1 Gbit/s | 3 | 12 | 8 | 8.4 | +5% |" in text
    assert "**3 of 4 agree within 25%.**" in text and "at most 50%" in text
    assert "Beyond 25%: 2,120, 0.1 Gbit/s, mapped, own, 1.00 s, 1.50 s, +50%." in text


def test_windows_of_a_scaling_run_become_loops(tmp_path: Path) -> None:
    def window(pair: str, mappers: int, handoffs: float) -> dict[str, Any]:
        return {
            "pair": pair,
            "rate_gbps": 0.5,
            "mappers": mappers,
            "in_flight": 4 * mappers,
            "seconds": 10.0,
            # 10 s of handoffs of 65.5 MB, and the frames around them.
            "delivered_gbps": handoffs / 10 * 65.536e6 * 8e-9 * 1_514 / 1_448,
            "handoffs": 99,
            "round": 0,
        }

    windows = [window("tiny", 1, 9), window("tiny", 3, 27), window("tiny", 1, 11)]
    windows.append(window("quickstart", 1, 99))
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps({"matrix": {"tokens": 2_000}, "windows": windows}))
    one, three = scaling_loops(path)
    assert (one.mappers, one.in_flight) == (1, 4)
    assert one.handoffs_per_s == pytest.approx(1.0)
    assert (three.mappers, three.handoffs_per_s) == (3, pytest.approx(2.7))
    alone, all_ = compare([Case(one, quickstart()), Case(three, quickstart())])
    # 65.5 MB each, and the frames around them, at 62.5 MB/s.
    assert alone.simulated == pytest.approx(62.5 / 65.536 * 1_448 / 1_514, rel=0.05)
    assert all_.simulated == pytest.approx(3 * alone.simulated, rel=0.05)
    path.write_text(json.dumps({"runs": []}))
    assert scaling_loops(path) == []


def test_a_section_takes_the_place_of_its_former_one() -> None:
    page = "# Page\n\ntext\n"
    once = with_section(page, f"{HEADING}\n\nold\n")
    assert once == f"# Page\n\ntext\n\n{HEADING}\n\nold\n"
    followed = once + "\n## After\n\nmore\n"
    assert with_section(followed, f"{HEADING}\n\nnew\n") == (
        f"# Page\n\ntext\n\n{HEADING}\n\nnew\n\n## After\n\nmore\n"
    )


def test_the_setting_is_the_quickstarts() -> None:
    made = quickstart()
    assert (made.source.layers, made.target.layers) == (15, 30)
    assert made.rules.chunk_tokens == 512
