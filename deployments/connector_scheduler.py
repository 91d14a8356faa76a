"""The connector's scheduler half: pins, promises, announces, releases. All control is here.

Two threads meet in this object: vLLM's engine loop, which calls the hooks, and the control thread
(`control.py`), which answers mappers. One lock guards the tables; nothing waits while holding it.
Keys are ours (ticket and handoff ids), because vLLM appends random digits to request ids.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from deployments.control import ControlServer, Outbox
from deployments.messages import (
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
    WorkerLayout,
)

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

log = logging.getLogger("kvcascade.connector")


@dataclass(frozen=True, kw_only=True)
class ConnectorSettings:
    """What the engine deployment passes through vLLM's `kv_connector_extra_config`."""

    engine: str
    host: str
    ticket_address: str
    lease_s: float
    deadline_s: float
    quarantine_s: float
    max_pinned_fraction: float
    native_suffix_tokens: int
    progress_delay_us: int


@dataclass
class _Pinned:
    request_id: str
    num_blocks: int
    deadline: float


@dataclass
class _Incoming:
    handoff_id: str
    mapper_address: str
    block_ids: tuple[int, ...]
    deadline: float
    aborted: bool = False
    failed: bool = False


class SchedulerHalf:
    """Source and target role of one engine, beside its scheduler."""

    def __init__(
        self, settings: ConnectorSettings, *, block_size_tokens: int, num_blocks: int
    ) -> None:
        self._settings = settings
        self._block_size_tokens = block_size_tokens
        self._max_pinned_blocks = int(num_blocks * settings.max_pinned_fraction)
        self._generation = uuid.uuid4().hex
        self._lock = Lock()
        self._pinned: dict[str, _Pinned] = {}
        self._released: list[str] = []
        self._incoming: dict[str, _Incoming] = {}
        self._consumed: set[str] = set()
        self._local_tokens: dict[str, int] = {}
        self._layout: EngineLayout | None = None
        self._pool: BlockPool | None = None
        self._control = ControlServer(settings.host, self._on_message)
        self._outbox = Outbox()

    def set_layouts(self, workers: tuple[WorkerLayout, ...]) -> None:
        """Called once, when every worker has registered its memory."""
        self._layout = EngineLayout(
            engine=self._settings.engine,
            generation=self._generation,
            control_address=self._control.address,
            workers=workers,
        )
        self._outbox.send(self._settings.ticket_address, self._layout)

    def bind(self, pool: BlockPool) -> None:
        """vLLM's block pool, for `Census` alone."""
        self._pool = pool

    # Source role.

    def finished(self, request: Request, block_ids: list[int]) -> bool:
        """A request ended for any reason; True keeps its blocks until `step` releases them."""
        keep = (request.kv_transfer_params or {}).get("keep")
        with self._lock:
            incoming = self._incoming.get(request.request_id)
            consumed = request.request_id in self._consumed
            self._consumed.discard(request.request_id)
            self._local_tokens.pop(request.request_id, None)
            if incoming is not None:
                incoming.aborted = True
        if incoming is not None:
            self._outbox.send(incoming.mapper_address, self._abandon(incoming.handoff_id))
            if keep is not None:
                self._outbox.send(
                    self._settings.ticket_address, NoTicket(ticket_id=keep["ticket_id"])
                )
            return False
        if "handoff" in (request.kv_transfer_params or {}) and not consumed:
            self._close_handoff(request)
        if keep is None:
            return False
        kept = self._pin(request, block_ids, keep)
        if not kept:
            self._outbox.send(self._settings.ticket_address, NoTicket(ticket_id=keep["ticket_id"]))
        return kept

    def _pin(self, request: Request, block_ids: list[int], keep: dict[str, Any]) -> bool:
        from vllm.v1.request import RequestStatus

        if keep["rule"] == "on_abort" and request.status != RequestStatus.FINISHED_ABORTED:
            return False
        covered = min(
            max(0, request.num_computed_tokens - request.num_in_flight_tokens),
            request.num_tokens,
        )
        blocks = tuple(block_ids[: -(-covered // self._block_size_tokens)])
        if not blocks or self._layout is None:
            return False
        now = time.monotonic()
        with self._lock:
            held = sum(pin.num_blocks for pin in self._pinned.values())
            if held + len(blocks) > self._max_pinned_blocks:
                log.info("not keeping %d blocks: %d are kept already", len(blocks), held)
                return False
            self._pinned[keep["ticket_id"]] = _Pinned(
                request_id=request.request_id,
                num_blocks=len(blocks),
                deadline=now + self._settings.lease_s,
            )
        self._outbox.send(
            self._settings.ticket_address,
            Ticket(
                ticket_id=keep["ticket_id"],
                request_id=request.request_id,
                token_ids=tuple(request.all_token_ids[:covered]),
                block_ids=blocks,
                lease_s=self._settings.lease_s,
                layout=self._layout,
            ),
        )
        return True

    # Target role.

    def loadable_tokens(self, request: Request, local_tokens: int) -> int:
        """Whole blocks that the handoff covers, less what the engine has; 0 for everything else."""
        handoff = (request.kv_transfer_params or {}).get("handoff")
        if handoff is None or request.request_id in self._consumed:
            return 0
        covered = min(
            handoff["covered_tokens"],
            request.num_prompt_tokens - self._settings.native_suffix_tokens,
        )
        whole = covered // self._block_size_tokens * self._block_size_tokens
        self._local_tokens[request.request_id] = local_tokens
        return max(0, int(whole) - local_tokens)

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        """vLLM calls this twice for a load; only the call that brings tokens counts."""
        handoff = (request.kv_transfer_params or {}).get("handoff")
        if handoff is None or request.request_id in self._consumed:
            return
        self._consumed.add(request.request_id)
        if external_tokens == 0:
            self._close_handoff(request)
            return
        assert self._layout is not None
        size = self._block_size_tokens
        local = self._local_tokens[request.request_id]
        blocks = tuple(block_ids[local // size : (local + external_tokens) // size])
        deadline = time.monotonic() + self._settings.deadline_s + self._settings.quarantine_s
        with self._lock:
            self._incoming[request.request_id] = _Incoming(
                handoff_id=handoff["handoff_id"],
                mapper_address=handoff["mapper_address"],
                block_ids=blocks,
                deadline=deadline,
            )
        self._outbox.send(
            handoff["mapper_address"],
            TargetBlocks(
                handoff_id=handoff["handoff_id"],
                start_token=local,
                num_tokens=external_tokens,
                block_ids=blocks,
                layout=self._layout,
            ),
        )

    def _close_handoff(self, request: Request) -> None:
        """Tell the mapper that no blocks will ever be announced."""
        handoff = (request.kv_transfer_params or {})["handoff"]
        self._outbox.send(handoff["mapper_address"], self._abandon(handoff["handoff_id"]))

    def _abandon(self, handoff_id: str) -> Abandon:
        return Abandon(handoff_id=handoff_id, control_address=self._control.address)

    def reported(self, received: Collection[str]) -> None:
        """Every worker reported these loads: they are over."""
        with self._lock:
            for request_id in received:
                self._incoming.pop(request_id, None)

    # Both roles.

    def step(self) -> tuple[list[str], dict[str, str], dict[str, tuple[int, ...]]]:
        """(released, loading, failed) for `StepMetadata`; also where leases run out."""
        if not (self._pinned or self._released or self._incoming):
            return [], {}, {}
        now = time.monotonic()
        with self._lock:
            for ticket_id, pin in list(self._pinned.items()):
                if pin.deadline < now:
                    log.info("lease of ticket %s ran out", ticket_id)
                    self._released.append(self._pinned.pop(ticket_id).request_id)
            released, self._released = self._released, []
            loading, failed = {}, {}
            for request_id, incoming in self._incoming.items():
                if incoming.deadline < now and not incoming.failed:
                    log.warning("handoff %s: the mapper is silent", incoming.handoff_id)
                    incoming.failed = True
                loading[request_id] = incoming.handoff_id
                if incoming.failed:
                    failed[request_id] = () if incoming.aborted else incoming.block_ids
        return released, loading, failed

    def _on_message(self, message: Any) -> Verdict | Census | None:
        """On the control thread: a mapper or the replica speaks."""
        match message:
            case Claim(ticket_id=ticket_id, lease_s=lease_s):
                with self._lock:
                    pin = self._pinned.get(ticket_id)
                    if pin is not None:
                        pin.deadline = time.monotonic() + lease_s
                return Verdict(ticket_id=ticket_id, held=pin is not None)
            case Release(ticket_id=ticket_id):
                with self._lock:
                    pin = self._pinned.pop(ticket_id, None)
                    if pin is not None:
                        self._released.append(pin.request_id)
                return Verdict(ticket_id=ticket_id, held=pin is not None)
            case Settled(handoff_id=handoff_id, ok=ok):
                with self._lock:
                    for incoming in self._incoming.values():
                        if incoming.handoff_id == handoff_id and not ok:
                            incoming.failed = True
                return None
            case AskCensus():
                return self._census()
            case _:
                log.warning("unexpected control message %s", type(message).__name__)
                return None

    def _census(self) -> Census:
        assert self._pool is not None, "vLLM binds the pool before it serves"
        with self._lock:
            return Census(
                num_blocks=self._pool.num_gpu_blocks,
                free_blocks=self._pool.get_num_free_blocks(),
                pinned_blocks=sum(pin.num_blocks for pin in self._pinned.values()),
                loading_blocks=sum(len(load.block_ids) for load in self._incoming.values()),
            )

    def close(self) -> None:
        """Stop the control thread."""
        self._control.close()
        self._outbox.close()
