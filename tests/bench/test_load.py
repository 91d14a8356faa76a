"""The load generator against an endpoint that is a script, and what it keeps of answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.load import Generator, Load, Outcome, Record, read_answer, read_status

HANDOFF = {"path": "mapped", "reason": None, "handoff_ms": 20.0, "bytes_written": 8, "other": 1}
STATUS = {
    "nodes": {"a": "10.0.0.1", "b": "10.0.0.2"},
    "deployments": {
        "small": {"described": [{"pid": 1}]},
        "large": {"described": [{"pid": 2}]},
        "mapper": {
            "replicas": {"RUNNING": 2, "STOPPING": 1},
            "described": [
                {"pid": 4, "node_id": "b", "running": 3},
                {"pid": 3, "node_id": "a", "running": 2},
            ],
        },
    },
}


@dataclass
class Endpoint:
    """Answers every request as it should be, the third one with 500."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, STATUS)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with state.lock:
                state.bodies.append(body)
                mine = len(state.bodies)
                state.open += 1
                state.most_open = max(state.most_open, state.open)
            time.sleep(0.05)
            with state.lock:
                state.open -= 1
            self.answer(500 if mine == 3 else 200, {"cascade": {"handoff": HANDOFF}})

        def answer(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def messages(tokens: int, seed: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{tokens} {seed}"}]


def test_so_many_are_in_flight_and_each_is_a_session_of_its_own(endpoint: Endpoint) -> None:
    load = Load(in_flight=3, tokens=(5, 7), seeds=2, requests=9, watch_s=0.02)
    outcome = Generator(endpoint.url, "cascade", load, messages).finish(stop=False)
    assert [record.number for record in outcome.records] == list(range(9))
    assert endpoint.most_open == 3
    assert len({body["cascade"]["session_id"] for body in endpoint.bodies}) == 9
    texts = sorted(body["messages"][0]["content"] for body in endpoint.bodies)
    assert texts == sorted(["5 0", "7 0", "5 1", "7 1"] * 2 + ["5 0"])
    assert sum(record.mapped for record in outcome.records) == 8
    (failed,) = (record for record in outcome.records if not record.mapped)
    assert failed.error is not None and failed.error.startswith("500: ")
    assert outcome.samples[0].replicas == {"RUNNING": 2, "STOPPING": 1}
    assert Outcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome


def test_a_stopped_load_waits_for_what_is_in_flight(endpoint: Endpoint) -> None:
    load = Load(in_flight=2, tokens=(5,))
    generator = Generator(endpoint.url, "cascade", load, messages)
    while not generator.records:
        time.sleep(0.01)
    outcome = generator.finish(stop=True)
    assert len(outcome.records) == len(endpoint.bodies)
    assert not generator.running and endpoint.open == 0


def test_what_did_not_go_the_mapped_way_is_a_complaint() -> None:
    def record(found: dict[str, Any]) -> Record:
        return Record(number=0, tokens=1, started_s=0.0, ended_s=1.0, **found)

    again = {"path": "recompute", "reason": "no_ticket", "handoff_ms": 9.0}
    assert record(read_answer(200, json.dumps({"cascade": {"handoff": HANDOFF}}))).complaint is None
    found = record(read_answer(200, json.dumps({"cascade": {"handoff": again}})))
    assert (found.mapped, found.complaint) == (False, "recompute: no_ticket")
    stayed = record(read_answer(200, json.dumps({"cascade": {"handoff": None}})))
    assert stayed.complaint == "the large model never took over"


def test_a_sample_says_where_mappers_run_and_what_they_have_to_do() -> None:
    sample = read_status(5.0, STATUS)
    assert (sample.nodes, sample.handoffs) == (["10.0.0.1", "10.0.0.2"], 5)
    assert sample.pids == {"small": [1], "large": [2], "mapper": [3, 4]}
