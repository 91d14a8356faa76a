"""Where `auto` puts a mapper: by bytes, and by links that say otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from cluster.config import parse_cascade_config
from cluster.errors import ConfigError
from cluster.links import At, Engine, Handoff, Link, MeasuredLinks, choose, read_links
from cluster.links_probe import Probe
from cluster.place import mapper_place, placement_at

QWEN3 = Handoff(
    source="small", target="large", read_bytes=163_840, written_bytes=262_144, chunk_tokens=1_024
)
BACK = Handoff(
    source="large", target="small", read_bytes=262_144, written_bytes=163_840, chunk_tokens=1_024
)
NEAR, FAR = 80.0, 10.0


def links(
    rates_gbps: Mapping[tuple[At, Engine], tuple[float, float]], latency_ms: float = 0.05
) -> MeasuredLinks:
    """Of (READ, WRITE) rates."""
    return MeasuredLinks(
        addresses={at: "10.0.0.1" for at, _ in rates_gbps},
        links=tuple(
            Link(at=at, engine=engine, read_gbps=read, write_gbps=write, latency_ms=latency_ms)
            for (at, engine), (read, write) in rates_gbps.items()
        ),
    )


def alike(own_gbps: float | None = FAR) -> dict[tuple[At, Engine], tuple[float, float]]:
    """Every node has the same link, and none to itself; `own` has one of its own rate."""
    rates: dict[tuple[At, Engine], tuple[float, float]] = {
        ("small", "small"): (NEAR, NEAR),
        ("small", "large"): (FAR, FAR),
        ("large", "small"): (FAR, FAR),
        ("large", "large"): (NEAR, NEAR),
    }
    if own_gbps is not None:
        rates |= {("own", "small"): (own_gbps, own_gbps), ("own", "large"): (own_gbps, own_gbps)}
    return rates


@pytest.mark.parametrize("measured", [None, links(alike())], ids=["unmeasured", "alike"])
@pytest.mark.parametrize("handoff", [QWEN3, BACK], ids=["to the large", "back"])
def test_a_mapper_is_beside_the_larger_cache_where_links_are_alike(
    handoff: Handoff, measured: MeasuredLinks | None
) -> None:
    assert choose(handoff, measured).at == "large"


def test_reasons_say_bytes_or_times() -> None:
    assert "163,840 B of KV per token" in choose(QWEN3, None).reason
    # 1,024 tokens of 163,840 bytes at 10 Gb/s, and of 262,144.
    reason = choose(QWEN3, links(alike(), latency_ms=1e-6)).reason
    assert "small 215 ms, large 134 ms, own 215 ms" in reason


def test_a_slow_way_into_the_targets_node_moves_the_mapper_to_the_source() -> None:
    # As behind a firewall, or with GPUDirect in one direction alone.
    rates = alike(own_gbps=None) | {("large", "small"): (1.0, FAR)}
    assert choose(QWEN3, links(rates)).at == "small"
    # The way back writes by that link, and WRITEs are as quick as ever.
    assert choose(BACK, links(rates)).at == "large"


def test_nodes_of_its_own_win_when_their_links_are_the_quicker_ones() -> None:
    assert choose(QWEN3, links(alike(own_gbps=40.0))).at == "own"


def test_a_difference_within_the_spread_of_measurements_moves_nothing() -> None:
    rates = alike() | {("own", "small"): (17.0, 17.0), ("own", "large"): (17.0, 17.0)}
    # 134 ms by bytes, 126 ms by these.
    assert choose(QWEN3, links(rates)).at == "large"


def test_latency_counts_once_a_chunk() -> None:
    rates = alike(own_gbps=None)
    near = links(rates).links
    far = tuple(
        one.model_copy(update={"latency_ms": 200.0}) if one.at == "large" else one for one in near
    )
    slow = MeasuredLinks(addresses={}, links=far)
    assert choose(QWEN3, slow).at == "small"


def test_links_without_the_node_that_matters_are_refused() -> None:
    rates = {key: value for key, value in alike().items() if key[0] != "large"}
    with pytest.raises(ConfigError, match=r"args\.mapper\.links: .*`large`.*kvcascade links"):
        choose(QWEN3, links(rates))


def test_a_file_of_links_is_what_was_written(tmp_path: Path) -> None:
    written, file = links(alike()), tmp_path / "links.json"
    file.write_text(written.model_dump_json())
    assert read_links(file) == written


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"links": [{"at": "moon"}]})])
def test_a_missing_or_wrong_file_is_one_line_that_names_the_key_and_the_remedy(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "links.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_links(file)
    message = str(caught.value)
    assert message.startswith("args.mapper.links: ") and str(file) in message
    assert "`kvcascade links`" in message and "\n" not in message


def test_places_that_the_file_names_need_no_model() -> None:
    models = {role: {"name": role, "source": "nowhere"} for role in ("small", "large")}
    mapper = {"small_to_large": "identity", "place": "source", "placement": {"num_cpus": 2}}
    cascade = parse_cascade_config({**models, "mapper": mapper})
    assert mapper_place(cascade, back=False).at == "small"
    assert mapper_place(cascade, back=True).at == "own"
    assert placement_at(cascade, "small").num_cpus == 2


def test_a_probe_measures_by_moving_the_buffer_of_another() -> None:
    mapper, engine = Probe(1_000), Probe(1_000)
    mapper._own[:] = 7
    _, buffer = engine.describe()
    read_gbps, write_gbps, latency_ms = mapper.measure(buffer)
    assert read_gbps > 0 and write_gbps > 0 and latency_ms > 0
    # The shortest READ that counts is so long, and brought what was there.
    assert (mapper._own[: 1 << 20] == 1).all()
    mapper._initiator.close()
