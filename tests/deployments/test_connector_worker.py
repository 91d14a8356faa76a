"""Loads of an engine with two workers: over when both are, and whole or known to be broken.

The workers hear of finished WRITEs by script; what they report is put together by vLLM's own
aggregator, as its multi-process executor does.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from deployments.connector_scheduler import ConnectorSettings
from deployments.connector_worker import WorkerHalf
from deployments.messages import done_notification

pytestmark = pytest.mark.vllm

SETTINGS = ConnectorSettings(
    engine="large",
    host="127.0.0.1",
    ticket_address="ipc:///dev/null",
    lease_s=1.0,
    deadline_s=1.0,
    quarantine_s=1.0,
    max_pinned_fraction=0.5,
    native_suffix_tokens=1,
    progress_delay_us=1_000,
)


@dataclass
class ScriptedAgent:
    """Gives out the notifications that arrived since it was asked last, as NIXL does."""

    arrived: list[bytes] = field(default_factory=list)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        messages, self.arrived = self.arrived, []
        return {"mapper": messages} if messages else {}


class TwoWorkers:
    """Two worker halves and what vLLM's scheduler is told of them."""

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        self.agents = [ScriptedAgent(), ScriptedAgent()]
        self.workers = []
        for agent in self.agents:
            worker = WorkerHalf(SETTINGS, block_size_tokens=32, num_blocks=16)
            worker._agent = agent
            self.workers.append(worker)
        self._aggregator = KVOutputAggregator(expected_finished_count=2)

    def wrote(self, rank: int, handoff_id: str) -> None:
        self.agents[rank].arrived.append(done_notification(handoff_id))

    def step(
        self, loading: Mapping[str, str], failed: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[set[str], set[int]]:
        """One engine step: requests whose loads are over, and blocks without their data."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        outputs = []
        for worker in self.workers:
            received = worker.finished(loading, failed or {})
            report = KVConnectorOutput(
                finished_recving=received or None, invalid_block_ids=worker.take_errors()
            )
            output = ModelRunnerOutput.with_kv_conn_output_only(report)
            # Workers are processes: the aggregator changes copies of what they say.
            outputs.append(pickle.loads(pickle.dumps(output)))
        total = self._aggregator.aggregate(outputs)
        assert total is not None and total.kv_connector_output is not None
        told = total.kv_connector_output
        return told.finished_recving or set(), told.invalid_block_ids


def test_a_load_is_over_when_the_slower_worker_has_its_part() -> None:
    two = TwoWorkers()
    loading = {"r": "h", "s": "i"}
    two.wrote(0, "h")
    assert two.step(loading) == (set(), set())
    # The first worker says it once, however often the step comes round.
    assert two.step(loading) == (set(), set())
    two.wrote(0, "i")
    two.wrote(1, "h")
    assert two.step(loading) == ({"r"}, set())
    two.wrote(1, "i")
    assert two.step({"s": "i"}) == ({"s"}, set())
    assert two.step({}) == (set(), set())


def test_blocks_that_one_worker_never_got_are_reported_with_the_end_of_the_load() -> None:
    two = TwoWorkers()
    two.wrote(1, "h")
    assert two.step({"r": "h"}) == (set(), set())
    assert two.step({"r": "h"}, {"r": (3, 4)}) == ({"r"}, {3, 4})
    assert two.step({}) == (set(), set())


def test_an_aborted_load_ends_on_both_workers_without_broken_blocks() -> None:
    two = TwoWorkers()
    two.wrote(0, "h")
    assert two.step({"r": "h"}) == (set(), set())
    assert two.step({"r": "h"}, {"r": ()}) == ({"r"}, set())


def test_a_load_that_arrived_whole_stands_although_its_end_was_called_a_failure() -> None:
    two = TwoWorkers()
    two.wrote(0, "h")
    two.wrote(1, "h")
    assert two.step({"r": "h"}, {"r": (3, 4)}) == ({"r"}, set())


def test_a_request_that_loads_again_waits_for_both_workers_again() -> None:
    two = TwoWorkers()
    for rank in (0, 1):
        two.wrote(rank, "h")
    assert two.step({"r": "h", "s": "i"}) == ({"r"}, set())
    # Another load keeps the workers' books open meanwhile.
    assert two.step({"s": "i"}) == (set(), set())
    two.wrote(0, "j")
    assert two.step({"r": "j", "s": "i"}) == (set(), set())
    two.wrote(1, "j")
    assert two.step({"r": "j", "s": "i"}) == ({"r"}, set())
