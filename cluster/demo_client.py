"""One streamed request through the official `openai` client, timed where the client stands.

It turns the answer into pieces with arrival times and the endpoint's own account of it. It does
not know what a demonstration shows, or how to print anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.errors import EngineError
from router.api import CascadeInfo

if TYPE_CHECKING:
    from openai import OpenAI

_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text that arrived together. `tokens` counts the answer's tokens up to and including it,
    `at_ms` is the client's clock since the request was sent."""

    text: str
    tokens: int
    at_ms: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer, as its client saw it."""

    pieces: Sequence[Piece]
    prompt_tokens: int
    cascade: CascadeInfo

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def small_tokens(self) -> int:
        """Tokens before the large model took over; all of them when it did not."""
        return self.cascade.served_by[0].tokens if self.cascade.served_by else 0

    @property
    def pause_ms(self) -> float | None:
        """From the last token of the first model to the first of the second, at the client."""
        before = [piece.at_ms for piece in self.pieces if piece.tokens <= self.small_tokens]
        after = [piece.at_ms for piece in self.pieces if piece.tokens > self.small_tokens]
        return after[0] - before[-1] if before and after else None


def connect(url: str) -> OpenAI:
    """The official client for the endpoint at `url`, past any proxy: the endpoint is local."""
    from openai import DefaultHttpxClient, OpenAI

    return OpenAI(
        base_url=f"{url}/v1",
        api_key="unused",
        max_retries=0,
        timeout=_TIMEOUT_S,
        http_client=DefaultHttpxClient(trust_env=False),
    )


def ask(
    client: OpenAI,
    model: str,
    messages: list[dict[str, str]],
    *,
    max_tokens: int,
    cascade: Mapping[str, Any] | None = None,
    min_tokens: int = 0,
    on_piece: Callable[[Piece], None] | None = None,
) -> Answer:
    """Ask greedily and read the stream to its end; `cascade` are the request's routing options.

    `min_tokens` keeps a model from ending its answer early. Raises EngineError when the endpoint
    refuses, breaks off, or does not say who answered.
    """
    from openai import OpenAIError

    body: dict[str, Any] = {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "min_tokens": min_tokens,
    }
    if cascade is not None:
        body["cascade"] = dict(cascade)
    pieces: list[Piece] = []
    account: Any = None
    prompt_tokens = 0
    sent = time.perf_counter()
    try:
        untyped: Any = messages
        stream = client.chat.completions.create(
            model=model,
            messages=untyped,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body=body,
        )
        for chunk in stream:
            at_ms = (time.perf_counter() - sent) * 1000.0
            account = (chunk.model_extra or {}).get("cascade", account)
            if chunk.usage is None or not chunk.choices:
                continue
            prompt_tokens = chunk.usage.prompt_tokens
            piece = Piece(
                text=chunk.choices[0].delta.content or "",
                tokens=chunk.usage.completion_tokens,
                at_ms=at_ms,
            )
            if piece.tokens > 0:
                pieces.append(piece)
                if on_piece is not None:
                    on_piece(piece)
    except OpenAIError as error:
        raise EngineError(f"the endpoint did not answer: {error}") from error
    if account is None:
        raise EngineError("the answer broke off before it said who wrote it (`cascade`)")
    return Answer(
        pieces=pieces, prompt_tokens=prompt_tokens, cascade=CascadeInfo.model_validate(account)
    )
