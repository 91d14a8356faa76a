"""What all parts of the configuration tree are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


class Node(BaseModel):
    """Refuses unknown keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
