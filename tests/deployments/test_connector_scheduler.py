"""The scheduler half without vLLM: requests are plain objects, peers are sockets."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from deployments.connector_scheduler import ConnectorSettings, SchedulerHalf
from deployments.messages import (
    Abandon,
    Claim,
    EngineLayout,
    NoTicket,
    Release,
    Settled,
    TargetBlocks,
    Ticket,
    WorkerLayout,
    decode,
    encode,
)

pytestmark = pytest.mark.vllm


class Peer:
    """A socket that the half sends to: the replica's ticket desk or a mapper."""

    def __init__(self, kind: int, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 3_000)
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def next(self) -> Any:
        return decode(self._socket.recv_multipart()[-1])

    def close(self) -> None:
        self._context.destroy()


class Half:
    """A scheduler half of a pool of 100 blocks of 32 tokens, with both of its peers."""

    def __init__(self, lease_s: float = 5.0, silence_s: float = 5.0) -> None:
        self.desk = Peer(zmq.PULL, f"ipc:///tmp/kvcascade-test-{uuid.uuid4().hex}")
        self.mapper = Peer(zmq.ROUTER, "tcp://127.0.0.1:*")
        settings = ConnectorSettings(
            engine="small",
            host="127.0.0.1",
            ticket_address=self.desk.address,
            lease_s=lease_s,
            deadline_s=silence_s / 2,
            quarantine_s=silence_s / 2,
            max_pinned_fraction=0.25,
            native_suffix_tokens=1,
            progress_delay_us=1_000,
        )
        self.half = SchedulerHalf(settings, block_size_tokens=32, num_blocks=100)
        self.half.set_layouts((WORKER,))
        layout = self.desk.next()
        assert isinstance(layout, EngineLayout)
        self.control = layout.control_address

    def ask(self, message: Any, *, answer: bool = True) -> Any:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, 3_000)
        socket.connect(self.control)
        socket.send(encode(message))
        try:
            return decode(socket.recv()) if answer else None
        finally:
            socket.close()
            context.term()

    def close(self) -> None:
        self.half.close()
        self.desk.close()
        self.mapper.close()


WORKER = WorkerLayout(
    rank=0,
    agent_name="a",
    agent_metadata=b"m",
    memory="DRAM",
    device_id=0,
    dtype="bfloat16",
    layer_addresses=(0, 1),
    num_blocks=100,
    block_stride_bytes=1,
    block_size_tokens=32,
    kv_heads=2,
    head_dim=8,
    permutation=None,
)


@pytest.fixture
def half() -> Iterator[Half]:
    made = Half()
    yield made
    made.close()


def request(
    *,
    computed: int = 100,
    in_flight: int = 0,
    tokens: int = 101,
    prompt: int = 90,
    params: dict[str, Any] | None = None,
    aborted: bool = False,
) -> Any:
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        request_id=uuid.uuid4().hex,
        kv_transfer_params=params,
        num_computed_tokens=computed,
        num_in_flight_tokens=in_flight,
        num_tokens=tokens,
        num_prompt_tokens=prompt,
        all_token_ids=list(range(tokens)),
        status=(
            RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_LENGTH_CAPPED
        ),
    )


def keep(rule: str = "always") -> dict[str, Any]:
    return {"keep": {"ticket_id": uuid.uuid4().hex, "rule": rule}}


def handoff(half: Half, covered: int = 90) -> dict[str, Any]:
    return {
        "handoff": {
            "handoff_id": uuid.uuid4().hex,
            "mapper_address": half.mapper.address,
            "covered_tokens": covered,
        }
    }


def test_a_ticket_covers_what_was_read_and_not_the_last_sampled_token(half: Half) -> None:
    ended = request(computed=100, tokens=101, params=keep())
    assert half.half.finished(ended, [5, 6, 7, 8, 9]) is True
    ticket = half.desk.next()
    assert isinstance(ticket, Ticket)
    assert len(ticket.token_ids) == 100 and ticket.block_ids == (5, 6, 7, 8)


def test_tokens_of_a_step_in_flight_are_not_covered(half: Half) -> None:
    half.half.finished(request(computed=100, in_flight=5, params=keep()), [5, 6, 7, 8])
    ticket = half.desk.next()
    assert len(ticket.token_ids) == 95 and ticket.block_ids == (5, 6, 7)


@pytest.mark.parametrize(("aborted", "kept"), [(True, True), (False, False)])
def test_the_rule_on_abort_keeps_only_what_was_aborted(
    half: Half, aborted: bool, kept: bool
) -> None:
    ended = request(params=keep("on_abort"), aborted=aborted)
    assert half.half.finished(ended, [1, 2, 3, 4]) is kept
    assert isinstance(half.desk.next(), Ticket if kept else NoTicket)


def test_a_request_that_was_never_read_keeps_nothing(half: Half) -> None:
    assert half.half.finished(request(computed=0, params=keep(), aborted=True), []) is False
    assert isinstance(half.desk.next(), NoTicket)


def test_a_release_frees_exactly_once_and_says_whether_the_blocks_were_held(half: Half) -> None:
    ended = request(params=keep())
    half.half.finished(ended, [1, 2, 3, 4])
    ticket = half.desk.next()
    assert half.ask(Release(ticket_id=ticket.ticket_id)).held is True
    assert half.ask(Release(ticket_id=ticket.ticket_id)).held is False
    assert half.half.step()[0] == [ended.request_id]
    assert half.half.step()[0] == []


def test_a_lease_that_runs_out_frees_the_blocks_and_later_claims_are_told() -> None:
    half = Half(lease_s=0.05)
    ended = request(params=keep())
    half.half.finished(ended, [1, 2, 3, 4])
    ticket = half.desk.next()
    time.sleep(0.1)
    assert half.half.step()[0] == [ended.request_id]
    assert half.ask(Claim(ticket_id=ticket.ticket_id, lease_s=9.0)).held is False
    half.close()


def test_a_claim_extends_the_lease() -> None:
    half = Half(lease_s=0.05)
    half.half.finished(request(params=keep()), [1, 2, 3, 4])
    ticket = half.desk.next()
    assert half.ask(Claim(ticket_id=ticket.ticket_id, lease_s=9.0)).held is True
    time.sleep(0.1)
    assert half.half.step()[0] == []
    half.close()


def test_no_more_than_a_quarter_of_the_pool_is_kept(half: Half) -> None:
    twenty = list(range(20))
    assert half.half.finished(request(computed=640, tokens=641, params=keep()), twenty) is True
    assert half.half.finished(request(computed=640, tokens=641, params=keep()), twenty) is False
    assert isinstance(half.desk.next(), Ticket)
    assert isinstance(half.desk.next(), NoTicket)


@pytest.mark.parametrize(
    ("covered", "prompt", "local", "expected"),
    [
        (90, 91, 0, 64),
        (96, 96, 0, 64),
        (96, 97, 0, 96),
        (128, 97, 32, 64),
        (31, 91, 0, 0),
        (90, 91, 64, 0),
    ],
    ids=["whole blocks", "one token is read", "exact", "local prefix", "short", "all local"],
)
def test_what_is_loaded_is_whole_blocks_of_the_covered_prompt(
    half: Half, covered: int, prompt: int, local: int, expected: int
) -> None:
    incoming = request(prompt=prompt, params=handoff(half, covered))
    assert half.half.loadable_tokens(incoming, local) == expected


def test_allocation_is_announced_once_and_the_handoff_is_then_consumed(half: Half) -> None:
    incoming = request(prompt=97, params=handoff(half, 96))
    assert half.half.loadable_tokens(incoming, 32) == 64
    half.half.allocated(incoming, [3, 8, 9, 10], 64)
    half.half.allocated(incoming, [3, 8, 9, 10], 0)
    message = half.mapper.next()
    assert isinstance(message, TargetBlocks)
    assert (message.start_token, message.num_tokens, message.block_ids) == (32, 64, (8, 9))
    assert half.half.loadable_tokens(incoming, 0) == 0
    _, loading, failed = half.half.step()
    assert loading == {incoming.request_id: message.handoff_id} and failed == {}
    half.half.reported({incoming.request_id})
    assert half.half.step() == ([], {}, {})


def test_a_handoff_that_brings_nothing_is_withdrawn(half: Half) -> None:
    incoming = request(prompt=20, params=handoff(half, 20))
    assert half.half.loadable_tokens(incoming, 0) == 0
    half.half.allocated(incoming, [3], 0)
    assert isinstance(half.mapper.next(), Abandon)
    assert half.half.finished(incoming, [3]) is False


def test_an_aborted_load_is_withdrawn_and_reported_once_it_is_settled(half: Half) -> None:
    incoming = request(prompt=97, params=handoff(half, 96), aborted=True)
    half.half.loadable_tokens(incoming, 0)
    half.half.allocated(incoming, [3, 8, 9], 96)
    blocks = half.mapper.next()
    assert half.half.finished(incoming, [3, 8, 9]) is False
    abandon = half.mapper.next()
    assert isinstance(abandon, Abandon) and abandon.handoff_id == blocks.handoff_id
    assert half.half.step()[2] == {}
    half.ask(Settled(handoff_id=blocks.handoff_id, ok=False), answer=False)
    deadline = time.monotonic() + 3
    while not (failed := half.half.step()[2]) and time.monotonic() < deadline:
        time.sleep(0.01)
    # An aborted request is not recomputed: no block of it is an error.
    assert failed == {incoming.request_id: ()}


def test_a_silent_mapper_fails_the_load_with_its_blocks() -> None:
    half = Half(silence_s=0.1)
    incoming = request(prompt=97, params=handoff(half, 96))
    half.half.loadable_tokens(incoming, 0)
    half.half.allocated(incoming, [3, 8, 9], 96)
    time.sleep(0.15)
    assert half.half.step()[2] == {incoming.request_id: (3, 8, 9)}
    half.close()


def test_a_request_that_waits_and_is_aborted_withdraws_its_handoff(half: Half) -> None:
    incoming = request(prompt=97, params=handoff(half, 96), aborted=True)
    half.half.loadable_tokens(incoming, 0)
    assert half.half.finished(incoming, []) is False
    assert isinstance(half.mapper.next(), Abandon)
