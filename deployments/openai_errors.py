"""OpenAI's error envelope: string codes for whatever went wrong, ours or vLLM's.

It knows exceptions and vLLM's own error objects by their shape, and imports no vLLM.
"""

from __future__ import annotations

from typing import Any

from cluster.errors import EngineError, RequestError

CONTEXT_LENGTH = "context_length_exceeded"
NOT_FOUND = "model_not_found"
INVALID_VALUE = "invalid_value"
INVALID_REQUEST = "invalid_request_error"


class ApiError(Exception):
    """An answer that is an error: HTTP status and envelope."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON body that OpenAI's clients understand."""
        kind = INVALID_REQUEST if self.status < 500 else "server_error"
        error = {
            "message": str(self),
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


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
    return _classify(status, message, param)


def from_exception(error: BaseException) -> ApiError:
    """Any exception as an envelope. Foreign ones go through vLLM's own classification."""
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


def _classify(status: int, message: str, param: str | None) -> ApiError:
    if status == 404:
        return ApiError(404, message, code=NOT_FOUND, param=param or "model")
    if status >= 500:
        return ApiError(status, message, code="internal_error", param=param)
    if "context length" in message:
        return ApiError(400, message, code=CONTEXT_LENGTH, param="messages")
    return ApiError(status, message, code=INVALID_VALUE if param else INVALID_REQUEST, param=param)
