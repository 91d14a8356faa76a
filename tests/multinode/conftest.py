"""One cascade over three namespaces, and the reason where there can be none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bench.netns_cluster import NetnsCluster, netns_cluster
from bench.netns_driver import Driver, cascade_document, driver
from bench.netns_network import missing

RATE_GBPS = 1.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `multinode` run where namespaces can be made; elsewhere they say why not."""
    reason = missing()
    for item in items:
        if reason is not None and item.get_closest_marker("multinode"):
            item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Deployed:
    """The quickstart cascade: router and small model on the head, the others on their nodes."""

    cluster: NetnsCluster
    driver: Driver
    document: dict[str, Any]


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """Three nodes behind links of RATE_GBPS, deployed as their roles' resources say."""
    from rich.console import Console

    from cluster.fitting import prepare_quickstart

    prepare_quickstart(Console())
    places = {"small": "head", "large": "large", "mapper": "mapper"}
    with netns_cluster(3, rate_gbps=RATE_GBPS) as cluster, driver(cluster) as one:
        document = cascade_document(places)
        one.deploy(document)
        yield Deployed(cluster, one, document)
