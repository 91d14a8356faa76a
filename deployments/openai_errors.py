"""OpenAI's error envelope: string codes for whatever went wrong, ours or vLLM's.

It knows exceptions and vLLM's own error objects by their shape, and imports no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cluster.errors import EngineError, RequestError

CONTEXT_LENGTH = "context_length_exceeded"
NOT_FOUND = "model_not_found"
INVALID_VALUE = "invalid_value"
INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_exceeded"
INTERNAL = "internal_error"
INVALID_KEY = "invalid_api_key"

_FIELD = re.compile(r"[a-z_]+|\d+")


class ApiError(Exception):
    """An answer that is an error: HTTP status, envelope and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body that OpenAI's clients understand."""
        kind = INVALID_REQUEST if self.status < 500 else "server_error"
        error = {
            "message": str(self),
            "type": "rate_limit_error" if self.status == 429 else kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class ClientClosed(ApiError):
    """499: the client left before its answer was complete."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed the request", code="client_closed_request")


def unknown_model(name: object, served: list[str]) -> ApiError:
    """404 for a model that is not served here."""
    known = ", ".join(f"`{model}`" for model in served)
    message = f"The model `{name}` does not exist; this endpoint serves {known}."
    return ApiError(404, message, code=NOT_FOUND, param="model")


def from_vllm(error: dict[str, Any]) -> ApiError:
    """vLLM's envelope (numeric code, its own type names) as OpenAI's."""
    inner = error.get("error", error)
    status = int(inner.get("code") or 500)
    message, param = str(inner.get("message", "")), inner.get("param")
    if status == 404:
        return ApiError(404, message, code=NOT_FOUND, param=param or "model")
    if status >= 500:
        if status == 500:
            message = "the endpoint failed; its log says why"
        return ApiError(status, message, code=INTERNAL, param=param)
    if "context length" in message:
        return ApiError(400, message, code=CONTEXT_LENGTH, param="messages")
    return ApiError(status, message, code=INVALID_VALUE if param else INVALID_REQUEST, param=param)


def from_exception(error: BaseException, *, prompt_field: str = "messages") -> ApiError:
    """Any exception as an envelope. Foreign ones go through vLLM's own classification.

    `prompt_field` is the field of the request that holds the prompt.
    """
    found = invalid(error, prompt_field) if isinstance(error, ValidationError) else _envelope(error)
    if found.code == CONTEXT_LENGTH:
        found.param = prompt_field
    return found


def invalid(error: ValidationError, prompt_field: str) -> ApiError:
    """The first fault, by the client's own words for it: no names of types, no echoed values.

    vLLM validates the parts of messages on their own, so a path may begin within the prompt.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    path = [str(part) for part in first["loc"] if _FIELD.fullmatch(str(part))]
    if path and (path[0].isdecimal() or error.title.startswith("ValidatorIterator")):
        path.insert(0, prompt_field)
    cause = first.get("ctx", {}).get("error")
    param = path[0] if path else getattr(cause, "parameter", None)
    message = first["msg"].removeprefix("Value error, ")
    if path:
        message = f"{'.'.join(path)}: {message}"
    return ApiError(400, message, code=INVALID_VALUE if param else INVALID_REQUEST, param=param)


def _envelope(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        code = error.code or INVALID_REQUEST
        return ApiError(error.status, str(error), code=code, param=error.param)
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the answer took longer than this endpoint allows", code="timeout")
    from vllm.entrypoints.serve import create_error_response

    assert isinstance(error, Exception)
    return from_vllm(create_error_response(error).model_dump())
