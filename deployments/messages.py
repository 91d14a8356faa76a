"""Every message that travels between router, engines and mapper. Control only: never KV.

Words used everywhere:

ticket       a source's promise to keep the KV blocks of one ended request
handoff      one conversion of a ticket's blocks into a target's blocks
lease        the deadline on any held memory
generation   a random id per process; a restarted peer is a new peer

Within Ray the dataclasses travel as they are; between the engine's scheduler process and the
mapper they travel over ZMQ as msgpack (`encode`, `decode`). Durations never cross a process
boundary as timestamps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    """Where one engine worker keeps its KV and how to read it.

    Block `b` of layer `l` starts at `layer_addresses[l] + b * block_stride_bytes` and holds
    `kv_heads` slabs of `block_size_tokens * 2 * head_dim` elements each. A slab is plain [N, K‖V]
    unless `permutation` is given: int32 little-endian, `packed[j] = plain[permutation[j]]`
    (vLLM's CPU attention packs every slab alike).
    """

    rank: int
    agent_name: str
    agent_metadata: bytes
    memory: Literal["DRAM", "VRAM"]
    device_id: int
    dtype: Literal["bfloat16", "float16", "float32"]
    layer_addresses: tuple[int, ...]
    num_blocks: int
    block_stride_bytes: int
    block_size_tokens: int
    kv_heads: int
    head_dim: int
    permutation: bytes | None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.kv_heads * self.block_size_tokens * 2 * self.head_dim * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """One engine replica as a peer: its workers in rank order, KV heads split evenly over them."""

    engine: str
    generation: str
    control_address: str
    workers: tuple[WorkerLayout, ...]

    @property
    def block_size_tokens(self) -> int:
        """Tokens of one block, the same on every worker."""
        return self.workers[0].block_size_tokens

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.workers[0].layer_addresses)

    @property
    def kv_heads(self) -> int:
        """KV heads of the model, over all workers."""
        return sum(worker.kv_heads for worker in self.workers)


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The source's promise: the KV of `token_ids` stays in `block_ids` for `lease_s` seconds.

    The first `len(token_ids)` token slots of the blocks in order are covered; the last sampled
    token of a request never is, for it was not read.
    """

    ticket_id: str
    request_id: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    lease_s: float
    layout: EngineLayout


@dataclass(frozen=True, kw_only=True)
class NoTicket:
    """A request with a keep rule ended and nothing is kept."""

    ticket_id: str


@dataclass(frozen=True, kw_only=True)
class HandoffOrder:
    """What the router asks of a mapper. `covered_tokens` leading tokens may be read; the target is
    believed to want them from `first_token` on, and says so itself when it announces its blocks.
    `traceparent` is the W3C trace context that the work belongs to."""

    handoff_id: str
    ticket: Ticket
    covered_tokens: int
    first_token: int = 0
    traceparent: str | None = None


@dataclass(frozen=True, kw_only=True)
class MapperAddress:
    """First item of a conversion's stream: where the target announces its blocks."""

    address: str
    generation: str
    mapper_id: str


@dataclass(frozen=True, kw_only=True)
class TargetBlocks:
    """The target allocated memory: write tokens [start_token, start_token + num_tokens) there.

    Both ends are multiples of the target's block size; `block_ids` holds just these blocks.
    """

    handoff_id: str
    start_token: int
    num_tokens: int
    block_ids: tuple[int, ...]
    layout: EngineLayout


@dataclass(frozen=True, kw_only=True)
class Abandon:
    """The target wants no more of this handoff and waits for its `Settled`."""

    handoff_id: str
    control_address: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The mapper starts on a ticket: extend its lease to `lease_s`. Answered by a `Verdict`."""

    ticket_id: str
    lease_s: float


@dataclass(frozen=True, kw_only=True)
class Release:
    """The last READ landed, or nobody wants the ticket. Answered by a `Verdict`: only `held`
    proves that the blocks were not reused while they were read."""

    ticket_id: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the blocks of a ticket were still held when the message arrived."""

    ticket_id: str
    held: bool


@dataclass(frozen=True, kw_only=True)
class AskCensus:
    """Asks a scheduler half what it holds. Answered by a `Census`."""


@dataclass(frozen=True, kw_only=True)
class Census:
    """What an engine's KV pool is used for at this moment, in blocks of all layers."""

    num_blocks: int
    free_blocks: int
    pinned_blocks: int
    loading_blocks: int


@dataclass(frozen=True, kw_only=True)
class Settled:
    """No WRITE of this handoff is in flight and none will follow. `ok` is false for all but a
    handoff whose done notification was sent."""

    handoff_id: str
    ok: bool


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Abandon,
        AskCensus,
        Census,
        Claim,
        EngineLayout,
        NoTicket,
        Release,
        Settled,
        TargetBlocks,
        Ticket,
        Verdict,
    )
}


def encode(message: Any) -> bytes:
    """One control message as msgpack."""
    return msgspec.msgpack.encode((type(message).__name__, message))


def decode(data: bytes) -> Any:
    """The message in `data`; raises ValueError for anything that is not one of ours."""
    try:
        kind, body = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
        cls = _KINDS[kind]
        return msgspec.msgpack.decode(body, type=cls)
    except (msgspec.MsgspecError, KeyError) as error:
        raise ValueError(f"not a control message: {error}") from None


DONE_PREFIX = b"kvcascade:"
"""Marks our notifications among NIXL's: the last WRITE of a handoff carries one."""


def done_notification(handoff_id: str) -> bytes:
    """What the last WRITE tells the target's worker."""
    return DONE_PREFIX + handoff_id.encode()


def handoff_of_notification(notification: bytes) -> str | None:
    """The handoff that a notification ends, or None for one that is not ours."""
    if not notification.startswith(DONE_PREFIX):
        return None
    return notification[len(DONE_PREFIX) :].decode()
