"""What all parts of the configuration tree are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


class Node(BaseModel):
    """Refuses unknown keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class PlacementConfig(Node):
    """Where the replicas of one deployment run, in Ray's own terms."""

    num_cpus: float = Field(0.1, ge=0, description="CPUs that a replica reserves in Ray.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources, as `{small_node: 0.01}`."
    )
    label_selector: dict[str, str] = Field(
        default_factory=dict, description="Node labels, as `{kvcascade/role: small}`."
    )
