"""What clients may ask: checks request bodies and turns them into vLLM's request models.

It knows fields and values, and nothing of models, policies or answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from cluster.errors import RequestError
from deployments.openai_errors import INVALID_VALUE, invalid
from router.api import CascadeOptions

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

OURS_ONLY = ("kv_transfer_params", "ec_transfer_params", "cache_salt", "vllm_xargs")
"""Fields of vLLM's API that steer KV transfer and prefix caches: never a client's business."""

UNSUPPORTED = (
    "use_beam_search",
    "prompt_logprobs",
    "logprob_token_ids",
    "prompt_embeds",
    "suffix",
    "priority",
)
"""Fields of vLLM's API that have no meaning over two engines."""

MAX_CHOICES = 128
"""Answers of one request, over all its prompts."""

SESSION_ID = re.compile(r"[!-~]{1,256}")

M = TypeVar("M", bound=BaseModel)


def read_chat(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """A chat request, without `cascade`; raises an error that names the field."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    _check_fields(fields)
    request = _validate(ChatCompletionRequest, fields)
    if not request.messages:
        raise _refused("messages", "it is empty")
    _check_choices(request.n, 1)
    return request


def read_completion(fields: Mapping[str, Any]) -> CompletionRequest:
    """A completion request, without `cascade`; raises an error that names the field."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    _check_fields(fields)
    if fields.get("best_of") not in (None, 1, fields.get("n")):
        raise _refused("best_of", "leave it out, or set it to `n`")
    request = _validate(CompletionRequest, fields)
    prompt = request.prompt
    if not prompt or (isinstance(prompt, list) and any(item in ([], "") for item in prompt)):
        raise _refused("prompt", "it is empty")
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    _check_choices(request.n, len(prompt) if several else 1)
    if request.echo and request.logprobs is not None:
        raise _refused("echo", "it cannot be combined with `logprobs` on this endpoint")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise _refused("max_tokens", "it must be at least 1")
    return request


def read_tokenize(fields: Mapping[str, Any]) -> TokenizeRequest:
    """Messages or a plain prompt to tokenize; raises an error that names the field."""
    from vllm.entrypoints.serve.tokenize.protocol import (
        TokenizeChatRequest,
        TokenizeCompletionRequest,
    )

    if "messages" in fields:
        return _validate(TokenizeChatRequest, fields)
    return _validate(TokenizeCompletionRequest, fields)


def read_detokenize(fields: Mapping[str, Any]) -> DetokenizeRequest:
    """Token ids to put into text; raises an error that names the field."""
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest

    return _validate(DetokenizeRequest, fields)


def read_session_id(headers: Mapping[str, str], options: CascadeOptions) -> str | None:
    """The client's name for the conversation: `cascade.session_id`, else `x-session-id`."""
    for value, param in (
        (options.session_id, "cascade.session_id"),
        (headers.get("x-session-id"), "x-session-id"),
    ):
        if value is None:
            continue
        if not SESSION_ID.fullmatch(value):
            message = f"{param}: not 1 to 256 visible ASCII characters"
            raise RequestError(message, code=INVALID_VALUE, param=param)
        return value
    return None


def _check_fields(fields: Mapping[str, Any]) -> None:
    for key in (*OURS_ONLY, *UNSUPPORTED):
        if fields.get(key) not in (None, False):
            raise _refused(key, "it cannot be set on this endpoint; leave it out")
    if fields.get("stream_options") is not None and not fields.get("stream"):
        raise _refused("stream_options", "it needs `stream: true`")


def _check_choices(n: int | None, prompts: int) -> None:
    choices = (1 if n is None else n) * prompts
    if choices < 1:
        raise _refused("n", "it must be at least 1")
    if choices > MAX_CHOICES:
        raise _refused("n", f"{choices} answers are asked for, {MAX_CHOICES} are the most")


def _refused(field: str, reason: str) -> RequestError:
    return RequestError(f"`{field}`: {reason}", code=INVALID_VALUE, param=field)


def _validate(kind: type[M], fields: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        raise invalid(error, "messages" if "messages" in fields else "prompt") from None
