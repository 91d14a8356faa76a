"""API keys: who may ask, and for which tenant.

Keys are compared as digests in constant time and kept nowhere else. It knows nothing of routes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ConfigError
from deployments.openai_errors import INVALID_KEY, ApiError

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # visible ASCII


@dataclass(frozen=True)
class ApiKeys:
    """Digests of the valid keys with their tenants."""

    _tenants: tuple[tuple[bytes, str], ...]

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of an `Authorization: Bearer ...` header; raises ApiError (401)."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refused("no API key: send it as `Authorization: Bearer <key>`")
        digest = _digest(key.strip())
        found: str | None = None
        for known, tenant in self._tenants:  # all of them: where it matches must not show
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise _refused("the API key is not known here")
        return found


def load_api_keys(file: str | None, env: str | None) -> ApiKeys | None:
    """Keys of a file and of the environment variable named `env`; None when neither is named.

    One `tenant:key` or `key` per line (in a variable also between commas); `#` begins a comment.
    A key without a tenant is a tenant of its own, named by its digest. Raises ConfigError when
    a source that was named is missing, empty or malformed: nothing falls back to open doors.
    """
    tenants: dict[bytes, str] = {}
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigError(f"router.api_keys_file: {path}: no such file")
        _add(tenants, path.read_text().splitlines(), f"{path}, line")
    if env is not None:
        value = os.environ.get(env, "")
        _add(tenants, re.split(r"[,\n]", value), f"environment variable {env}, entry")
    if file is None and env is None:
        return None
    return ApiKeys(tuple(tenants.items()))


def _add(tenants: dict[bytes, str], lines: Iterable[str], where: str) -> None:
    before = len(tenants)
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        tenant, colon, key = entry.partition(":")
        if not colon:
            tenant, key = _digest(entry).hex()[:12], entry
        tenant, key = tenant.strip(), key.strip()
        if not _TENANT.fullmatch(tenant) or not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where} {number}: not `tenant:key` or `key`; tenants have letters, digits, `._-`"
            )
        if tenants.setdefault(_digest(key), tenant) != tenant:
            raise ConfigError(f"{where} {number}: this key belongs to another tenant already")
    if len(tenants) == before:
        source = where.rpartition(",")[0]
        raise ConfigError(f"{source}: no API key in it; add one or name no source of keys")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code=INVALID_KEY, headers={"www-authenticate": "Bearer"})
