"""How growth with mappers is judged, on windows whose rates are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.load import Outcome, Record, Sample
from bench.load_model import quickstart_document, transport_document
from bench.netns_cluster import HEAD, nodes_of
from bench.scaling import command_of, content_of, read
from bench.scaling_page import page, verdict
from bench.scaling_plot import plot
from bench.scaling_runs import Episode, Matrix, Measured, Window
from bench.scaling_table import change_of, rows_of
from cluster.config import CascadeConfig, load_serve_config


def window(mappers: int, delivered_gbps: float, **changes: Any) -> Window:
    one = Window(
        pair="tiny",
        rate_gbps=1.0,
        round=0,
        mappers=mappers,
        in_flight=4 * mappers,
        seconds=10.0,
        handoffs=round(10 * delivered_gbps),
        reasons=[],
        handoff_ms=2_000.0,
        delivered_gbps=delivered_gbps,
        mappers_gbps=[delivered_gbps / mappers] * mappers + [0.0] * (3 - mappers),
        own_cores=1.5,
        idle_cores=0.3,
        load_average=3.0,
    )
    return replace(one, **changes)


def episode(*running: int, small_pids: tuple[int, ...] = (1,), **changes: Any) -> Episode:
    records = [
        Record(number=n, tokens=9, started_s=float(n), ended_s=n + 1.0, path="mapped")
        for n in range(len(running))
    ]
    records[0] = replace(records[0], **changes)
    samples = [
        Sample(
            at_s=n + 0.5,
            replicas={"RUNNING": number},
            nodes=["n"] * number,
            handoffs=2,
            pids={"small": [small_pids[n % len(small_pids)]], "large": [2], "mapper": [3]},
        )
        for n, number in enumerate(running)
    ]
    return Episode(name="by hand", outcomes=[Outcome(records, samples)], events=[(1.5, "three")])


def test_growth_is_bytes_over_those_of_one_mapper_times_their_number() -> None:
    rows = rows_of([window(1, 0.8), window(1, 1.0), window(3, 2.0), window(3, 2.5, round=1)], 2)
    assert [row.mappers for row in rows] == [1, 3]
    assert rows[0].linearity == pytest.approx(1.0)
    assert rows[1].linearity == pytest.approx(2.25 / 2.7)
    assert rows[1].range_gbps == (2.0, 2.5)
    assert rows[1].range_per_s == (2.0, 2.5)
    assert rows[1].link_use == pytest.approx(0.75)
    assert (rows[1].rounds, rows[1].handoffs) == (2, 45)
    assert rows[1].other_cores == pytest.approx(0.2)


def test_each_rate_and_pair_is_compared_with_its_own_single_mapper() -> None:
    rows = rows_of(
        [
            window(1, 0.4, rate_gbps=0.5),
            window(3, 1.2, rate_gbps=0.5),
            window(1, 0.9),
            window(3, 1.8),
            window(3, 0.5, pair="quickstart"),
        ],
        2,
    )
    assert [(row.pair, row.linearity and round(row.linearity, 2)) for row in rows] == [
        ("tiny", 1.0),
        ("tiny", 1.0),
        ("tiny", 1.0),
        ("tiny", 0.67),
        ("quickstart", None),
    ]


@pytest.mark.parametrize(("three", "said"), [(2.17, "reached"), (2.15, "missed")])
def test_eight_tenths_of_linear_are_the_target(three: float, said: str) -> None:
    text = verdict(rows_of([window(1, 0.9), window(3, three)], 2))
    assert said in text
    assert ("the cores are the limit" in text) == (said == "missed")


def test_one_three_one_without_a_failure_is_good() -> None:
    change = change_of(episode(1, 1, 2, 3, 3, 2, 1))
    assert change.replicas == (1, 3, 1)
    assert change.good and change.requests == 7 and change.seconds == 7.0


@pytest.mark.parametrize(
    "bad",
    [
        episode(1, 3, 3),
        episode(1, 3, 1, error="500: gone"),
        episode(1, 3, 1, path="recompute", reason="mapper_gone"),
        episode(1, 3, 1, small_pids=(1, 7)),
    ],
)
def test_a_failure_a_fallback_or_a_new_engine_is_not(bad: Episode) -> None:
    assert not change_of(bad).good


def test_the_page_tells_failures_and_a_file_gives_the_same_page(tmp_path: Path) -> None:
    matrix = Matrix(rates_gbps=[1.0], rounds=1)
    windows = [
        window(1, 0.9),
        window(3, 1.8, reasons=["recompute: no_ticket"]),
        window(1, 0.1, pair="quickstart"),
    ]
    found = Measured(windows, [episode(1, 3, 1, error="500: gone")], [2.0, 5.0], 300.0)
    about = {"cpu": "a processor", "cores": 2}

    def text_of(measured: Measured) -> str:
        rows = rows_of(measured.windows, 2)
        changes = [change_of(one) for one in measured.episodes]
        return page(rows, changes, matrix, about, measured.load_averages, 300.0, "the command")

    text = text_of(found)
    assert "3 mappers do 0.67 of 3 times one (target 0.8: missed)" in text
    assert "1 requests were not mapped: recompute: no_ticket." in text
    assert "3 requests, 1 failed, 0 read again (500: gone)" in text
    assert "load average 2.0 to 5.0" in text and "The quickstart pair" in text
    assert text_of(read(json.loads(json.dumps(content_of(matrix, found, about))))) == text
    plot(rows_of(windows, 2), found.episodes, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize(("count", "mappers"), [(3, 1), (4, 1), (5, 2), (6, 3)])
def test_a_layout_has_small_and_large_and_the_rest_for_mappers(count: int, mappers: int) -> None:
    nodes = nodes_of(count)
    assert len(nodes) == count and nodes[0].name == HEAD
    assert sum("mapper_node" in node.offered for node in nodes) == mappers
    assert sum("small_node" in node.offered for node in nodes) == 1
    assert len({node.name for node in nodes}) == count


def test_the_page_names_the_command_that_measured_it() -> None:
    assert command_of(Matrix()) == "python bench/scaling.py"
    other = Matrix(rates_gbps=[0.25, 1.0], in_flight_per_mapper=3, window_s=5.0, episodes=False)
    assert command_of(other) == (
        "python bench/scaling.py --rate 0.25 --rate 1 --window-s 5 --in-flight 3 --no-episodes"
    )


@pytest.mark.parametrize("count", [2, 7])
def test_there_are_no_other_layouts(count: int) -> None:
    with pytest.raises(ValueError, match="3 to 6"):
        nodes_of(count)


def test_configs_of_a_fixed_and_of_a_scaling_number_of_mappers_are_valid(tmp_path: Path) -> None:
    def checked(document: dict[str, Any]) -> CascadeConfig:
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps(document))
        return load_serve_config(path)[1]

    fixed = checked(transport_document(tmp_path, mappers=3))
    # A whole one of what each mapper node offers once: no two mappers share a link.
    assert fixed.mapper.placement.resources == {"mapper_node": 1.0}
    assert fixed.mapper.scaling.max_replicas is None
    scaled = checked(transport_document(tmp_path, mappers=None, scaling={"max_replicas": 3}))
    assert scaled.mapper.scaling.max_replicas == 3
    assert checked(quickstart_document(mappers=3)).mapper.small_to_large == "quickstart"
