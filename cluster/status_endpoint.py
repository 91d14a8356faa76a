"""The operators' routes of an endpoint, over HTTP: health, metrics and what the cascade says.

Works from anywhere that reaches the endpoint; imports neither Ray nor vLLM.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import httpx

from cluster.endpoint_url import nobody_there, root_url, too_slow, uses_proxy
from cluster.errors import EngineError, RequestError
from cluster.status_metrics import Scrape

_TIMEOUT_S = 30.0
"""More than a router waits for a silent part."""


class Endpoint:
    """One endpoint; a context manager that closes its connections.

    Every method raises EngineError when nothing answers, and RequestError when a key is refused.
    `locked` is true once a route wanted a key and there is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = root_url(url)
        self.locked = False
        self._keyless = api_key is None
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(
            timeout=_TIMEOUT_S, headers=headers, trust_env=uses_proxy(self.url)
        )

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def health(self) -> dict[str, str]:
        """Parts of the cascade and `ok` or what is wrong, as `/health` says.

        An answer of somebody else, as of Serve's proxy while the application starts, is one part.
        """
        answer = self._get("/health")
        try:
            parts = answer.json()
        except ValueError:
            parts = None
        if isinstance(parts, dict) and all(isinstance(text, str) for text in parts.values()):
            return parts
        return {"endpoint": f"/health answers {answer.status_code}: {answer.text[:200].strip()}"}

    def optional_json(self, path: str) -> dict[str, Any] | None:
        """The JSON object at `path`; None where there is no such route, or none without a key."""
        answer = self._get(path)
        if answer.status_code == 404:
            return None
        if answer.status_code in (401, 403):
            if self._keyless:
                self.locked = True
                return None
            raise RequestError(
                f"{self.url} does not know this API key; correct --api-key or KVCASCADE_API_KEY",
                status=answer.status_code,
            )
        if answer.status_code != 200:
            raise EngineError(f"{path} answers {answer.status_code}: {answer.text[:200].strip()}")
        content: dict[str, Any] = answer.json()
        return content

    def metrics(self) -> Scrape:
        """What `/metrics` counts now."""
        answer = self._get("/metrics")
        if answer.status_code != 200:
            raise EngineError(f"/metrics answers {answer.status_code}: {answer.text[:200].strip()}")
        return Scrape.parse(answer.text, at_s=time.monotonic())

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(self.url + path)
        except httpx.TimeoutException:
            raise too_slow(self.url, _TIMEOUT_S) from None
        except httpx.TransportError:
            raise nobody_there(self.url) from None
        except httpx.InvalidURL as error:
            raise RequestError(f"--url {self.url}: {error}") from None
