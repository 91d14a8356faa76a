"""vLLM's OpenAI behaviour without an engine: rendering, stop strings, tools, usage, logprobs.

vLLM's own serving classes run on top of `SplicedClient`. One `Front` serves one model name, and all
share the renderer. It knows neither HTTP nor Ray.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, cast

from vllm.config import ModelConfig, VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.renderers import BaseRenderer
from vllm.renderers.online_renderer import OnlineRenderer

from cluster.config import ModelConfig as ModelSettings
from deployments.spliced_client import SplicedClient
from router.job import Site


@dataclass(frozen=True)
class Front:
    """vLLM's endpoints for one served name."""

    client: SplicedClient
    chat: OpenAIServingChat
    completion: OpenAIServingCompletion
    tokenization: ServingTokenization

    async def answer(
        self, request: ChatCompletionRequest | CompletionRequest
    ) -> AsyncGenerator[str, None] | Any:
        """vLLM's events for `stream: true`, else its response or error object."""
        if isinstance(request, ChatCompletionRequest):
            return await self.chat.create_chat_completion(request)
        return await self.completion.create_completion(request)


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
) -> Front:
    """The endpoints under `name` with the context length and parsers of `settings`.

    The renderer, and with it the tokenizer and the chat template, is shared by all names.
    """
    config = copy.copy(model_config)
    config.max_model_len = settings.max_model_len_tokens
    client = SplicedClient(VllmConfig(model_config=config), renderer, site, timeout_s)
    engine = cast(EngineClient, client)
    models = OpenAIServingModels(engine, [BaseModelPath(name=name, model_path=config.model)])
    template: dict[str, Any] = {
        "request_logger": None,
        "chat_template": None,
        "chat_template_content_format": "auto",
    }
    shared = {
        **template,
        "enable_auto_tools": settings.tool_call_parser is not None,
        "tool_parser": settings.tool_call_parser,
        "reasoning_parser": settings.reasoning_parser or "",
    }
    online = OnlineRenderer(config, renderer, **shared)
    chat = OpenAIServingChat(
        engine,
        models,
        "assistant",
        online_renderer=online,
        enable_prompt_tokens_details=True,
        **shared,
    )
    completion = OpenAIServingCompletion(
        engine,
        models,
        online_renderer=online,
        request_logger=None,
        enable_prompt_tokens_details=True,
    )
    parser = None if chat.parser_cls is None else chat.parser_cls.tool_parser_cls
    start = getattr(parser, "tool_call_start_token", None)
    end = getattr(parser, "tool_call_end_token", None)
    if isinstance(start, str) and isinstance(end, str):
        client.tool_markers = (start, end)
    return Front(client, chat, completion, ServingTokenization(models, online, **template))
