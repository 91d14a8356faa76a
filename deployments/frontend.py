"""vLLM's OpenAI chat behaviour without an engine: rendering, stop strings, tools, usage, logprobs.

vLLM's own `OpenAIServingChat` runs on top of `SplicedClient`, which takes the place of vLLM's
engine client: it feeds the spliced tokens of `router.splice` to vLLM's `OutputProcessor`. One
instance serves one model name. It knows neither HTTP nor Ray.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.outputs import RequestOutput
from vllm.renderers import BaseRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from cluster.config import ModelConfig as ModelSettings
from cluster.errors import EngineError
from router.api import CascadeOptions
from router.policy import Policy
from router.ports import EngineChunk, TokenStep
from router.splice import Cascade, Job, Site
from router.stats import Recorder

MIN_LOGPROBS = 2
"""What every engine request asks for: the margin needs the two most likely tokens."""


@dataclass(kw_only=True)
class Call:
    """One HTTP request: how it wants to be routed, and its answers by choice index."""

    options: CascadeOptions
    new_policy: Callable[[], Policy]
    recorder: Recorder
    has_tools: bool = False
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    cascades: dict[int, Cascade] = field(default_factory=dict)
    error: Exception | None = None
    feeds: list[asyncio.Task[None]] = field(default_factory=list)

    async def close(self) -> None:
        """Stop what still writes; returns when the engines were told."""
        for feed in self.feeds:
            feed.cancel()
        await asyncio.gather(*self.feeds, return_exceptions=True)


class SplicedClient:
    """Has what `OpenAIServingChat` uses of vLLM's EngineClient; the tokens come from the splice."""

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
        self._calls[f"chatcmpl-{call.call_id}"] = call

    async def close(self, call: Call) -> None:
        """Forget the call and stop its answers, also when the caller is being cancelled."""
        if self._calls.pop(f"chatcmpl-{call.call_id}", None) is not None:
            await self._site.background.finish(call.close())

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Every request is admitted: the engines queue, Ray limits."""

    async def is_tracing_enabled(self) -> bool:
        """Spans are the router's own."""
        return False

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's `EngineClient.generate`: one cascade per choice, merged into one stream."""
        call = self._calls[request_id]
        sampling_params.prompt_logprobs = None
        parent = self.input_processor.process_inputs(
            request_id, prompt, sampling_params, supported_tasks=("generate",)
        )
        self.input_processor.assign_request_id(parent)
        params = parent.sampling_params
        assert params is not None and params.n is not None
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
            call.cascades[index] = self._cascade(call, child)
        call.feeds += [
            asyncio.create_task(self._feed(child, call, index, queue))
            for index, child in enumerate(children)
        ]
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

    def _cascade(self, call: Call, request: EngineCoreRequest) -> Cascade:
        params, prompt = request.sampling_params, request.prompt_token_ids
        assert params is not None and params.max_tokens is not None and prompt is not None
        job = Job(
            prompt_token_ids=tuple(prompt),
            max_tokens=params.max_tokens,
            sampling=lambda sent, limit: engine_sampling(params, sent, limit),
            may_switch=lambda sent: self._may_switch(call, params, sent),
        )
        site = replace(self._site, recorder=call.recorder)
        return Cascade(site, call.new_policy(), call.options, job)

    def _may_switch(self, call: Call, params: SamplingParams, sent: tuple[int, ...]) -> bool:
        """Never in a split character, in a tool call, or in an answer bound to a grammar."""
        if not sent:
            return True
        if params.structured_outputs is not None or (call.has_tools and not self.tool_markers):
            return False
        text = self.renderer.get_tokenizer().decode(list(sent))
        if call.has_tools and self.tool_markers:
            start, end = self.tool_markers
            if text.count(start) > text.count(end):
                return False
        return not text.endswith("\ufffd")

    async def _feed(
        self, request: EngineCoreRequest, call: Call, index: int, queue: RequestOutputCollector
    ) -> None:
        """Read one cascade to its end, or to the stop string that vLLM finds in its text."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                aclosing(call.cascades[index].pieces()) as pieces,
            ):
                async for piece in pieces:
                    output = _core_output(request, piece.chunk)
                    if self._outputs.process_outputs([output]).reqs_to_abort:
                        return
        except Exception as error:
            call.error = error
            # Put on top of tokens that wait there, it would take their place.
            if queue.output is None:
                queue.put(error)


def engine_sampling(params: SamplingParams, sent: int, max_tokens: int) -> SamplingParams:
    """`params` for one engine's part of an answer of which `sent` tokens are written already.

    Engines see no text: stop strings stay with the front end. `min_tokens` counts over the whole
    answer. Penalties on earlier output count the sent tokens as prompt.
    """
    part = copy.copy(params)
    part.n = 1
    part.max_tokens = max_tokens
    part.min_tokens = min(max(0, params.min_tokens - sent), max_tokens)
    part.logprobs = max(MIN_LOGPROBS, params.logprobs or 0)
    part.detokenize = False
    part.stop = []
    part.output_text_buffer_length = 0
    part.include_stop_str_in_output = False
    part.output_kind = RequestOutputKind.DELTA
    part.stream_interval = None
    return part


def _core_output(request: EngineCoreRequest, chunk: EngineChunk) -> EngineCoreOutput:
    params = request.sampling_params
    assert params is not None
    reason = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, None: None}
    stats = None
    if chunk.cached_tokens is not None:
        stats = PrefillStats(num_cached_tokens=chunk.cached_tokens)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[step.token_id for step in chunk.steps],
        new_logprobs=_logprobs(chunk.steps, params.logprobs),
        finish_reason=reason[chunk.finish_reason],
        stop_reason=chunk.stop_token_id,
        prefill_stats=stats,
    )


def _logprobs(steps: tuple[TokenStep, ...], wanted: int | None) -> LogprobsLists | None:
    """vLLM's arrays: the sampled token, then the `wanted` most likely ones, per step."""
    if wanted is None or not steps:
        return None
    token_ids, logprobs, ranks = [], [], []
    for step in steps:
        best = sorted(step.logprobs, key=lambda entry: entry[2])[:wanted]
        if len(best) < wanted or not step.logprobs:
            raise EngineError("the engine gave fewer log-probabilities than the request asked for")
        row = [step.logprobs[0], *best]
        token_ids.append([entry[0] for entry in row])
        logprobs.append([entry[1] for entry in row])
        ranks.append(row[0][2])
    return LogprobsLists(np.array(token_ids), np.array(logprobs), np.array(ranks))


@dataclass(frozen=True)
class ChatFront:
    """vLLM's chat endpoint for one served name."""

    client: SplicedClient
    chat: OpenAIServingChat


def make_model_config(folder: str, settings: ModelSettings) -> ModelConfig:
    """vLLM's view of a model for rendering: configuration and tokenizer, never the weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=folder, dtype=settings.dtype, max_model_len=settings.max_model_len_tokens
    ).create_model_config()


def make_front(
    name: str,
    model_config: ModelConfig,
    renderer: BaseRenderer,
    settings: ModelSettings,
    site: Site,
    timeout_s: float,
) -> ChatFront:
    """The chat endpoint under `name` with the context length and parsers of `settings`.

    The renderer, and with it the tokenizer and the chat template, is shared by all names.
    """
    config = copy.copy(model_config)
    config.max_model_len = settings.max_model_len_tokens
    client = SplicedClient(VllmConfig(model_config=config), renderer, site, timeout_s)
    engine = cast(EngineClient, client)
    shared: dict[str, Any] = {
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
        "enable_auto_tools": settings.tool_call_parser is not None,
        "tool_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser or "",
    }
    chat = OpenAIServingChat(
        engine,
        OpenAIServingModels(engine, [BaseModelPath(name=name, model_path=config.model)]),
        "assistant",
        online_renderer=OnlineRenderer(config, renderer, **shared),
        enable_prompt_tokens_details=True,
        **shared,
    )
    parser = None if chat.parser_cls is None else chat.parser_cls.tool_parser_cls
    start = getattr(parser, "tool_call_start_token", None)
    end = getattr(parser, "tool_call_end_token", None)
    if isinstance(start, str) and isinstance(end, str):
        client.tool_markers = (start, end)
    return ChatFront(client, chat)
