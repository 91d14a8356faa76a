"""Where the mapper of a direction runs, as the configuration says or the links do.

It knows placements and sizes of caches, not Ray.
"""

from __future__ import annotations

from pathlib import Path

from cluster.config import CascadeConfig, PlacementConfig
from cluster.links import At, Choice, Engine, Handoff, MeasuredLinks, choose, read_links
from cluster.sources import kv_bytes_per_token


def mapper_place(cascade: CascadeConfig, *, back: bool) -> Choice:
    """Whose nodes the mapper of one direction runs on, and why.

    ConfigError when `mapper.links` cannot be read, ModelError when a model is not there.
    """
    settings = cascade.mapper
    place = settings.place_back if back else settings.place
    key = "place_back" if back else "place"
    if place == "auto":
        path = settings.links
        links = None if path is None else read_links(Path(path).expanduser())
        return automatic_place(cascade, links, back=back)
    source, target = _engines(back=back)
    at: dict[str, At] = {"own": "own", "source": source, "target": target}
    return Choice(at[place], f"`{key}: {place}`")


def automatic_place(cascade: CascadeConfig, links: MeasuredLinks | None, *, back: bool) -> Choice:
    """What `auto` is, by the models' caches and the links if there are any."""
    source, target = _engines(back=back)
    models = {"small": cascade.small, "large": cascade.large}
    read, written = (
        kv_bytes_per_token(models[one].source, models[one].dtype) for one in (source, target)
    )
    handoff = Handoff(
        source=source,
        target=target,
        read_bytes=read,
        written_bytes=written,
        chunk_tokens=cascade.mapper.chunk_tokens,
    )
    return choose(handoff, links)


def placement_at(cascade: CascadeConfig, at: At) -> PlacementConfig:
    """The placement of a mapper there: its own CPUs, an engine's nodes."""
    own = cascade.mapper.placement
    if at == "own":
        return own
    beside = (cascade.small if at == "small" else cascade.large).placement
    return beside.model_copy(update={"num_cpus": own.num_cpus})


def _engines(*, back: bool) -> tuple[Engine, Engine]:
    return ("large", "small") if back else ("small", "large")
