"""The routes without vLLM, the engine port without Ray, and the deployment with real Ray Serve."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from ray.exceptions import RayTaskError

from cluster.errors import EngineError
from deployments.router import RayEnginePort
from router.ports import EngineChunk, EngineRequest, new_request_id
from tests.fakes import step

REQUEST = EngineRequest(request_id="r", prompt_token_ids=(1, 2), max_tokens=4)


class FakeStream:
    """A DeploymentResponseGenerator of given items; an exception among them is raised."""

    def __init__(self, items: list[Any]) -> None:
        self._items = iter(items)
        self.cancelled = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Any:
        item = next(self._items, None)
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True


class FakeHandle:
    """A DeploymentHandle with `generate` and `release`."""

    def __init__(self, items: list[Any], release_error: Exception | None = None) -> None:
        self.stream = FakeStream(items)
        self.released: list[str] = []
        self.options_seen: list[dict[str, Any]] = []
        self._release_error = release_error

    def options(self, **options: Any) -> FakeHandle:
        self.options_seen.append(options)
        return self

    @property
    def generate(self) -> Any:
        return _Remote(lambda request: self.stream)

    @property
    def release(self) -> Any:
        async def release(request_id: str) -> None:
            if self._release_error is not None:
                raise self._release_error
            self.released.append(request_id)

        return _Remote(release)


class _Remote:
    def __init__(self, call: Any) -> None:
        self.remote = call


CHUNKS = [EngineChunk(steps=(step(1),)), EngineChunk(steps=(step(2),), finish_reason="stop")]


async def test_a_finished_stream_is_not_cancelled() -> None:
    handle = FakeHandle(CHUNKS)
    port = RayEnginePort(handle, "small")
    assert [chunk async for chunk in port.generate(REQUEST)] == CHUNKS
    assert not handle.stream.cancelled


async def test_closing_the_generator_cancels_the_ray_stream() -> None:
    handle = FakeHandle(CHUNKS)
    chunks = RayEnginePort(handle, "small").generate(REQUEST)
    await anext(chunks)
    await chunks.aclose()
    assert handle.stream.cancelled


@pytest.mark.parametrize("cause", [EngineError("the core died"), ValueError("the core died")])
async def test_what_the_engine_raised_arrives_as_an_engine_error(cause: Exception) -> None:
    wrapped = RayTaskError("generate", "traceback", cause).as_instanceof_cause()
    handle = FakeHandle([CHUNKS[0], wrapped])
    with pytest.raises(EngineError, match="the core died") as caught:
        async for _ in RayEnginePort(handle, "small").generate(REQUEST):
            pass
    assert type(caught.value) is EngineError


async def test_all_calls_about_a_request_go_to_the_replica_that_knows_it() -> None:
    handle = FakeHandle([EngineChunk(steps=(), finish_reason="stop")])
    port = RayEnginePort(handle, "small")
    request = EngineRequest(request_id=new_request_id("talk"), prompt_token_ids=(1,), max_tokens=1)
    async for _ in port.generate(request):
        pass
    await port.release(request.request_id)
    stream, *calls = handle.options_seen
    assert stream["stream"] and stream["_by_reference"] is False
    assert calls == [{"session_id": "talk"}] * 2


async def test_a_failed_release_is_left_to_the_lease() -> None:
    error = RayTaskError("release", "traceback", ValueError("gone"))
    await RayEnginePort(FakeHandle([], error), "small").release("r")
    handle = FakeHandle([])
    await RayEnginePort(handle, "small").release("r")
    assert handle.released == ["r"]


def test_importing_the_deployment_by_path_imports_no_vllm() -> None:
    code = "import sys, deployments.router; print('vllm' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == ["False", "False"]


ROOT = Path(__file__).parents[2]


class Engine:
    """A Serve deployment that counts up from a token id; slowly when asked for many tokens."""

    def __init__(self, first_token: int) -> None:
        self._first = first_token
        self._open = 0

    async def generate(self, request: EngineRequest) -> Any:
        self._open += 1
        try:
            for index in range(request.max_tokens):
                await asyncio.sleep(0.2 if request.max_tokens > 50 else 0)
                last = index == request.max_tokens - 1
                reason: Any = "length" if last else None
                yield EngineChunk(steps=(step(self._first + index),), finish_reason=reason)
        finally:
            self._open -= 1

    async def release(self, request_id: str) -> None:
        return None

    async def take_ticket(self, request_id: str) -> None:
        return None

    async def describe(self) -> dict[str, int]:
        return {"open": self._open}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, Any, Any]]:
    """(url, small, large): the real router deployment over counting engines."""
    import ray
    from ray import serve

    from cluster.config import CascadeConfig

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"port": port, "host": "127.0.0.1"})
    model = {"accelerator": "cpu", "source": "quickstart:large", "dtype": "float32"}
    config = CascadeConfig.model_validate(
        {
            "small": {**model, "name": "little", "max_model_len_tokens": 512},
            "large": {**model, "name": "big", "max_model_len_tokens": 512},
            "mapper": {"small_to_large": "identity"},
            "handoff": {"min_handoff_tokens": 8},
        }
    )
    engine = serve.deployment(Engine).options(ray_actor_options={"num_cpus": 0})
    small = engine.options(name="small").bind(100)
    large = engine.options(name="large").bind(300)
    mapper = engine.options(name="mapper").bind(0)
    router = serve.deployment(name="router", ray_actor_options={"num_cpus": 0})(
        "deployments.router.Router"
    )
    try:
        serve.run(router.bind(config.model_dump(mode="json"), small, large, mapper), name="app")
        handles = [serve.get_deployment_handle(name, "app") for name in ("small", "large")]
        yield f"http://127.0.0.1:{port}", *handles
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(url: str, **fields: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": "Count, please."}], "model": "cascade"}
    return httpx2.post(f"{url}/v1/chat/completions", json={**body, **fields}, timeout=60)


@pytest.mark.real
def test_the_deployment_named_by_path_answers_over_real_handles(served: Any) -> None:
    url, _, _ = served
    answer = ask(url, max_tokens=6, cascade={"escalate_after_tokens": 2}).json()
    assert answer["cascade"]["served_by"] == [
        {"model": "little", "tokens": 2},
        {"model": "big", "tokens": 4},
    ]
    assert answer["cascade"]["handoff"]["reason"] == "no_ticket"
    assert httpx2.get(f"{url}/health", timeout=60).status_code == 200


@pytest.mark.real
def test_metrics_hold_the_routes_that_were_taken(served: Any) -> None:
    url, _, _ = served
    ask(url, model="big", max_tokens=2)
    end_s = time.monotonic() + 60
    lines: list[str] = []
    while not any('reason="named"' in line and 'model="big"' in line for line in lines):
        assert time.monotonic() < end_s, lines
        time.sleep(1)
        text = httpx2.get(f"{url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if "kvcascade_route_total{" in line]


@pytest.mark.real
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engine(served: Any, stream: bool) -> None:
    url, _, large = served
    body = {
        "messages": [{"role": "user", "content": "Count, please."}],
        "model": "big",
        "max_tokens": 400,
        "stream": stream,
    }
    timeout = httpx2.Timeout(60, read=60 if stream else 3)
    if stream:
        with httpx2.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=timeout
        ) as response:
            lines = response.iter_lines()  # closing it would close the response
            first = next(line for line in lines if line)
            assert json.loads(first.removeprefix("data: "))["model"] == "big"
            assert large.describe.remote().result()["open"] == 1
    else:
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=timeout)
    end_s = time.monotonic() + 10
    while large.describe.remote().result()["open"]:
        assert time.monotonic() < end_s, "the engine still writes for nobody"
        time.sleep(0.1)
