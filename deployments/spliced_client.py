"""Takes the place of vLLM's engine client: the tokens come from the splice.

It feeds the spliced tokens of `router.splice` to vLLM's `OutputProcessor`, which finds stop
strings, joins split characters and counts. One instance serves one model name. It knows neither
HTTP nor Ray.
"""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.renderers import BaseRenderer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from cluster.errors import RequestError
from deployments.call import Call
from deployments.engine_format import core_output, engine_sampling
from deployments.history import adopt
from router.conversations import Conversation, ConversationTurn, tenant_salt
from router.job import Job, Site
from router.splice import Cascade

_REQUEST_ID = re.compile(r"(?:chatcmpl|cmpl)-([0-9a-f]{32})(?:-(\d+))?")
"""vLLM's ids: what it was given, and for completions the number of the prompt."""

MAX_CHARACTER_TOKENS = 8
"""More tokens than one character is ever split into: UTF-8 has four bytes at most."""


class SplicedClient:
    """Has what vLLM's serving classes use of its EngineClient."""

    errored = False

    def __init__(
        self, vllm_config: VllmConfig, renderer: BaseRenderer, site: Site, timeout_s: float
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer
        self.input_processor = InputProcessor(vllm_config, renderer=renderer)
        self.tool_markers: tuple[str, str] | None = None
        self._outputs = OutputProcessor(renderer.tokenizer, log_stats=False)
        self._site = site
        self._timeout_s = timeout_s
        self._calls: dict[str, Call] = {}

    def open(self, call: Call) -> None:
        """Expect `generate` for this call; its id is the request id that vLLM was given."""
        self._calls[call.call_id] = call

    async def close(self, call: Call) -> None:
        """Forget the call and stop its answers, also when the caller is being cancelled."""
        if self._calls.pop(call.call_id, None) is not None:
            await self._site.background.finish(call.close())

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Every request is admitted: the engines queue, Ray limits."""

    async def is_tracing_enabled(self) -> bool:
        """Spans are the router's own."""
        return False

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's `EngineClient.generate`: one cascade per choice, merged into one stream.

        Choices are counted through all prompts of the call.
        """
        known = _REQUEST_ID.fullmatch(request_id)
        assert known is not None, request_id
        call, prompt_index = self._calls[known[1]], int(known[2] or 0)
        sampling_params.prompt_logprobs = None
        parent = self.input_processor.process_inputs(
            request_id, prompt, sampling_params, supported_tasks=("generate",)
        )
        self.input_processor.assign_request_id(parent)
        before = await self._recall(call, parent)
        params = parent.sampling_params
        assert params is not None and params.n is not None
        if params.structured_outputs is not None and call.options.escalate_after_tokens:
            call.error = _grammar_switch()
            raise call.error
        queue = RequestOutputCollector(params.output_kind, parent.request_id)
        family = ParentRequest(parent) if params.n > 1 else None
        children: list[EngineCoreRequest] = []
        for index in range(params.n):
            child = parent
            if family is not None:
                child = copy.copy(parent)
                child.request_id, child.sampling_params = family.get_child_info(index)
            self._outputs.add_request(child, None, family, index, queue)
            children.append(child)
            cascade = self._cascade(call, child, before, remember=index == 0)
            call.cascades[prompt_index * params.n + index] = cascade
            call.feeds.append(asyncio.create_task(self._feed(child, call, cascade, queue)))
        try:
            finished = False
            while not finished:
                output = queue.get_nowait()
                if output is None:
                    if call.error is not None:
                        raise call.error
                    output = await queue.get()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                yield output
        finally:
            self._outputs.abort_requests([child.request_id for child in children], internal=True)

    async def _recall(self, call: Call, request: EngineCoreRequest) -> Conversation | None:
        """What is known of the conversation; its own token ids replace what was rendered."""
        prompt, params = request.prompt_token_ids, request.sampling_params
        assert prompt is not None and params is not None and params.max_tokens is not None
        if call.session is None or call.session.begins or self._site.sessions is None:
            return None
        known = await self._site.sessions.get(call.session)
        if known is not None:
            tokenizer = self.renderer.get_tokenizer()
            adopted = adopt(known.token_ids, prompt, tokenizer.decode)
            # The same text may be a few tokens longer, which an answer up to the limit gives way.
            room_tokens = self.model_config.max_model_len - len(adopted)
            if room_tokens > 0:
                request.prompt_token_ids = list(adopted)
                params.max_tokens = min(params.max_tokens, room_tokens)
        return known

    def _cascade(
        self, call: Call, request: EngineCoreRequest, before: Conversation | None, *, remember: bool
    ) -> Cascade:
        params, ids = request.sampling_params, request.prompt_token_ids
        assert params is not None and params.max_tokens is not None and ids is not None
        prompt, turn = tuple(ids), None
        if call.session is not None and self._site.sessions is not None:
            turn = ConversationTurn(call.session, before, prompt, self._site.drift_limits)
        job = Job(
            prompt_token_ids=prompt,
            max_tokens=params.max_tokens,
            sampling=lambda sent, limit: engine_sampling(params, sent, limit),
            may_switch=lambda sent: self._may_switch(call, params, sent),
            turn=turn,
            remember=remember,
            salt=tenant_salt(call.tenant),
        )
        site = replace(call.routing.at(self._site), recorder=call.recorder)
        return Cascade(site, call.new_policy(), call.options, job)

    def _may_switch(self, call: Call, params: SamplingParams, sent: tuple[int, ...]) -> bool:
        """Never in a split character, in a tool call, or in an answer bound to a grammar."""
        if not sent:
            return True
        if params.structured_outputs is not None or (call.has_tools and not self.tool_markers):
            return False
        # Asked on every token of a doubtful answer; only a tool call can begin further back.
        tail = sent if call.has_tools else sent[-MAX_CHARACTER_TOKENS:]
        text = self.renderer.get_tokenizer().decode(list(tail))
        if call.has_tools and self.tool_markers:
            start, end = self.tool_markers
            if text.count(start) > text.count(end):
                return False
        return not text.endswith("\ufffd")

    async def _feed(
        self,
        request: EngineCoreRequest,
        call: Call,
        cascade: Cascade,
        queue: RequestOutputCollector,
    ) -> None:
        """Read one cascade to its end, or to the stop string that vLLM finds in its text."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                aclosing(cascade.pieces()) as pieces,
            ):
                async for piece in pieces:
                    output = core_output(request, piece.chunk)
                    if self._outputs.process_outputs([output]).reqs_to_abort:
                        return
        except Exception as error:
            call.error = error
            # Put on top of tokens that wait there, it would take their place.
            if queue.output is None:
                queue.put(error)


def _grammar_switch() -> RequestError:
    return RequestError(
        "an answer bound to a grammar can only change models before its first token: "
        "set `cascade.escalate_after_tokens` to 0",
        code="invalid_value",
        param="cascade.escalate_after_tokens",
    )
