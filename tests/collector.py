"""An OTLP/HTTP collector on loopback that keeps the spans it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, kw_only=True)
class Received:
    """One span; ids are lower-case hex, `parent_id` is empty for a root."""

    name: str
    part: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]


class Collector:
    """Listens from its making until `close`."""

    def __init__(self) -> None:
        self._spans: list[Received] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["content-length"]))
                known = handler.path == "/v1/traces"
                if known:
                    self._spans.extend(decode(body))
                handler.send_response(200 if known else 404)
                handler.send_header("content-length", "0")
                handler.end_headers()

            def log_message(handler, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """What `telemetry.otlp_endpoint` is set to."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[Received]:
        """All that came so far."""
        return list(self._spans)

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of one trace, in the order in which they began."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start_ns)

    def wait(
        self, trace_id: str, enough: Callable[[list[Received]], bool], *, timeout_s: float
    ) -> list[Received]:
        """The spans of a trace, once there are `enough`."""
        deadline = time.monotonic() + timeout_s
        while not enough(found := self.trace(trace_id)):
            assert time.monotonic() < deadline, [span.name for span in found]
            time.sleep(0.2)
        return found

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def decode(body: bytes) -> list[Received]:
    """The spans of one export request."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Received(
            name=span.name,
            part=_values(group.resource.attributes)["kvcascade.part"],
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            failed=span.status.code == span.status.STATUS_CODE_ERROR,
            attributes=_values(span.attributes),
        )
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(one) for one in value.array_value.values)
    return getattr(value, kind)
