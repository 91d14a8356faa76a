"""Who asks, as far as HTTP knows. It knows no keys and no models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Caller:
    """`headers` have lower-case names; `tenant` is None where no keys are asked for."""

    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str | None = None
