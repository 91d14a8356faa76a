"""`kvcascade links` between nodes whose links have known rates."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from bench.netns_cluster import netns_cluster
from bench.netns_driver import cascade_document
from cluster.links import read_links

pytestmark = pytest.mark.multinode

RATES_GBPS = {"head": 2.0, "large": 0.5, "mapper": 1.0}
NODES = {"small": "head", "large": "large", "own": "mapper"}


def test_no_measured_rate_is_above_that_of_the_slower_link(tmp_path: Path) -> None:
    config, out = tmp_path / "config.yaml", tmp_path / "links.json"
    places = {"small": "head", "large": "large", "mapper": "mapper"}
    document = cascade_document(places)
    # `auto` looks at the configuration's own placements.
    (application,) = document["applications"]
    (entry,) = application.pop("deployments")
    application["args"]["mapper"] |= {"place": "auto", "placement": entry["ray_actor_options"]}
    config.write_text(yaml.safe_dump(document))
    with netns_cluster(3) as cluster:
        for node, rate in RATES_GBPS.items():
            cluster.network.limit(node, rate)
        command = ("kvcascade", "links", str(config), "--address", cluster.address)
        process = cluster.popen(*command, "--out", str(out), stdout=subprocess.PIPE)
        said, _ = process.communicate(timeout=120)
        addresses = {at: cluster.network.address(node) for at, node in NODES.items()}
    assert process.returncode == 0
    found = read_links(out)
    assert found.addresses == addresses
    assert len(found.links) == 6
    for link in found.links:
        slower = min(RATES_GBPS[NODES[link.at]], RATES_GBPS[NODES[link.engine]])
        for rate in (link.read_gbps, link.write_gbps):
            if link.at != link.engine:
                assert 0.1 * slower < rate < 1.02 * slower
            else:
                # What stays on a node passes no link.
                assert rate > slower
    # The large model's cache is the larger one, and neither way avoids its node's link.
    assert "mapper.place: auto is `large`: by measured links" in said
