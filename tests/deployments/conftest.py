"""The OpenAI endpoint over scripted engines, for the official client and without a socket.

The front end is made once, for it loads a tokenizer and vLLM; the engines change per test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from cluster.config import CascadeConfig
from cluster.sources import resolve_model
from router.conversations import LocalSessions
from router.forecast import Forecast
from router.job import Site
from tests.fakes import FakeHandoffPort, ScriptedEngine, step, steps

SMALL_TEXT = "one two three four five six seven eight nine ten"
LARGE_TEXT = " ONE TWO THREE FOUR FIVE SIX SEVEN EIGHT NINE TEN"
ASK: list[Any] = [{"role": "user", "content": "Count to ten, please, and take your time."}]
EOS = 2


@pytest.fixture(scope="session")
def model_folder() -> str:
    return resolve_model("quickstart:large")


@pytest.fixture(scope="session")
def encode(model_folder: str) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{model_folder}/tokenizer.json")
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass
class Desk:
    """The endpoint with everything a test may script or look at."""

    encode: Callable[[str], list[int]]
    small: ScriptedEngine = field(default_factory=lambda: ScriptedEngine([]))
    large: ScriptedEngine = field(default_factory=lambda: ScriptedEngine([]))
    port: FakeHandoffPort = field(default_factory=FakeHandoffPort)
    app: Any = None
    site: Any = None
    chat: Any = None

    def answer(self, small: str = SMALL_TEXT, large: str = LARGE_TEXT) -> None:
        """Script both models: the small one writes `small`, the large one `large`, then EOS."""
        self.small.script = steps([*self.encode(small), EOS])
        self.large.script = steps([*self.encode(large), EOS])

    def doubt(self, text: str, certain_tokens: int) -> None:
        """The small model writes `text` and doubts everything after `certain_tokens`."""
        ids = [*self.encode(text), EOS]
        self.small.script = [
            step(token, 8.0 if index < certain_tokens else 0.1) for index, token in enumerate(ids)
        ]

    @property
    def client(self) -> AsyncOpenAI:
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
        http = httpx2.AsyncClient(transport=transport)
        return AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
        )

    @property
    def http(self) -> httpx2.AsyncClient:
        """Plain HTTP, for what the official client would not send."""
        transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url="http://test")

    async def complete(self, model: str = "cascade", **kwargs: Any) -> Any:
        """A text completion; streamed, its chunks."""
        body = kwargs.pop("extra_body", {})
        if (cascade := kwargs.pop("cascade", None)) is not None:
            body = {**body, "cascade": cascade}
        kwargs.setdefault("prompt", "Count to ten, please, and take your time:")
        kwargs.setdefault("max_tokens", 40)
        made = await self.client.completions.create(model=model, extra_body=body, **kwargs)
        return [chunk async for chunk in made] if kwargs.get("stream") else made

    async def ask(self, model: str = "cascade", **kwargs: Any) -> Any:
        cascade = kwargs.pop("cascade", None)
        body = kwargs.pop("extra_body", {})
        if cascade is not None:
            body = {**body, "cascade": cascade}
        kwargs.setdefault("messages", ASK)
        return await self.client.chat.completions.create(model=model, extra_body=body, **kwargs)

    async def stream(self, **kwargs: Any) -> tuple[str, list[Any]]:
        """The streamed text of choice 0 and all chunks."""
        chunks = [chunk async for chunk in await self.ask(stream=True, **kwargs)]
        parts = [
            choice.delta.content or ""
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == 0
        ]
        return "".join(parts), chunks

    async def settled(self) -> bool:
        """Whether nothing is left open, once the background has ended."""
        await self.site.background.drain()
        return (self.small.open, self.large.open, self.port.open) == (0, 0, set())


@pytest.fixture(scope="session")
def endpoint(model_folder: str) -> tuple[Any, Any, dict[str, Any]]:
    """(service, config, switchboard): vLLM's front end is made once; engines change per test."""
    from cluster.telemetry import make_tracer
    from deployments.chat_service import ChatService
    from deployments.live_routing import LiveRouting
    from deployments.observer import Observer

    switchboard: dict[str, Any] = {}

    class Switched:
        def __init__(self, part: str) -> None:
            self._part = part

        def __getattr__(self, name: str) -> Any:
            return getattr(switchboard[self._part], name)

    model = {"accelerator": "cpu", "source": "quickstart:large", "dtype": "float32"}
    config = CascadeConfig.model_validate(
        {
            "small": {**model, "name": "little", "max_model_len_tokens": 256},
            "large": {
                **model,
                "name": "big",
                "max_model_len_tokens": 512,
                "tool_call_parser": "hermes",
            },
            "mapper": {"small_to_large": "identity"},
            "routing": {
                "margin_window_tokens": 2,
                "margin_threshold": 1.0,
                "hold_back_tokens": 2,
            },
            "router": {"request_timeout_s": 20},
        }
    )
    site = Site(
        small=Switched("small"),  # type: ignore[arg-type]
        large=Switched("large"),  # type: ignore[arg-type]
        handoffs=Switched("port"),  # type: ignore[arg-type]
        names={"small": "little", "large": "big"},
        small_context_tokens=256,
        min_handoff_tokens=8,
        hold_back_tokens=2,
        sessions=LocalSessions(max_tokens=100_000, ttl_s=600.0),
    )
    observer = Observer(None, make_tracer(None))
    live = LiveRouting(config, site.large)
    return ChatService(config, site, model_folder, observer, live), site, switchboard


@pytest.fixture
def desk(endpoint: tuple[Any, Any, dict[str, Any]], encode: Any) -> Iterator[Desk]:
    from deployments.openai_app import Service, build_http_app

    chat, site, switchboard = endpoint

    async def nothing() -> Any:
        return {}

    # Scripted engines answer in no time: a forecast made of that would never hand over.
    site.forecasts.update(small=Forecast(), large=Forecast())
    made = Desk(encode, site=site, chat=chat)
    made.app = build_http_app(Service(chat=chat, health=nothing, metrics=nothing))
    made.answer()
    switchboard |= {"small": made.small, "large": made.large, "port": made.port}
    yield made
    switchboard.clear()


def cascade_of(thing: Any) -> Any:
    """The `cascade` object of a response, choice or chunk."""
    return thing.model_extra["cascade"]
