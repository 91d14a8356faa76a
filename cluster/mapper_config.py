"""The part of the configuration about mappers: which, where, how many."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from cluster.config_base import Node, PlacementConfig

Place = Literal["own", "source", "target", "auto"]
"""On whose nodes a mapper runs."""


class ScalingConfig(Node):
    """When mappers come and go by themselves: by the time that the waiting work will take."""

    min_replicas: PositiveInt = Field(1, description="Never fewer.")
    max_replicas: PositiveInt | None = Field(
        None, description="Never more. Unset: as many as `deployments:` says, always."
    )
    target_backlog_s: PositiveFloat = Field(
        1.0, description="Seconds of work that may wait per replica before more are added."
    )
    upscale_delay_s: PositiveFloat = Field(5.0, description="How long it has to be too much.")
    downscale_delay_s: PositiveFloat = Field(120.0, description="How long it has to be too little.")

    @model_validator(mode="after")
    def _check(self) -> ScalingConfig:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below {self.min_replicas}")
        return self


class MapperConfig(Node):
    """The deployment that reads, converts and writes KV blocks."""

    small_to_large: str = Field(
        description="Folder of a fitted mapper, `quickstart` or `identity` (same model twice)."
    )
    large_to_small: str | None = Field(
        None,
        description="The same for the way back, so that the small model need not read what the "
        "large one wrote. Unset: it reads.",
    )
    device: str = Field("cpu", description="Torch device on which the map runs, as `cuda:0`.")
    allow_refused: bool = Field(
        False, description="Serve a mapper although its own test says `refuse`."
    )
    num_gpus: float = Field(0, ge=0, description="GPUs that a replica reserves in Ray.")
    threads: PositiveInt = Field(1, description="CPU threads of the map.")
    chunk_tokens: PositiveInt = Field(
        512,
        description="Most tokens read, mapped and written as one step of the pipeline; fewer where "
        "by measured rates that is quicker.",
    )
    max_concurrent_handoffs: PositiveInt = Field(
        4, description="Handoffs that one replica works on; each owns a part of its pool."
    )
    max_queued_handoffs: PositiveInt = Field(64, description="Further ones that wait in line.")
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    place: Place = Field(
        "own",
        description="Nodes of the mapper to the large model: of its `own` placement, of its "
        "`source` or `target` engine, or `auto`: where fewer bytes cross between nodes, or where "
        "`links` say that a handoff is quicker.",
    )
    place_back: Place = Field("own", description="The same for the mapper to the small model.")
    links: str | None = Field(
        None, description="File of `kvcascade links`, which `auto` then goes by. Read on the head."
    )
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
