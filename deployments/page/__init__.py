"""The web page to chat with the cascade and to see it: its files, as the HTTP surface serves them.

Plain HTML, CSS and ES modules without a build step; the page asks nobody but the endpoint that it
came from. This module reads the files and knows neither routes nor the cascade.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from types import MappingProxyType

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
"""Header value for every file: nothing inline, nothing from elsewhere, no frame around it."""

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@cache
def page_files() -> MappingProxyType[str, tuple[str, bytes]]:
    """The page as {URL path: (content type, content)}; `/` is `index.html`.

    The files refer to each other and to `v1/` by relative paths, so they work behind a prefix.
    """
    files: dict[str, tuple[str, bytes]] = {}
    for entry in resources.files(__name__).iterdir():
        content_type = _TYPES.get(entry.name[entry.name.rfind(".") :])
        if content_type is not None:
            path = "/" if entry.name == "index.html" else f"/{entry.name}"
            files[path] = (content_type, entry.read_bytes())
    return MappingProxyType(files)
