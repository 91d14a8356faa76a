"""A changed configuration is deployed while answers stream: none is cut, none is refused."""

from __future__ import annotations

from copy import deepcopy

import pytest

from bench.upgrade_runs import Wish, replicas, upgrade
from tests.real.conftest import RealCascade

pytestmark = pytest.mark.real

WISHES = (
    Wish("small", 700),
    Wish("large", 500),
    Wish("cascade", 550, escalate_after_tokens=250),
)


def test_streams_outlive_the_router_and_the_mapper_that_they_began_with(
    cascade: RealCascade,
) -> None:
    # Options under `deployments:` restart these two; a change of `args` would restart the engines.
    document = deepcopy(cascade.document)
    (mapper,) = document["applications"][0]["deployments"]
    mapper["ray_actor_options"] = {"num_cpus": 0.1, "resources": {"mapper_node": 0.02}}
    router = {"name": "router", "ray_actor_options": {"num_cpus": 0.2}}
    document["applications"][0]["deployments"].append(router)
    before = replicas()

    done = upgrade("router and mapper", document, cascade.url, WISHES, seed=900)
    cascade.document = document

    assert [heard.fault for heard in done.streams] == [None] * len(WISHES)
    assert len(done.arrivals) > len(WISHES)
    assert [heard.fault for heard in done.arrivals if heard.fault is not None] == []
    assert done.replaced == ["mapper", "router"]
    # What was replaced is gone, and only that.
    after = replicas()
    assert {name: len(pids) for name, pids in after.items()} == dict.fromkeys(before, 1)
    kept = {name for name, pids in after.items() if pids == before[name]}
    assert kept == set(before) - {"mapper", "router"}
