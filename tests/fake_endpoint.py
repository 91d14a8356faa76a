"""An endpoint that tells the cascade's stories from a script, over real HTTP on a loopback port.

It serves the page, and chat streams as the cascade sends them with `explain`. What it answers
depends on the last message alone; it has no model, no engine and no Ray.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from deployments.page import CONTENT_SECURITY_POLICY, page_files

NAMES = ["cascade", "tiny-1b", "huge-70b"]
HOSTILE = ["Try ", "<script>window.hacked = 1</script>", "<img src=x onerror='window.hacked=2'>"]
SMALL_WORDS = ["Light ", "is ", "scattered ", "by "]
LARGE_WORDS = ["air ", "molecules, ", "blue ", "most ", "of ", "all."]
SCORES: list[tuple[int, float | None]] = [(1, None), (2, 2.0), (3, 1.5), (4, 1.0), (5, 0.8)]
DROPPED: list[tuple[int, float | None]] = [(5, 0.8), (6, 0.2)]
THRESHOLD = 0.5
STAGES_MS = {
    "ticket": 20.0,
    "queue": 0.2,
    "read": 40.0,
    "map": 200.0,
    "write": 60.0,
    "admit": 100.0,
}
HANDOFF_MS = 400.0
PREDICTED_MS = 1600.0
MEASURED_MS = 1200.0
BORROWED = {
    "path": "mapped",
    "handoff_ms": 150.0,
    "stages_ms": {"ticket": 10.0, "map": 90.0},
    "covered_tokens": 640,
    "predicted_ms": {"mapped": None, "recompute": 300.0},
}
STATS = {
    "requests": 40,
    "escalated": 12,
    "realised_fraction": 0.3,
    "target_fraction": 0.25,
    "policy": "margin",
    "window": 500,
    "handoffs": {"mapped": 10, "recompute": 1, "cancelled": 1},
    "saved_prefill_s": 12.34,
    "refused_routing": None,
}


@dataclass
class FakeEndpoint:
    """A running endpoint and what it was asked."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    wanted_key: str | None = None
    left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def fake_endpoint() -> Iterator[FakeEndpoint]:
    """Serve on a free loopback port until the block ends."""
    state = FakeEndpoint()
    with listening(_app(state)) as url:
        state.url = url
        yield state


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serve an application on a free loopback port until the block ends; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            assert server.started
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def _app(state: FakeEndpoint) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        if (refused := _refuse(state, request)) is not None:
            return refused
        return JSONResponse({"object": "list", "data": [{"id": name} for name in NAMES]})

    @app.get("/v1/cascade/stats")
    async def stats() -> dict[str, Any]:
        return STATS

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        if (refused := _refuse(state, request)) is not None:
            return refused
        body = await request.json()
        state.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "refuse":
            return _envelope(
                400, "cascade.target_fraction: no calibration", "cascade.target_fraction"
            )
        return StreamingResponse(_story(question, body, state), media_type="text/event-stream")

    @app.get("/{path:path}")
    async def page(path: str) -> Response:
        content_type, content = page_files()[f"/{path}"]
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "Content-Type": content_type}
        return Response(content, headers=headers)

    return app


def _refuse(state: FakeEndpoint, request: Request) -> Response | None:
    found = request.headers.get("authorization")
    state.keys.append(found)
    if state.wanted_key is None or found == f"Bearer {state.wanted_key}":
        return None
    return _envelope(401, "This endpoint wants an API key.", None)


def _envelope(status: int, message: str, param: str | None) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": "x"}
    return JSONResponse({"error": error}, status_code=status)


async def _story(
    question: str, body: dict[str, Any], state: FakeEndpoint
) -> AsyncGenerator[str, None]:
    if body["model"] != NAMES[0]:
        for word in SMALL_WORDS:
            yield _chunk([word])
        yield _chunk([], finish="stop")
        yield "data: [DONE]\n\n"
        return
    small = [{"model": NAMES[1], "tokens": 1}]
    if question == "wait":
        try:
            while True:
                small[0]["tokens"] += 1
                yield _chunk(["more "], _progress(small, []))
                await asyncio.sleep(0.02)
        finally:
            state.left.set()
    if question == "break":
        yield _chunk(["Well"], _progress(small, []))
        broken = {"message": "the engine ended", "type": "server_error", "param": None, "code": "x"}
        yield f"data: {json.dumps({'error': broken})}\n\n"
        return
    words = HOSTILE if question == "markup" else SMALL_WORDS
    escalates = question == "hard"
    for index, word in enumerate(words):
        small = [{"model": NAMES[1], "tokens": index + 1}]
        yield _chunk([word], _progress(small, SCORES[index : index + 1]))
    if escalates:
        new = DROPPED
        # The first event carries two tokens, as an engine's may.
        for first, last in ((0, 2), *((index, index + 1) for index in range(2, len(LARGE_WORDS)))):
            both = [*small, {"model": NAMES[2], "tokens": last}]
            yield _chunk(LARGE_WORDS[first:last], _progress(both, new))
            new = []
    account = _account(escalates, len(words), body)
    if question == "back":
        account["borrowed"] = BORROWED
    yield _chunk([], account, finish="stop")
    usage = {"prompt_tokens": 1234, "completion_tokens": len(words) + 6 * escalates}
    yield f"data: {json.dumps({'choices': [], 'usage': {**usage, 'total_tokens': 1}})}\n\n"
    yield "data: [DONE]\n\n"


def _progress(runs: list[dict[str, Any]], scores: list[tuple[int, float | None]]) -> dict[str, Any]:
    return {"served_by": runs, "scores": scores, "threshold": THRESHOLD}


def _chunk(
    words: list[str], cascade: dict[str, Any] | None = None, finish: str | None = None
) -> str:
    entries = []
    for word in words:
        best = [{"token": word, "logprob": -0.25}, {"token": "no", "logprob": -1.5}]
        entries.append({"token": word, "logprob": -0.25, "bytes": None, "top_logprobs": best})
    choice = {
        "index": 0,
        "delta": {"content": "".join(words)},
        "logprobs": {"content": entries} if entries else None,
        "finish_reason": finish,
    }
    chunk: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "created": 1}
    chunk |= {"model": "cascade", "choices": [choice]}
    if cascade is not None:
        chunk["cascade"] = cascade
    return f"data: {json.dumps(chunk)}\n\n"


def _account(escalates: bool, small: int, body: dict[str, Any]) -> dict[str, Any]:
    session = {"id": "s", "turn": sum(one["role"] == "user" for one in body["messages"])}
    account: dict[str, Any] = {
        "served_by": [{"model": NAMES[1], "tokens": small}],
        "decision": {
            "action": "escalate" if escalates else "stay",
            "reason": "low_margin" if escalates else "confident",
            "score": 0.2 if escalates else 1.0,
            "threshold": THRESHOLD,
            "calibration_id": None,
        },
        "handoff": None,
        "session": {**session, "drift_handoffs": int(escalates)},
    }
    if escalates:
        account["served_by"].append({"model": NAMES[2], "tokens": len(LARGE_WORDS)})
        again = bool(body.get("cascade", {}).get("recompute"))
        account["handoff"] = {
            "path": "recompute" if again else "mapped",
            "reason": "requested" if again else None,
            "handoff_ms": MEASURED_MS if again else HANDOFF_MS,
            "stages_ms": {} if again else STAGES_MS,
            "bytes_read": 0 if again else 70_000_000,
            "bytes_written": 0 if again else 139_000_000,
            "covered_tokens": 0 if again else 1000,
            "held_tokens": 0 if again else 202,
            "reread_tokens": 1238 if again else 36,
            "temperature": "warm",
            "predicted_ms": {"mapped": 390.0, "recompute": PREDICTED_MS},
        }
    return account
