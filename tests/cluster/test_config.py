from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import CascadeConfig, load_serve_config, parse_cascade_config
from cluster.errors import ConfigError

ARGS: dict[str, Any] = {
    "small": {"name": "s", "source": "/models/s"},
    "large": {"name": "l", "source": "/models/l"},
    "mapper": {"small_to_large": "identity"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """ARGS with one key, written as `large.dtype`, set to another value."""
    args = {key: dict(part) for key, part in ARGS.items()}
    section, _, key = path.partition(".")
    args.setdefault(section, {})[key] = value
    return args


def test_the_least_configuration_is_three_names_and_three_sources() -> None:
    config = parse_cascade_config(ARGS)
    assert config.cascade_name == "cascade"
    assert config.large.block_size_tokens == 32
    assert config.handoff.min_handoff_tokens == 64


def test_a_configuration_is_the_same_after_a_trip_through_json() -> None:
    config = parse_cascade_config(ARGS)
    assert parse_cascade_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("large.dtyp", "float16", "args.large.dtyp: unknown key"),
        ("large.dtype", "float16", "small.dtype bfloat16 differs from large.dtype float16"),
        ("large.name", "s", "need different names"),
        ("large.name", "cascade", "need different names"),
        ("small.kv_pool_tokens", 4096, "one full request would never fit"),
        ("small.engine_kwargs", {"max_model_len": 1}, "set `max_model_len_tokens` instead"),
        ("small.engine_kwargs", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8: mappers read"),
        ("large.engine_kwargs", {"hf_overrides": {}}, "change the model's config.json instead"),
        ("transport.ucx_env", {"PATH": "x"}, "only variables named UCX_* belong here"),
        ("handoff.max_pinned_fraction", 1.5, "args.handoff.max_pinned_fraction:"),
        ("handoff.lease_s", 0, "args.handoff.lease_s:"),
        ("routing.policy", "magic", "args.routing.policy:"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="args") as caught:
        parse_cascade_config(changed(path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ({"target_fraction": 0.3}, "args.routing: target_fraction needs `calibration`"),
        ({"calibration": "c", "margin_threshold": 1}, "both set a threshold"),
        ({"policy": "random"}, "policy random needs `target_fraction`"),
        ({"policy": "small", "target_fraction": 0.3}, "`small` is a fixed choice"),
        ({"policy": "deferral", "hold_back_tokens": 0}, "raise hold_back_tokens"),
        ({"log_margins": True}, "log_margins needs `log_file`"),
        ({"policy": "small", "budget_large_tokens": 9}, "`small` never escalates"),
        ({"policy": "large", "sticky_cost": 1}, "`large` has no threshold to move"),
        ({"drift_step": 0.1}, "drift_step needs `calibration`"),
        ({"shadow_fraction": 0.1}, "shadow_fraction needs `log_file`"),
    ],
)
def test_routing_keys_that_contradict_are_refused_in_one_line(
    routing: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cascade_config({**ARGS, "routing": routing})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_dumped_configuration_reads_as_itself_and_keeps_the_default_threshold() -> None:
    cascade = parse_cascade_config({**ARGS, "routing": {"calibration": "c.json"}})
    assert parse_cascade_config(cascade.model_dump(mode="json")) == cascade
    default = parse_cascade_config(ARGS).routing
    assert (default.policy, default.margin_window_tokens) == ("margin", 8)
    assert (default.threshold_of("margin"), default.threshold_of("prompt")) == (0.35, -3.0)


def test_a_cpu_engine_takes_blocks_of_a_multiple_of_32_tokens_only() -> None:
    args = changed("small.accelerator", "cpu")
    args["small"]["block_size_tokens"] = 48
    with pytest.raises(ConfigError, match="multiple of 32"):
        parse_cascade_config(args)
    assert parse_cascade_config(changed("small.block_size_tokens", 48)).small.accelerator == "gpu"


def test_every_fault_is_named_at_once() -> None:
    args = changed("large.nmae", "x")
    del args["large"]["name"], args["mapper"]["small_to_large"]
    with pytest.raises(ConfigError) as caught:
        parse_cascade_config(args)
    assert sorted(str(caught.value).splitlines()) == [
        "args.large.name: missing; add it",
        "args.large.nmae: unknown key; remove it or correct its spelling",
        "args.mapper.small_to_large: missing; add it",
    ]


@pytest.mark.parametrize("name", ["ray_config.yaml", "cluster/quickstart.yaml"])
def test_the_files_that_ship_are_configurations(repository: Path, name: str) -> None:
    document, config = load_serve_config(repository / name)
    assert config.small.name != config.large.name
    (deployment,) = document["applications"][0]["deployments"]
    assert deployment == {"name": "mapper", "num_replicas": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not YAML"),
        ("- 1", "`applications:` is missing"),
        (yaml.safe_dump({"applications": [{"import_path": "x:y"}]}), "no application has"),
    ],
)
def test_a_file_that_is_no_serve_config_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_serve_config(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_serve_config(Path("nowhere.yaml"))


def test_every_key_has_a_description_or_is_a_section() -> None:
    def lacking(model: Any, prefix: str) -> list[str]:
        names = []
        for name, field in model.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                names += lacking(field.annotation, f"{prefix}{name}.")
            elif not field.description:
                names.append(prefix + name)
        return names

    assert lacking(CascadeConfig, "") == []


def test_two_places_cannot_both_say_how_many_mappers(tmp_path: Path) -> None:
    quickstart = Path(__file__).parents[2] / "cluster" / "quickstart.yaml"
    document = yaml.safe_load(quickstart.read_text())
    document["applications"][0]["args"]["mapper"]["scaling"] = {"max_replicas": 3}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=r"deployments\.mapper sets replicas and so does"):
        load_serve_config(path)


def with_router(tmp_path: Path, user_config: Any) -> Path:
    quickstart = Path(__file__).parents[2] / "cluster" / "quickstart.yaml"
    document = yaml.safe_load(quickstart.read_text())
    router = {"name": "router", "user_config": user_config}
    document["applications"][0]["deployments"].append(router)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_the_routers_own_routing_counts(tmp_path: Path) -> None:
    routing = {"policy": "random", "target_fraction": 0.5}
    _, config = load_serve_config(with_router(tmp_path, {"routing": routing}))
    assert (config.routing.policy, config.routing.target_fraction) == ("random", 0.5)
    _, config = load_serve_config(with_router(tmp_path, None))
    assert config.routing.policy == "margin"


def test_a_wrong_key_of_the_routers_own_is_named(tmp_path: Path) -> None:
    path = with_router(tmp_path, {"routing": {"margin_treshold": 1.0}})
    with pytest.raises(ConfigError) as caught:
        load_serve_config(path)
    assert str(caught.value) == (
        "deployments.router.user_config.routing.margin_treshold: unknown key; remove it or correct "
        "its spelling"
    )
