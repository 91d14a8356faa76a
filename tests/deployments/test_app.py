"""The builder: what Serve is asked for, and that building stays light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app

from cluster.errors import ConfigError
from deployments.app import DEPLOYMENTS, build_cascade_app

CPU_MODEL = {"accelerator": "cpu", "source": "x", "max_model_len_tokens": 64}


def args(**changes: Any) -> dict[str, Any]:
    return {
        "small": {"name": "s", **CPU_MODEL},
        "large": {"name": "l", **CPU_MODEL},
        "mapper": {"small_to_large": "identity"},
        **changes,
    }


def built(config: dict[str, Any]) -> dict[str, Any]:
    app = build_app(build_cascade_app(config), name="a")
    return {deployment.name: deployment for deployment in app.deployments}


def test_the_application_has_exactly_the_documented_deployments() -> None:
    mapper = {"small_to_large": "identity", "large_to_small": "identity"}
    everything = args(mapper=mapper, sessions={"shared": True})
    assert sorted(built(everything)) == sorted(DEPLOYMENTS)


def test_what_the_config_does_not_ask_for_is_not_deployed() -> None:
    assert sorted(built(args())) == ["large", "mapper", "router", "small"]


def test_every_engine_gets_a_bundle_per_gpu_with_its_resources_in_the_first() -> None:
    large = {
        "name": "l",
        "source": "x",
        "tensor_parallel_size": 2,
        "accelerator_type": "H200",
        "placement": {"num_cpus": 1, "resources": {"large_node": 0.01}},
    }
    config = built(args(large=large))["large"]._replica_config
    gpu = {"GPU": 1.0, "accelerator_type:H200": 0.001}
    assert config.placement_group_bundles == [{"CPU": 1.0, "large_node": 0.01, **gpu}, gpu]


def test_labels_choose_the_node_of_every_bundle() -> None:
    model = {"name": "s", **CPU_MODEL, "placement": {"label_selector": {"role": "small"}}}
    config = built(args(small=model))["small"]._replica_config
    assert config.placement_group_bundle_label_selector == [{"role": "small"}]
    assert "label_selector" not in config.ray_actor_options


def test_a_mapper_takes_as_many_calls_as_it_may_queue() -> None:
    mapper = {
        "small_to_large": "identity",
        "max_concurrent_handoffs": 3,
        "max_queued_handoffs": 5,
        "num_gpus": 1,
    }
    deployment = built(args(mapper=mapper))["mapper"]
    assert deployment._deployment_config.max_ongoing_requests == 8
    assert deployment._replica_config.ray_actor_options["num_gpus"] == 1


@pytest.mark.parametrize(
    ("changes", "drain_s"),
    [
        ({}, 600.0),
        ({"router": {"request_timeout_s": 90.0}}, 90.0),
        ({"upgrade": {"drain_s": 45.0}}, 45.0),
        ({"upgrade": {"drain_s": 5.0}, "handoff": {"deadline_s": 17.0}}, 17.0),
    ],
)
def test_a_replaced_replica_has_time_for_the_longest_answer_and_for_a_whole_handoff(
    changes: dict[str, Any], drain_s: float
) -> None:
    mapper = {"small_to_large": "identity", "large_to_small": "identity"}
    everything = built(args(mapper=mapper, sessions={"shared": True}, **changes))
    assert sorted(everything) == sorted(DEPLOYMENTS)
    for deployment in everything.values():
        assert deployment._deployment_config.graceful_shutdown_timeout_s == drain_s


@pytest.mark.parametrize(("start_first", "percent"), [(True, 1), (False, 0)])
def test_a_new_replica_of_every_deployment_comes_before_an_old_one_goes(
    start_first: bool, percent: int
) -> None:
    for deployment in built(args(upgrade={"start_first": start_first})).values():
        assert deployment._deployment_config.max_surge_percent == percent


def test_a_wrong_key_is_one_line_that_names_it() -> None:
    with pytest.raises(ConfigError) as caught:
        build_cascade_app(args(rooter={}))
    assert str(caught.value) == "args.rooter: unknown key; remove it or correct its spelling"


@pytest.mark.parametrize("file", ["ray_config.yaml", "cluster/quickstart.yaml"])
def test_building_a_shipped_config_imports_neither_vllm_nor_torch(
    repository: Path, file: str
) -> None:
    document = yaml.safe_load((repository / file).read_text())
    code = (
        "import sys, json\n"
        "from deployments.app import build_cascade_app\n"
        f"build_cascade_app({document['applications'][0]['args']!r})\n"
        "print([name for name in ('vllm', 'torch', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_mappers_scale_by_themselves_only_when_asked_to() -> None:
    fixed = built(args())["mapper"]._deployment_config
    assert fixed.autoscaling_config is None
    mapper = {"small_to_large": "identity", "scaling": {"max_replicas": 3}}
    scaled = built(args(mapper=mapper))["mapper"]._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.max_replicas) == (1, 3)


def test_engines_are_reached_by_conversation() -> None:
    for role in ("small", "large"):
        router = built(args())[role]._deployment_config.request_router_config
        assert router.get_request_router_class().__name__ == "SessionRouter"


@pytest.mark.parametrize(
    ("place", "back", "node"),
    [
        ("own", False, "mapper_node"),
        ("source", False, "small_node"),
        ("target", False, "large_node"),
        ("source", True, "large_node"),
        ("auto", False, "large_node"),
        ("auto", True, "large_node"),
    ],
)
def test_a_mapper_runs_where_it_is_put(
    place: str, back: bool, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv_bytes = {"small-model": 163_840, "large-model": 262_144}
    monkeypatch.setattr("cluster.place.kv_bytes_per_token", lambda source, _: kv_bytes[source])
    models = {
        role: {
            **CPU_MODEL,
            "name": role,
            "source": f"{role}-model",
            "placement": {"num_cpus": 3, "resources": {f"{role}_node": 0.01}},
        }
        for role in ("small", "large")
    }
    mapper = {
        "small_to_large": "identity",
        "large_to_small": "identity",
        "place_back" if back else "place": place,
        "placement": {"num_cpus": 0.5, "resources": {"mapper_node": 0.01}},
    }
    name = "mapper_back" if back else "mapper"
    options = built(args(mapper=mapper, **models))[name]._replica_config.ray_actor_options
    assert options["resources"] == {node: 0.01} and options["num_cpus"] == 0.5


def test_auto_goes_by_measured_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.place.kv_bytes_per_token", lambda *_: 100_000)
    file = tmp_path / "links.json"
    rates = {"small": 10.0, "large": 1.0, "own": 5.0}
    links = [
        {"at": at, "engine": engine, "read_gbps": rate, "write_gbps": rate, "latency_ms": 0.1}
        for at, rate in rates.items()
        for engine in ("small", "large")
    ]
    addresses = dict.fromkeys(rates, "10.0.0.1")
    file.write_text(json.dumps({"addresses": addresses, "links": links}))
    small = {"name": "s", **CPU_MODEL, "placement": {"resources": {"small_node": 0.01}}}
    mapper = {"small_to_large": "identity", "place": "auto", "links": str(file)}
    deployment = built(args(small=small, mapper=mapper))["mapper"]
    assert deployment._replica_config.ray_actor_options["resources"] == {"small_node": 0.01}
