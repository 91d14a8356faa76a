"""The exception tree of the whole project. Imports nothing, so every package may use it.

KvcascadeError
├── UserError (also ValueError)   something the user can change; the message says what
│   ├── ConfigError               a key, value or file of the configuration
│   ├── ModelError                a model that is missing, unreadable or unsupported
│   ├── MapperError               a mapper that cannot be fitted, read or used
│   │   └── MapperMismatch        a mapper made for other models than those running
│   └── RequestError              a request that the endpoint refuses (HTTP 4xx)
├── HandoffError                  one handoff failed; the request goes on by recompute
│   ├── HandoffRefused            nothing was written and nothing is in flight
│   └── TransportError            NIXL reported a failure or a peer is gone
└── EngineError                   an engine cannot serve
"""

from __future__ import annotations


class KvcascadeError(Exception):
    """Root of everything this project raises on purpose."""


class UserError(KvcascadeError, ValueError):
    """The user can mend this; the message names what and how."""


class ConfigError(UserError):
    """A configuration key, value or file is wrong."""


class ModelError(UserError):
    """A model is missing, unreadable or of an unsupported architecture."""


class MapperError(UserError):
    """A mapper cannot be fitted, loaded or used."""


class MapperMismatch(MapperError):
    """A mapper was made for models other than those it is asked to serve."""


class RequestError(UserError):
    """A request that is refused with an OpenAI error envelope.

    `status` is the HTTP status, `code` OpenAI's string code and `param` the offending field.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class HandoffError(KvcascadeError):
    """One handoff failed for `reason`, a short word that is counted and shown."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[HandoffError], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class HandoffRefused(HandoffError):
    """The handoff ended before anything was written, or after every write was settled."""


class TransportError(HandoffError):
    """NIXL reported a failure, or the peer is gone."""


class EngineError(KvcascadeError):
    """An engine cannot serve requests."""
