"""What the commands that talk to an endpoint know of its address, and say when it is silent."""

from __future__ import annotations

from urllib.parse import urlsplit

from cluster.errors import EngineError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def root_url(url: str) -> str:
    """The endpoint without a slash or `/v1` at its end, whichever form the user gave."""
    return url.rstrip("/").removesuffix("/v1")


def uses_proxy(url: str) -> bool:
    """Whether a proxy of the environment may be asked: none can reach this machine's own address.

    For `trust_env` of an HTTP client.
    """
    return urlsplit(url).hostname not in _LOOPBACK


def nobody_there(url: str) -> EngineError:
    """For a connection that was refused."""
    return EngineError(
        f"nothing answers at {url}: start the cascade with `kvcascade serve`, or name its "
        "address with --url"
    )


def too_slow(url: str, timeout_s: float) -> EngineError:
    """For an answer that did not come in time."""
    return EngineError(f"{url} did not answer within {timeout_s:.0f} s")
