"""NIXL between two agents of this process: what the initiator promises."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from cluster.errors import TransportError
from cluster.transport import Initiator, Peer, make_agent

SIZE = 4_096


class Passive:
    def __init__(self) -> None:
        self.memory = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
        self.name = f"passive-{uuid.uuid4().hex}"
        self.agent: Any = make_agent(self.name, progress_thread=True, progress_delay_us=1_000)
        self.agent.register_memory([(self.memory.data_ptr(), SIZE, 0, "")], "DRAM")
        self.peer = Peer(name=self.name, metadata=self.agent.get_agent_metadata(), memory="DRAM")


@pytest.fixture
def passive() -> Passive:
    return Passive()


@pytest.fixture
def active() -> Iterator[tuple[Initiator, torch.Tensor]]:
    pool = torch.zeros(SIZE, dtype=torch.uint8)
    initiator = Initiator(
        f"active-{uuid.uuid4().hex}",
        pool_address=pool.data_ptr(),
        pool_bytes=SIZE,
        memory="DRAM",
    )
    yield initiator, pool
    initiator.close()


def one(tensor: torch.Tensor, start: int, length: int) -> np.ndarray:
    return np.array([[tensor.data_ptr() + start, length, 0]], dtype=np.uint64)


def test_a_read_brings_just_the_bytes_it_names(
    passive: Passive, active: tuple[Initiator, torch.Tensor]
) -> None:
    initiator, pool = active
    assert initiator.connect(passive.peer).result(5) is True
    transfer = initiator.post(
        "READ", one(pool, 100, 50), one(passive.memory, 300, 50), passive.peer
    ).result(5)
    assert transfer.bytes == 50
    assert torch.equal(pool[100:150], passive.memory[300:350])
    assert not pool[:100].any() and not pool[150:].any()


def test_a_notification_arrives_with_its_data(
    passive: Passive, active: tuple[Initiator, torch.Tensor]
) -> None:
    initiator, pool = active
    initiator.connect(passive.peer).result(5)
    pool.fill_(7)
    initiator.post(
        "WRITE", one(pool, 0, 64), one(passive.memory, 0, 64), passive.peer, b"note"
    ).result(5)
    notes: list[bytes] = []
    for _ in range(1_000):
        notes = [note for many in passive.agent.get_new_notifs().values() for note in many]
        if notes:
            break
    assert notes == [b"note"]
    assert (passive.memory[:64] == 7).all() and passive.memory[64] == 64


def test_a_second_connect_is_warm_and_forgetting_makes_it_cold(
    passive: Passive, active: tuple[Initiator, torch.Tensor]
) -> None:
    initiator, _ = active
    assert initiator.connect(passive.peer).result(5) is True
    assert initiator.connect(passive.peer).result(5) is False
    initiator.forget(passive.name)
    assert initiator.connect(passive.peer).result(5) is True


def test_memory_that_was_never_registered_is_refused(
    passive: Passive, active: tuple[Initiator, torch.Tensor]
) -> None:
    initiator, pool = active
    initiator.connect(passive.peer).result(5)
    elsewhere = torch.zeros(64, dtype=torch.uint8)
    future = initiator.post("WRITE", one(pool, 0, 64), one(elsewhere, 0, 64), passive.peer)
    with pytest.raises(TransportError, match="write"):
        future.result(5)


def test_transfers_of_one_way_move_one_after_another_past_one_that_fails(
    passive: Passive, active: tuple[Initiator, torch.Tensor]
) -> None:
    initiator, pool = active
    initiator.connect(passive.peer).result(5)
    elsewhere = torch.zeros(8, dtype=torch.uint8)
    spans = [(passive.memory, at * 400) for at in range(10)]
    spans[4] = (elsewhere, 0)
    posted = [
        initiator.post("READ", one(pool, at * 400, 8), one(memory, start, 8), passive.peer)
        for at, (memory, start) in enumerate(spans)
    ]
    with pytest.raises(TransportError):
        posted.pop(4).result(5)
    moved = [future.result(5) for future in posted]
    assert all(first.ended <= then.started for first, then in pairwise(moved))
    assert pool[3_600:3_608].tolist() == passive.memory[3_600:3_608].tolist() != [0] * 8


def test_garbage_metadata_is_a_transport_error(
    active: tuple[Initiator, torch.Tensor],
) -> None:
    initiator, _ = active
    peer = Peer(name="nobody", metadata=b"garbage", memory="DRAM")
    with pytest.raises(TransportError, match="connect"):
        initiator.connect(peer).result(5)


def test_a_posted_transfer_cannot_be_cancelled(
    passive: Passive, active: tuple[Initiator, torch.Tensor]
) -> None:
    initiator, pool = active
    initiator.connect(passive.peer).result(5)
    future = initiator.post("READ", one(pool, 0, SIZE), one(passive.memory, 0, SIZE), passive.peer)
    assert future.cancel() is False
    assert future.result(5).bytes == SIZE


def test_close_waits_for_what_is_in_flight(passive: Passive) -> None:
    pool = torch.zeros(SIZE, dtype=torch.uint8)
    initiator = Initiator(
        f"active-{uuid.uuid4().hex}",
        pool_address=pool.data_ptr(),
        pool_bytes=SIZE,
        memory="DRAM",
    )
    initiator.connect(passive.peer).result(5)
    future = initiator.post("READ", one(pool, 0, SIZE), one(passive.memory, 0, SIZE), passive.peer)
    initiator.close()
    assert future.done() and torch.equal(pool, passive.memory)
