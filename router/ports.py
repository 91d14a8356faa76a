"""What the router needs from the outside: two engines and something that hands KV over.

`deployments/router.py` implements these with Ray handles, `tests/fakes.py` with scripts. Nothing
here knows how tokens are computed or how KV travels.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cluster.errors import HandoffError

KeepRule = Literal["never", "on_abort", "always"]
"""When an engine keeps a request's KV for a handoff: at no end, when the request is
aborted (an escalation in mid-answer), or at any end."""


def new_request_id(affinity: str | None = None) -> str:
    """An id for an engine request. All calls about requests of one `affinity` (no dash in it) go to
    the same replica of the engine, for only that one knows them."""
    return f"{affinity or uuid.uuid4().hex[:16]}-{uuid.uuid4().hex}"


def affinity_of(request_id: str) -> str:
    """What `new_request_id` put in front."""
    return request_id.partition("-")[0]


FinishReason = Literal["stop", "length"]
"""Why an engine ended an answer: the model's own end (or a stop token), or `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class TokenStep:
    """One generated token.

    `logprobs` holds (token id, log-probability in nats, rank from 1), the sampled token first and
    then the most likely ones; empty means that the engine gave none, never certainty.
    """

    token_id: int
    logprobs: tuple[tuple[int, float, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineChunk:
    """Tokens that arrived together. `finish_reason` is set on the last chunk alone.

    `stop_token_id` is the token that ended the answer when it was not the end-of-sequence token.
    `cached_tokens` is how much of the prompt the engine did not have to read, unknown until the
    first chunk with tokens. `prompt_logprobs` (nats) and `prompt_ranks` (from 1) say what the model
    thought of the prompt's tokens from the second on; on the first chunk alone, when asked for.
    """

    steps: tuple[TokenStep, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    prompt_ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """Token ids in, token ids out.

    `sampling` is passed through unread (vLLM's SamplingParams); `max_tokens` here is what counts.
    `cache_salt` separates prefix caches; `kv_transfer_params` is ours, never the client's.
    `traceparent` is a W3C trace context, passed on unread.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Any = None
    cache_salt: str | None = None
    keep: KeepRule = "never"
    kv_transfer_params: Mapping[str, Any] | None = None
    prompt_logprobs: bool = False
    traceparent: str | None = None


Stage = Literal["read", "map", "wait_target", "write"]
"""What a mapper does with a chunk, in this order."""


@dataclass(frozen=True, kw_only=True)
class HandoffStep:
    """A chunk in one stage of the mapper: tokens from the order's beginning, seconds from its start
    on the mapper's clock."""

    stage: Stage
    first_token: int
    last_token: int
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, kw_only=True)
class HandoffReport:
    """What one finished handoff cost, as told by the processes that spent the time.

    Stages overlap: `read_s` + `map_s` + `write_s` exceeds `convert_s`, which runs in the mapper
    from the order to the last WRITE. `wait_target_s` is how long finished work waited for the
    target's blocks. `cold` is true when a NIXL handshake with a peer was part of it. `steps` are
    the stages' pieces in the order of their ends.
    """

    covered_tokens: int
    bytes_read: int
    bytes_written: int
    queue_s: float
    read_s: float
    map_s: float
    write_s: float
    wait_target_s: float
    convert_s: float
    chunks: int
    cold: bool
    steps: tuple[HandoffStep, ...] = ()

    @property
    def stages_s(self) -> dict[str, float]:
        """The mapper's stages by name."""
        return {
            "queue": self.queue_s,
            "read": self.read_s,
            "map": self.map_s,
            "write": self.write_s,
            "wait_target": self.wait_target_s,
        }

    @property
    def temperature(self) -> Literal["cold", "warm"]:
        """`cold` with a first handshake, as a word."""
        return "cold" if self.cold else "warm"


class Handoff(Protocol):
    """One running handoff, opened by HandoffPort.begin."""

    handoff_id: str
    covered_tokens: int
    """Leading tokens of the conversation whose KV the source kept."""
    ticket_s: float
    """From the request to the source until its ticket and the mapper's answer were there."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any]:
        """Goes unread into the target's EngineRequest."""

    async def failure(self) -> HandoffError:
        """Return when the handoff has failed; never returns for one that succeeds."""

    async def report(self) -> HandoffReport:
        """Wait for the end and return the costs; raises HandoffError when it failed."""

    async def cancel(self) -> None:
        """Give the handoff up: source blocks are released, nothing more is written. Idempotent."""


class HandoffPort(Protocol):
    """Moves KV from one engine, the source, to the other one, the target."""

    async def begin(
        self,
        *,
        source_request_id: str,
        token_ids: tuple[int, ...],
        held_tokens: int = 0,
        traceparent: str | None = None,
    ) -> Handoff:
        """Stop the source's request if it still runs, take its ticket and order the conversion.

        `token_ids` is prompt plus the tokens that the target continues from; it is believed to
        have the first `held_tokens` already, so the work begins behind them. Raises
        HandoffError(reason) when there is nothing to hand over: the caller then recomputes.
        """


class EnginePort(Protocol):
    """One model's engine deployment."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """Stream an answer; raises EngineError when the engine cannot.

        Closing the generator aborts the request in the engine.
        """

    async def release(self, request_id: str) -> None:
        """Drop the KV kept for a request, also when its abort is still on the way. Idempotent."""
