"""ZMQ between an engine's scheduler process and mappers: a server that answers, an outbox that
sends. Messages are those of `messages.py`; what they mean is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from deployments.messages import decode, encode

log = logging.getLogger("kvcascade.control")


class ControlServer:
    """Answers each message with `handler(message)` when that is not None, on its own thread.

    Bound to a free port of `host`; `address` is what peers connect to with a DEALER socket.
    """

    def __init__(self, host: str, handler: Callable[[Any], Any | None]) -> None:
        self._handler = handler
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._thread = threading.Thread(target=self._run, name="kvcascade-control", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect("inproc://stop")
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if stop in ready:
                break
            identity, *frames = self._socket.recv_multipart()
            try:
                answer = self._handler(decode(frames[-1]))
            except ValueError as error:
                log.warning("ignored a control message: %s", error)
                continue
            if answer is not None:
                self._socket.send_multipart([identity, encode(answer)])
        stop.close()
        self._socket.close()

    def close(self) -> None:
        """Stop the thread and close the port."""
        self._stop.send(b"")
        self._thread.join()
        self._stop.close()
        self._context.term()


class Outbox:
    """Sends without waiting, from one thread. A peer that is gone costs a log line, no exception.

    Connections to the `_KEPT_PEERS` peers spoken to last stay open.
    """

    _KEPT_PEERS = 64

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()

    def send(self, address: str, message: Any) -> None:
        """Queue `message` for the DEALER, ROUTER or PULL socket at `address`."""
        socket = self._sockets.get(address)
        if socket is None:
            kind = zmq.PUSH if address.startswith("ipc://") else zmq.DEALER
            socket = self._context.socket(kind)
            socket.setsockopt(zmq.LINGER, 1_000)
            socket.connect(address)
            self._sockets[address] = socket
            if len(self._sockets) > self._KEPT_PEERS:
                self._sockets.popitem(last=False)[1].close()
        self._sockets.move_to_end(address)
        try:
            socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("could not send %s to %s: %s", type(message).__name__, address, error)

    def close(self) -> None:
        """Give queued messages a second, then drop them."""
        for socket in self._sockets.values():
            socket.close()
        self._context.term()


async def tell(context: zmq.asyncio.Context, address: str, message: Any) -> None:
    """Send one message to a ControlServer and do not wait for an answer."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1_000)
    socket.connect(address)
    try:
        await socket.send(encode(message))
    finally:
        socket.close()


async def ask(context: zmq.asyncio.Context, address: str, message: Any, *, timeout_s: float) -> Any:
    """Send one message to a ControlServer and return its answer; raises TimeoutError."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    try:
        await socket.send(encode(message))
        return decode(await asyncio.wait_for(socket.recv(), timeout_s))
    finally:
        socket.close()
