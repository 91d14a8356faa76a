"""The endpoint's OpenAPI document: vLLM's request models without what is refused here, and ours.

It describes what `openai_app` serves and serves nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from deployments.intake import MAX_CHOICES, OURS_ONLY, SESSION_ID, UNSUPPORTED
from router.api import CascadeInfo, CascadeOptions

Json = dict[str, Any]

_REF = "#/components/schemas/"
_IGNORED = ("request_id", "session_id", "return_token_offsets", "return_assistant_tokens_mask")
"""Fields of vLLM's API that change nothing here."""

_MEDIA = ("media_io_kwargs", "mm_processor_kwargs", "routed_experts_prompt_start", "length_penalty")
"""Fields for other kinds of models or for beam search."""

_RANGES: Mapping[str, Json] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_tokens": {"minimum": 0},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "logprobs": {"minimum": 0, "maximum": 20},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
}
"""Limits of numbers that vLLM checks after its models. Others depend on the served models."""

_ROLES = ("Developer", "System", "User", "Assistant", "Tool")

_ERRORS: Mapping[str, str] = {
    "400": "A field is wrong; `param` names it.",
    "401": "The API key is missing or not known.",
    "404": "There is no such model.",
    "413": "The body is too long.",
    "429": "Too many requests are worked on; come back after `Retry-After`.",
    "500": "The endpoint failed.",
    "501": "The model cannot do this.",
    "503": "An engine cannot serve.",
    "504": "The answer took too long.",
}


class ErrorInfo(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's error envelope."""

    error: ErrorInfo


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: str = Field(json_schema_extra={"const": "model"})
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All served models."""

    object: str = Field(json_schema_extra={"const": "list"})
    data: list[ModelCard]


def openapi_document(models: list[str], *, keyed: bool) -> Json:
    """OpenAPI 3.1 for an endpoint that serves `models`; `keyed`: it asks for API keys."""
    schemas = _schemas(models)
    describe = _Operations(keyed).describe
    paths: Json = {
        "/v1/chat/completions": describe(
            "post", "Answer a chat", "ChatCompletion", streams=True, seated=True
        ),
        "/v1/completions": describe(
            "post", "Continue a text", "Completion", streams=True, seated=True
        ),
        "/tokenize": describe("post", "Token ids of messages or of a text", "Tokenize"),
        "/detokenize": describe("post", "Text of token ids", "Detokenize"),
        "/v1/models": describe("get", "All served models", "ModelList"),
        "/v1/models/{name}": describe("get", "One served model", "ModelCard", errors=("404",)),
        "/v1/cascade/stats": describe(
            "get", "What the router did lately", "Stats", errors=("404",)
        ),
        "/v1/cascade/status": describe(
            "get", "What every part says of itself", "Status", errors=("404",)
        ),
    }
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["parameters"] = [name]
    session = {
        "name": "x-session-id",
        "in": "header",
        "description": "As `cascade.session_id`, which wins.",
        "schema": {"type": "string", "pattern": f"^{SESSION_ID.pattern}$"},
    }
    for path in ("/v1/chat/completions", "/v1/completions"):
        paths[path]["parameters"] = [session]
    components: Json = {"schemas": _reachable(schemas, paths)}
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcascade", "version": "1"},
        "paths": paths,
        "components": components,
    }


class _Operations:
    """Path items, with or without keys."""

    def __init__(self, keyed: bool) -> None:
        self._keyed = keyed

    def describe(
        self,
        method: str,
        summary: str,
        name: str,
        *,
        streams: bool = False,
        seated: bool = False,
        errors: tuple[str, ...] = (),
    ) -> Json:
        """The path item of one route; `name` is that of its schemas."""
        ref = {"$ref": _REF + (name if method == "get" else f"{name}Response")}
        content: Json = {"application/json": {"schema": ref}}
        if streams:
            content["text/event-stream"] = {"schema": {"$ref": f"{_REF}Event"}}
        responses: Json = {"200": {"description": "The answer.", "content": content}}
        if method == "post":
            errors = tuple(code for code in _ERRORS if code not in ("401", "429"))
        wanted = [*errors, *(["401"] if self._keyed else []), *(["429"] if seated else [])]
        for code in sorted(wanted):
            responses[code] = _error(code)
        operation: Json = {"summary": summary, "operationId": name, "responses": responses}
        if self._keyed:
            operation["security"] = [{"key": []}]
        if method == "post":
            body = {"application/json": {"schema": {"$ref": f"{_REF}{name}Request"}}}
            operation["requestBody"] = {"required": True, "content": body}
        return {method: operation}


def _error(code: str) -> Json:
    found: Json = {
        "description": _ERRORS[code],
        "content": {"application/json": {"schema": {"$ref": f"{_REF}Error"}}},
    }
    if code == "401":
        found["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}}
    if code == "429":
        found["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "required": True}}
    return found


def _schemas(models: list[str]) -> Json:
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.entrypoints.serve.tokenize import protocol as tokenize

    _, found = models_json_schema(
        [
            (chat.ChatCompletionRequest, "validation"),
            (completion.CompletionRequest, "validation"),
            (tokenize.TokenizeChatRequest, "validation"),
            (tokenize.TokenizeCompletionRequest, "validation"),
            (tokenize.DetokenizeRequest, "validation"),
            (CascadeOptions, "validation"),
            (chat.ChatCompletionResponse, "serialization"),
            (completion.CompletionResponse, "serialization"),
            (tokenize.TokenizeResponse, "serialization"),
            (tokenize.DetokenizeResponse, "serialization"),
            (CascadeInfo, "serialization"),
            *((ours, "serialization") for ours in (Error, ModelCard, ModelList)),
        ],
        ref_template=_REF + "{model}",
    )
    schemas: Json = found["$defs"]
    served = {"type": "string", "enum": models}
    for name in _requests():
        schema = schemas[name]
        properties: Json = schema["properties"]
        for field in (*OURS_ONLY, *UNSUPPORTED, *_IGNORED, *_MEDIA):
            properties.pop(field, None)
        properties["model"] = served
        schema["required"] = sorted({*schema.get("required", ()), "model"})
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        properties = schemas[name]["properties"]
        properties["cascade"] = _or_null(CascadeOptions.__name__)
        for field, limits in _RANGES.items():
            _limit(properties.get(field, {}), limits)
    schemas["CompletionRequest"]["required"] = ["model", "prompt"]
    _say_what_text_models_read(schemas)
    for name in ("ChatCompletionResponse", "CompletionResponse"):
        schemas[name]["properties"]["cascade"] = _or_null(CascadeInfo.__name__)
        for field in OURS_ONLY:
            schemas[name]["properties"].pop(field, None)
    schemas["TokenizeRequest"] = {
        "anyOf": [
            {"$ref": f"{_REF}TokenizeCompletionRequest"},
            {"$ref": f"{_REF}TokenizeChatRequest"},
        ]
    }
    schemas["Event"] = {
        "description": "A server-sent event: a chunk as JSON, an error, at the end `[DONE]`.",
        "type": "object",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
    }
    schemas["Stats"] = schemas["Status"] = {"type": "object"}
    return schemas


def _requests() -> tuple[str, ...]:
    kinds = ("ChatCompletion", "Completion", "TokenizeChat", "TokenizeCompletion", "Detokenize")
    return tuple(f"{kind}Request" for kind in kinds)


def _say_what_text_models_read(schemas: Json) -> None:
    """Messages of the known roles with text alone, in the place of vLLM's list of all media."""
    text = {"$ref": f"{_REF}ChatCompletionContentPartTextParam"}
    content: Json = {"anyOf": [{"type": "string"}, {"type": "array", "items": text}]}
    names = [f"ChatCompletion{role}MessageParam" for role in _ROLES]
    for name in names:
        properties = schemas[name]["properties"]
        optional = "content" not in schemas[name]["required"]
        null = [{"type": "null"}] if optional else []
        properties["content"] = {"anyOf": [*content["anyOf"], *null]}
        properties.pop("audio", None)
    schemas["ChatMessage"]["properties"].pop("audio", None)
    messages = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [{"$ref": _REF + name} for name in names]},
    }
    for name in ("ChatCompletionRequest", "TokenizeChatRequest"):
        schemas[name]["properties"]["messages"] = messages


def _limit(schema: Json, limits: Json) -> None:
    for kind in schema.get("anyOf", [schema]):
        if kind.get("type") in ("integer", "number"):
            kind |= limits


def _or_null(name: str) -> Json:
    return {"anyOf": [{"$ref": _REF + name}, {"type": "null"}]}


def _reachable(schemas: Json, paths: Json) -> Json:
    """The schemas that the paths refer to, in whatever depth."""
    kept: Json = {}
    waiting = [*_refs(paths)]
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept[name] = schemas[name]
            waiting += _refs(schemas[name])
    return dict(sorted(kept.items()))


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(ref := node.get("$ref"), str):
            yield ref.removeprefix(_REF)
        for value in node.values():
            yield from _refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _refs(value)
