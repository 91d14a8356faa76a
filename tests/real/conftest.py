"""One real cascade for the whole session: three raylets, two vLLM engines, a mapper, a router."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.collector import Collector

NODES = ("small_node", "large_node", "mapper_node")


@dataclass
class RealCascade:
    """A deployed quickstart cascade; `document` is the Serve config that it runs."""

    url: str
    document: dict[str, Any]

    def describe(self, deployment: str) -> dict[str, Any]:
        """What a replica of a deployment says of itself."""
        from ray import serve

        handle = serve.get_deployment_handle(deployment, "cascade")
        answer: dict[str, Any] = handle.describe.remote().result(timeout_s=60)
        return answer

    def deploy(self, document: dict[str, Any]) -> None:
        """Apply a changed config, as `serve deploy` does, and wait until it runs."""
        from cluster.local import deploy

        deploy(document, timeout_s=300)
        self.document = document

    def with_mappers(self, replicas: int) -> dict[str, Any]:
        """The document with another number of mappers, and nothing else changed."""
        changed = deepcopy(self.document)
        (entry,) = changed["applications"][0]["deployments"]
        entry["num_replicas"] = replicas
        return changed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where every process of the cascade sends its spans."""
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="session")
def cascade(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[RealCascade]:
    """The quickstart config, its models and mapper on raylets of their own.

    Pools and deadlines are small, so that leaks show and tests of lost mappers end soon. The mapper
    back is fitted on so little text that it is good for nothing but moving bytes.
    """
    import ray
    from ray.cluster_utils import Cluster
    from rich.console import Console

    from cluster.fitting import fit_pair, fit_settings, prepare_quickstart
    from cluster.local import deploy, stop

    prepare_quickstart(Console())
    back = tmp_path_factory.mktemp("mappers") / "large-to-small"
    little = replace(fit_settings(k=1, support="head_local", tokens=2_048), heldout_tokens=512)
    fit_pair("large", "small", back, little, console=Console())
    document = yaml.safe_load((repository / "cluster/quickstart.yaml").read_text())
    document["http_options"]["port"] = free_port()
    args = document["applications"][0]["args"]
    for role, node in zip(("small", "large", "mapper"), NODES, strict=True):
        args[role]["placement"] = {"num_cpus": 0.1, "resources": {node: 0.01}}
    for role in ("small", "large"):
        args[role]["kv_pool_tokens"] = 9_216
        args[role]["max_num_seqs"] = 8
        args[role]["tool_call_parser"] = "hermes"
    args["mapper"]["large_to_small"] = str(back)
    args["sessions"] = {"shared": True}
    args["telemetry"] = {"otlp_endpoint": collector.url}
    args["handoff"] = {"deadline_s": 12.0, "quarantine_s": 1.0, "lease_s": 6.0}

    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False},
    )
    try:
        for name in NODES:
            nodes.add_node(num_cpus=1, resources={name: 1})
        ray.init(address=nodes.address, namespace="serve", log_to_driver=False)
        url = deploy(document, timeout_s=400)
        yield RealCascade(url, document)
    finally:
        stop()
        nodes.shutdown()
