"""The Serve deployment of one model: token ids in, token ids out, and tickets for what it read.

A subclass of Ray Serve LLM's `LLMServer`, so placement groups, tensor parallelism and health checks
are Ray's. It neither renders nor detokenises: the router's front end does both, once for two
models. `keep` and `handoff` reach vLLM's scheduler through the request's `kv_transfer_params`; the
tickets come back over a local socket (`TicketDesk`), because vLLM returns nothing for a request
that was aborted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import ray
from ray.llm._internal.serve.core.server.llm_server import LLMServer

from cluster.config import parse_cascade_config
from cluster.errors import EngineError
from cluster.sources import resolve_model
from cluster.telemetry import EngineMetrics, make_tracer, make_tracer_provider
from deployments.engine_setup import CascadeVLLMEngine, llm_config
from deployments.messages import EngineLayout, Ticket
from deployments.pacing import Pace
from deployments.spans import Generation
from deployments.tickets import TicketDesk
from router.ports import EngineChunk, EngineRequest, TokenStep

log = logging.getLogger("kvcascade.engine")

_HANDED_OVER_POLL_S = 0.1


class Engine(LLMServer):
    """One replica of the small or the large model."""

    async def __init__(self, config: dict[str, Any], role: str) -> None:
        cascade = parse_cascade_config(config)
        self._model = cascade.small if role == "small" else cascade.large
        self._role = role
        self._lease_s = cascade.handoff.lease_s
        self._source = await asyncio.to_thread(resolve_model, self._model.source)
        self._desk = TicketDesk(lease_s=cascade.handoff.lease_s)
        await super().__init__(
            llm_config(
                cascade,
                self._model,
                source=self._source,
                host=ray.util.get_node_ip_address(),
                ticket_address=self._desk.address,
            ),
            engine_cls=CascadeVLLMEngine,
        )
        assert isinstance(self.engine, CascadeVLLMEngine)
        self._client = self.engine.client
        self._requests = 0
        self._metrics = EngineMetrics()
        self._pace = Pace(self._model.max_chunks_per_s)
        self._traces = make_tracer_provider(cascade.telemetry, role)
        self._tracer = make_tracer(self._traces)

    async def __del__(self) -> None:
        """Serve calls and awaits it when the replica ends."""
        client = getattr(self, "_client", None)
        if client is not None and not client.errored:
            await _handed_over(self._desk)
        if traces := getattr(self, "_traces", None):
            # Beside the engine's own end, which a collector that is gone must not delay.
            await asyncio.gather(super().__del__(), asyncio.to_thread(traces.shutdown))
        else:
            await super().__del__()

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineChunk]:
        """Stream the answer to `request`; closing the stream aborts the request in vLLM."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        params = request.sampling.clone() if request.sampling else SamplingParams(temperature=0)
        params.max_tokens = request.max_tokens
        params.n = 1
        params.detokenize = False
        params.stop = []
        params.output_kind = RequestOutputKind.DELTA
        params.logprobs = max(2, params.logprobs or 0)
        if request.prompt_logprobs:
            params.prompt_logprobs = 0  # the prompt's own tokens and their ranks, no others
            # vLLM sets this only when it makes the object; a cached block has no log-probabilities.
            params.skip_reading_prefix_cache = True
        transfer: dict[str, Any] = dict(request.kv_transfer_params or {})
        if request.keep != "never":
            transfer["keep"] = {"ticket_id": request.request_id, "rule": request.keep}
            self._desk.expect(request.request_id)
        params.extra_args = {"kv_transfer_params": transfer} if transfer else None
        salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        prompt = tokens_input(list(request.prompt_token_ids), **salt)
        try:
            outputs = self._client.generate(prompt, params, request.request_id)
            span = Generation(self._tracer, self._model.name, request)
            with span, self._pace.stream() as pause:
                async with aclosing(outputs):
                    async for output in outputs:
                        span.saw(output)
                        yield _chunk(output)
                        if not output.finished:
                            await pause()
        except Exception:
            # The scheduler may never have seen the request: no ticket will come.
            self._desk.forget(request.request_id)
            raise

    async def take_ticket(self, request_id: str) -> Ticket | None:
        """End the request if it still runs, and return the promise for its KV.

        None when nothing was kept: the request was never read, ended under a rule that keeps
        nothing, or too much of the pool is kept already.
        """
        await self._client.abort(request_id)
        return await self._desk.take(request_id)

    async def release(self, request_id: str) -> None:
        """Nobody wants the ticket of this request: free its blocks."""
        await self._desk.release(request_id)

    async def layout(self) -> EngineLayout:
        """Where this replica keeps its KV, for mappers that shake hands before they have to."""
        return await self._desk.layout()

    async def describe(self) -> dict[str, Any]:
        """What the engine is and what its KV pool holds (see `messages.Census`)."""
        vllm_config = self._client.vllm_config
        return {
            **asdict(await self._desk.census()),
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "requests": self._requests,
            "role": self._role,
            "name": self._model.name,
            "source": str(self._source),
            "block_size_tokens": vllm_config.cache_config.block_size,
            "max_model_len_tokens": vllm_config.model_config.max_model_len,
            "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        }

    async def check_health(self) -> None:
        """Raises EngineError when vLLM's core is gone; Serve then replaces the replica.

        Serve calls it every ten seconds, and so it renews the gauges.
        """
        if self._client.errored:
            raise EngineError(f"{self._model.name}: the engine core has died")
        try:
            census = await self._desk.census()
        except TimeoutError:
            log.warning("%s: the scheduler does not say what its pool holds", self._model.name)
            return
        self._metrics.set_pool(
            self._model.name,
            total=census.num_blocks,
            free=census.free_blocks,
            pinned=census.pinned_blocks,
            loading=census.loading_blocks,
        )


async def _handed_over(desk: TicketDesk) -> None:
    """Wait until mappers have read what they were promised, or the leases are over.

    Serve waits for calls; of a ticket that was taken it knows nothing.
    """
    try:
        while (await desk.census()).pinned_blocks:
            await asyncio.sleep(_HANDED_OVER_POLL_S)
    except TimeoutError:
        log.warning("the scheduler does not say whether handoffs are over")


def _chunk(output: Any) -> EngineChunk:
    """vLLM's RequestOutput of one delta."""
    answer = output.outputs[0]
    logprobs = answer.logprobs or [None] * len(answer.token_ids)
    prompt = _prompt(output)
    return EngineChunk(
        steps=tuple(
            _step(token_id, entries)
            for token_id, entries in zip(answer.token_ids, logprobs, strict=True)
        ),
        finish_reason=_finish_reason(answer.finish_reason),
        stop_token_id=answer.stop_reason if type(answer.stop_reason) is int else None,
        cached_tokens=output.num_cached_tokens,
        prompt_logprobs=None if prompt is None else tuple(logprob for logprob, _ in prompt),
        prompt_ranks=None if prompt is None else tuple(rank for _, rank in prompt),
    )


def _prompt(output: Any) -> list[tuple[float, int]] | None:
    """(log-probability, rank) of the prompt's tokens from the second on; None when not there.

    vLLM sends them with the first delta alone, with None for the first token.
    """
    if not output.prompt_logprobs:
        return None
    found = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    entries = [one[token_id] for token_id, one in found if one is not None]
    return [(float(entry.logprob), int(entry.rank)) for entry in entries]


def _step(token_id: int, entries: Any) -> TokenStep:
    """vLLM's {token id: Logprob} for one position, the sampled token first."""
    if entries is None:
        return TokenStep(token_id=token_id)
    ranked = sorted(
        ((i, float(e.logprob), int(e.rank)) for i, e in entries.items() if e.rank is not None),
        key=lambda item: (item[0] != token_id, item[2]),
    )
    return TokenStep(token_id=token_id, logprobs=tuple(ranked))


def _finish_reason(reason: str | None) -> Any:
    if reason is None or reason in ("stop", "length"):
        return reason
    raise EngineError(f"vLLM ended the request with {reason!r}")
