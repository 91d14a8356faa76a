"""Image, Kubernetes and `ray up` manifests: they are what their readers accept, and all of them
deploy the application of ray_config.yaml on nodes that carry what it asks for.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from cluster.config import parse_cascade_config
from tests.conftest import REPOSITORY

CONFIG: dict[str, Any] = yaml.safe_load((REPOSITORY / "ray_config.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((REPOSITORY / "cluster/kuberay.yaml").read_text()))
SERVICE: dict[str, Any] = MANIFESTS[0]
CLUSTER: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster/ray_cluster.yaml").read_text())
DOCKERFILE = (REPOSITORY / "cluster/Dockerfile").read_text()
ROLES = ("small", "large", "mapper")


def groups() -> dict[str, dict[str, Any]]:
    found = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {group["groupName"]: group for group in found}


def demand(role: str) -> dict[str, float]:
    """What one replica of a role asks of its node."""
    cascade = parse_cascade_config(CONFIG["applications"][0]["args"])
    if role == "mapper":
        return {"GPU": cascade.mapper.num_gpus, **cascade.mapper.placement.resources}
    model = getattr(cascade, role)
    return {"GPU": model.tensor_parallel_size, **model.placement.resources}


def differences(left: Any, right: Any, key: str = "") -> Iterator[str]:
    """The keys at which two documents differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        for name in left | right:
            yield from differences(left.get(name), right.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from differences(*pair, f"{key}.{index}")
    elif left != right:
        yield f"{key}: {left!r} is not {right!r}"


def test_kubernetes_gets_the_application_of_ray_config() -> None:
    embedded = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
    assert list(differences(embedded, CONFIG)) == []


def test_a_changed_key_would_be_named() -> None:
    changed = copy.deepcopy(CONFIG)
    changed["applications"][0]["args"]["mapper"]["chunk_tokens"] = 7
    assert list(differences(changed, CONFIG)) == [
        "applications.0.args.mapper.chunk_tokens: 7 is not 1024"
    ]


def test_ray_serve_accepts_the_embedded_config() -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(SERVICE["spec"]["serveConfigV2"]))
    assert [application.name for application in schema.applications] == ["cascade"]


@pytest.mark.parametrize("role", ROLES)
def test_worker_pods_carry_what_a_replica_asks_for(role: str) -> None:
    group = groups()[role]
    (container,) = group["template"]["spec"]["containers"]
    # KubeRay passes the value on to a shell, so that the JSON is quoted once more.
    offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
    offered["GPU"] = container["resources"]["limits"]["nvidia.com/gpu"]
    assert all(offered[name] >= amount for name, amount in demand(role).items())
    assert offered["GPU"] == demand(role)["GPU"]
    assert container["resources"]["limits"] == container["resources"]["requests"]


def test_only_mapper_pods_need_the_folder_of_the_mapper() -> None:
    folder = CONFIG["applications"][0]["args"]["mapper"]["small_to_large"]
    assert folder.startswith("mappers/")
    for role, group in groups().items():
        (container,) = group["template"]["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert (mounts.get("mappers") == "/srv/kvcascade/mappers") == (role == "mapper")
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert volumes == set(mounts)
    assert "WORKDIR /srv/kvcascade\n" in DOCKERFILE


def test_every_pod_is_one_that_the_network_policy_covers() -> None:
    (policy,) = [one for one in MANIFESTS if one["kind"] == "NetworkPolicy"]
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    cluster = SERVICE["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"].items() >= chosen.items()
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    # Everybody reaches the endpoint alone.
    (public,) = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert public["ports"] == [{"port": CONFIG["http_options"]["port"]}]


def test_the_old_cluster_outlives_the_longest_answer() -> None:
    cascade = parse_cascade_config(CONFIG["applications"][0]["args"])
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] > cascade.router.request_timeout_s


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (ray,) = [one for one in project["optional-dependencies"]["gpu"] if one.startswith("ray[")]
    assert SERVICE["spec"]["rayClusterConfig"]["rayVersion"] == ray.partition("==")[2]


def test_ray_up_accepts_its_config() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(CLUSTER)))


@pytest.mark.parametrize("role", ROLES)
def test_node_types_carry_what_a_replica_asks_for(role: str) -> None:
    offered = CLUSTER["available_node_types"][role]["resources"]
    assert all(offered.get(name, 0) >= amount for name, amount in demand(role).items())


def test_ray_up_starts_ray_where_the_mapper_is_found() -> None:
    folder = CONFIG["applications"][0]["args"]["mapper"]["small_to_large"]
    assert CLUSTER["file_mounts"] == {f"/srv/kvcascade/{folder}": folder}
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert CLUSTER[key][1].startswith("cd /srv/kvcascade && ray start ")


def test_the_image_builds_from_files_that_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\./build\[(\w+)\]", DOCKERFILE)
    assert extras == ["gpu"] and set(extras) <= set(project["optional-dependencies"])
    used = re.findall(r" build/([\w.-]+)", DOCKERFILE)
    copied = re.findall(r"^COPY .*?([\w.]+) \./$", DOCKERFILE, re.MULTILINE)
    assert used == ["requirements-cpu.lock"] and copied == ["ray_config.yaml"]
    ignored = (REPOSITORY / "cluster/Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    sent = {line[1:] for line in ignored if line.startswith("!")}
    assert all((REPOSITORY / name).exists() for name in sent)
    packages = {"cluster", "deployments", "mappers", "router"}
    assert sent >= {*used, *copied, *packages, "pyproject.toml", "README.md", "LICENSE"}


def test_the_image_runs_without_root_and_watches_itself() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users[-1] == "10001"
    assert 'CMD ["kvcascade", "status"]' in DOCKERFILE
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", DOCKERFILE, re.MULTILINE)
    assert [name for _, name in stages] == ["base-gpu", "base-cpu", ""]
    assert stages[-1][0] == "base-${VARIANT}"
