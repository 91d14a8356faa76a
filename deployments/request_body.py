"""Reads a JSON object from a request that may be too long, too deep or no JSON at all."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from deployments.openai_errors import INVALID_REQUEST, ApiError, ClientClosed

MAX_DEPTH = 64
"""Nesting of arrays and objects; templates and validators recurse into them."""


async def read_json_object(request: Request, max_bytes: int | None) -> dict[str, Any]:
    """The body; raises ApiError (400, 413, or 499 when the client left)."""
    try:
        text = (await _read(request, max_bytes)).decode()
        body = json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_int64)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code=INVALID_REQUEST) from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code=INVALID_REQUEST)
    _check_depth(body)
    if "\\ud" in text.lower():
        _check_surrogates(body)
    return body


async def _read(request: Request, max_bytes: int | None) -> bytes:
    stated = request.headers.get("content-length", "")
    if max_bytes is not None and stated.isdecimal() and int(stated) > max_bytes:
        raise _too_long(max_bytes)
    parts: list[bytes] = []
    length = 0
    try:
        async for part in request.stream():
            length += len(part)
            if max_bytes is not None and length > max_bytes:
                raise _too_long(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ClientClosed() from None
    return b"".join(parts)


def _check_depth(body: Any) -> None:
    level = [body]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            children = value.values() if isinstance(value, dict) else value
            below += [child for child in children if isinstance(child, dict | list)]
        if not below:
            return
        level = below
    raise _too_deep()


def _check_surrogates(body: Any) -> None:
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair", code=INVALID_REQUEST) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _int64(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**63:  # engines take no others
        raise ValueError(f"{digits[:20]} has more than 64 bits")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:20]} is no finite number")
    return number


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", code=INVALID_REQUEST)


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes} bytes", code="request_too_large")
