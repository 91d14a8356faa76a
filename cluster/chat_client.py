"""A conversation with an endpoint, as its client sees it: tokens, who wrote them, scores.

It speaks OpenAI's API through the official client and reads the `cascade` object. It does not know
how anything is shown.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster.endpoint_url import nobody_there, root_url, too_slow, uses_proxy
from cluster.errors import EngineError, KvcascadeError, RequestError
from router.api import CascadeInfo

if TYPE_CHECKING:
    from openai import OpenAI

_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Token:
    """Text of one token, or of several that arrived as one.

    `model` is None where the endpoint did not say, `margin_nats` where there were no
    log-probabilities.
    """

    text: str
    model: str | None
    margin_nats: float | None


@dataclass(kw_only=True)
class Reply:
    """What arrived of one answer. `model` wrote it unless the endpoint says otherwise.

    `scores` are (token of the small model from 1, the policy's score in nats), `ttft_ms` runs from
    sending to the first text, on this machine's clock.
    """

    model: str | None
    text: str = ""
    tokens: int = 0
    prompt_tokens: int | None = None
    ttft_ms: float | None = None
    finish_reason: str | None = None
    scores: list[tuple[int, float | None]] = field(default_factory=list)
    threshold: float | None = None
    cascade: CascadeInfo | None = None
    _runs: list[tuple[str, int]] = field(default_factory=list)

    def take(self, event: Mapping[str, Any]) -> list[Token]:
        """Add one streamed event (its JSON object); returns its tokens."""
        usage, progress = event.get("usage"), event.get("cascade") or {}
        if usage:
            self.prompt_tokens = usage["prompt_tokens"]
        if progress:
            self._runs = [(run["model"], run["tokens"]) for run in progress["served_by"]]
            self.scores += [(number, score) for number, score in progress.get("scores") or []]
            decided = progress.get("decision") or {}
            found = progress.get("threshold", decided.get("threshold"))
            self.threshold = self.threshold if found is None else found
        choices = event.get("choices") or []
        if not choices:
            return []
        choice = choices[0]
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
            self.cascade = CascadeInfo.model_validate(progress) if progress else None
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        self.text += content
        entries = (choice.get("logprobs") or {}).get("content") or []
        return self._split(delta.get("reasoning") or content, entries)

    def _split(self, text: str, entries: Sequence[Mapping[str, Any]]) -> list[Token]:
        """One token per entry where their texts make up `text`.

        A token that ends within a character has no text of its own; the next one gets it all.
        """
        found, rest = [], text
        for index, entry in enumerate(entries):
            last = index == len(entries) - 1
            part = rest if last else str(entry["token"])
            if part and rest.startswith(part):
                writer = self._writer(self.tokens + index)
                found.append(Token(text=part, model=writer, margin_nats=_margin(entry)))
                rest = rest[len(part) :]
        self.tokens += len(entries)
        if text and not entries:
            writer = self._writer(self.tokens - 1)
            found.append(Token(text=text, model=writer, margin_nats=None))
        return found

    def _writer(self, index: int) -> str | None:
        end = 0
        for model, tokens in self._runs:
            end += tokens
            if index < end:
                return model
        return self._runs[-1][0] if self._runs else self.model


class Chat:
    """A conversation in one session. `names` are the routed, the small and the large model.

    `options` is the `cascade` object of every request; `model` unset: the routed one. Connecting
    raises EngineError when nothing answers and RequestError when the endpoint refuses.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        model: str | None,
        max_tokens: int,
        options: Mapping[str, Any],
    ) -> None:
        self._client = _connect(url, api_key)
        self._url = url
        with _told(url):
            self.names = [card.id for card in self._client.models.list().data]
        self.model = model or self.names[0]
        self._max_tokens = max_tokens
        self._options = {"explain": True, "session_id": f"chat-{uuid.uuid4().hex}", **options}
        self._messages: list[dict[str, str]] = []

    def role(self, model: str | None) -> str:
        """`small` or `large` for their names, else `other`."""
        roles = dict(zip(self.names[1:3], ("small", "large"), strict=False))
        return roles.get(model or "", "other")

    def ask(self, question: str) -> Generator[tuple[list[Token], Reply]]:
        """Stream the answer: the new tokens, and all that arrived so far.

        What was seen becomes part of the conversation, also when the caller closes the iterator
        in mid-answer. Raises EngineError when the answer breaks off, RequestError when the
        endpoint refuses it.
        """
        asked = [*self._messages, {"role": "user", "content": question}]
        routed = self.model == self.names[0]
        reply = Reply(model=None if routed else self.model)
        untyped: Any = asked
        sent = time.perf_counter()
        try:
            with (
                _told(self._url),
                closing(
                    self._client.chat.completions.create(
                        model=self.model,
                        messages=untyped,
                        max_tokens=self._max_tokens,
                        logprobs=True,
                        top_logprobs=2,
                        stream=True,
                        stream_options={"include_usage": True},
                        extra_body={"cascade": self._options} if routed else None,
                    )
                ) as stream,
            ):
                for chunk in stream:
                    tokens = reply.take(chunk.to_dict())
                    if tokens and reply.ttft_ms is None:
                        reply.ttft_ms = (time.perf_counter() - sent) * 1000.0
                    yield tokens, reply
            if reply.finish_reason is None:
                raise EngineError("the answer broke off before its end")
        finally:
            if reply.text:
                self._messages = [*asked, {"role": "assistant", "content": reply.text}]


def _connect(url: str, api_key: str | None) -> OpenAI:
    from openai import DefaultHttpxClient, OpenAI

    return OpenAI(
        base_url=f"{root_url(url)}/v1",
        api_key=api_key or "unused",
        max_retries=0,
        timeout=_TIMEOUT_S,
        http_client=DefaultHttpxClient(trust_env=uses_proxy(url)),
    )


@contextmanager
def _told(url: str) -> Iterator[None]:
    """The client's errors as the project's own, in words."""
    import openai

    try:
        yield
    except openai.APITimeoutError:
        raise too_slow(url, _TIMEOUT_S) from None
    except openai.APIConnectionError:
        raise nobody_there(url) from None
    except openai.APIStatusError as error:
        raise _refused(error.status_code, _message(error)) from None
    except openai.APIError as error:
        raise EngineError(f"the answer broke off: {error.message}") from None


def _message(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return str(body.get("message") or error.message)


def _refused(status: int, message: str) -> KvcascadeError:
    if status >= 500:
        return EngineError(message)
    hint = " Give it with --api-key or KVCASCADE_API_KEY." if status == 401 else ""
    return RequestError(f"{message}{hint}", status=status)


def _margin(entry: Mapping[str, Any]) -> float | None:
    """Difference of the two best log-probabilities (nats); None when one is missing."""
    best = sorted((one["logprob"] for one in entry.get("top_logprobs") or []), reverse=True)
    return best[0] - best[1] if len(best) > 1 else None
