"""NIXL as this project uses it: a passive agent in each engine worker, an initiator in each mapper.

An engine's memory is read and written by others while it computes, so its agent needs NIXL's
progress thread; a mapper only initiates and drives progress itself, from one thread that sleeps
when nothing is in flight. Knows nothing of tokens or layers: addresses and bytes only.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np

from cluster.errors import TransportError

Memory = Literal["DRAM", "VRAM"]
_UCX_DEFAULTS = {
    # Without it, the registration cache grows for ever.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    # Over TCP, pieces of 8 kB (the default) cost an engine twice the processor time.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
"""UCX reads them when its library loads; what is set already stands (`transport.ucx_env`)."""

_POLL_S = 0.0001


def make_agent(name: str, *, progress_thread: bool, progress_delay_us: int) -> Any:
    """A NIXL agent over UCX; `name` must never be used twice (put a generation into it).

    NIXL's Python front hard-codes a progress thread that spins a whole core. The delay is a field
    of the configuration underneath, so it is set there; it is the timeout of an armed poll, and
    latency does not suffer from it.
    """
    for variable, value in _UCX_DEFAULTS.items():
        os.environ.setdefault(variable, value)
    from nixl import _api

    bindings = _api.nixlBind

    class WithDelay:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(bindings, attribute)

        def nixlAgent(self, agent_name: str, config: Any) -> Any:
            config.pthrDelay = progress_delay_us
            return bindings.nixlAgent(agent_name, config)

    with _AGENT_CREATION:
        _api.nixlBind = WithDelay()
        try:
            config = _api.nixl_agent_config(
                enable_prog_thread=progress_thread,
                sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            )
            return _api.nixl_agent(name, config)
        finally:
            _api.nixlBind = bindings


_AGENT_CREATION = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A remote agent: what it takes to reach it."""

    name: str
    metadata: bytes
    memory: Memory


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A finished READ or WRITE: its bytes, and when it moved by `time.perf_counter`."""

    bytes: int
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it moved."""
        return self.ended - self.started


_Way = tuple[str, Literal["READ", "WRITE"]]
"""A peer's name and the direction."""


@dataclass(kw_only=True)
class _Prepared:
    handle: Any
    way: _Way
    future: Future[Transfer]
    num_bytes: int
    started: float = 0.0


class Initiator:
    """Owns an agent, a registered pool and the one thread that may touch them.

    All methods may be called from any thread; futures complete on the transport thread. A transfer
    that was posted is waited for until NIXL reports its end: it is never forgotten, because a
    WRITE cannot be revoked.

    Of the transfers to one peer in one direction one moves at a time, in the order of posting, and
    the next one starts as soon as it has landed. Together they would be served in turns (UCX) and
    land together, so that whoever waits for the first would wait for both.
    """

    def __init__(self, name: str, *, pool_address: int, pool_bytes: int, memory: Memory) -> None:
        self._name = name
        self._pool = (pool_address, pool_bytes, memory)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._moving: dict[_Way, _Prepared] = {}
        self._next: dict[_Way, deque[_Prepared]] = defaultdict(deque)
        self._peers: set[str] = set()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="nixl-transport", daemon=True)
        self._thread.start()
        self._ready.result()

    def connect(self, peer: Peer) -> Future[bool]:
        """Load a peer's metadata and connect; True when it was not connected before (cold)."""
        future: Future[bool] = Future()
        future.set_running_or_notify_cancel()

        def job() -> None:
            if peer.name in self._peers:
                future.set_result(False)
                return
            try:
                self._agent.add_remote_agent(peer.metadata)
                self._agent.make_connection(peer.name)
                self._peers.add(peer.name)
                future.set_result(True)
            except Exception as error:
                future.set_exception(TransportError("connect", str(error)))

        self._jobs.put(job)
        return future

    def forget(self, peer_name: str) -> None:
        """Drop what is known of a peer; the next `connect` starts afresh."""

        def job() -> None:
            if peer_name in self._peers:
                self._peers.discard(peer_name)
                try:
                    self._agent.remove_remote_agent(peer_name)
                except Exception as error:
                    # The peer is gone either way; NIXL objects to removing a broken one twice.
                    _log().info("could not remove NIXL peer %s: %s", peer_name, error)

        self._jobs.put(job)

    def post(
        self,
        operation: Literal["READ", "WRITE"],
        local_n3: np.ndarray,
        remote_n3: np.ndarray,
        peer: Peer,
        notification: bytes = b"",
    ) -> Future[Transfer]:
        """Line a transfer up between descriptor lists (uint64 [n, 3]: address, bytes, device).

        The notification reaches the peer after the data. The future raises TransportError when
        NIXL reports a failure; then nothing of it is in flight any more.
        """
        future: Future[Transfer] = Future()
        # From here on nobody can cancel it: what is posted must be waited for.
        future.set_running_or_notify_cancel()

        def job() -> None:
            try:
                local = self._agent.get_xfer_descs(local_n3, self._pool[2])
                remote = self._agent.get_xfer_descs(remote_n3, peer.memory)
                handle = self._agent.initialize_xfer(
                    operation, local, remote, peer.name, notification
                )
            except Exception as error:
                future.set_exception(TransportError(operation.lower(), str(error)))
                return
            way, num_bytes = (peer.name, operation), int(local_n3[:, 1].sum())
            self._next[way].append(
                _Prepared(handle=handle, way=way, future=future, num_bytes=num_bytes)
            )
            if way not in self._moving:
                self._start_next(way)

        self._jobs.put(job)
        return future

    def close(self) -> None:
        """Wait for transfers in flight, deregister and stop the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._agent = make_agent(self._name, progress_thread=False, progress_delay_us=1_000)
            address, num_bytes, memory = self._pool
            registration = self._agent.register_memory([(address, num_bytes, 0, "")], memory)
        except Exception as error:
            self._ready.set_exception(TransportError("register", str(error)))
            return
        self._ready.set_result(None)
        open_ = True
        while open_ or self._moving:
            try:
                job = self._jobs.get_nowait() if self._moving else self._jobs.get()
            except Empty:
                self._poll()
                if self._moving:
                    time.sleep(_POLL_S)
                continue
            if job is None:
                open_ = False
            else:
                job()
        self._agent.deregister_memory(registration)

    def _start_next(self, way: _Way) -> None:
        waiting = self._next[way]
        while waiting:
            one = waiting.popleft()
            one.started = time.perf_counter()
            try:
                self._agent.transfer(one.handle)
            except Exception as error:
                self._release(one.handle)
                one.future.set_exception(TransportError(way[1].lower(), str(error)))
                continue
            self._moving[way] = one
            return
        del self._next[way]

    def _poll(self) -> None:
        for way, one in list(self._moving.items()):
            failure = None
            try:
                state = self._agent.check_xfer_state(one.handle)
            except Exception as error:
                failure = TransportError("transfer", str(error))
            else:
                if state == "PROC":
                    continue
                if state != "DONE":
                    failure = TransportError("transfer", f"NIXL says {state}")
            ended = time.perf_counter()
            # A link must not fall idle meanwhile.
            del self._moving[way]
            self._start_next(way)
            self._release(one.handle)
            if failure is not None:
                one.future.set_exception(failure)
            else:
                one.future.set_result(
                    Transfer(bytes=one.num_bytes, started=one.started, ended=ended)
                )

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            # NIXL keeps a handle that it cannot release yet and frees it with the agent.
            _log().info("could not release a NIXL handle: %s", error)


def _log() -> Any:
    import logging

    return logging.getLogger("kvcascade.transport")
