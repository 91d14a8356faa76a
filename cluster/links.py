"""Measured links between engines and places for a mapper, and which place they speak for.

Reads and writes the file of `kvcascade links`. It measures nothing and knows neither Ray nor NIXL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, ValidationError

from cluster.config_base import Node
from cluster.errors import ConfigError

Engine = Literal["small", "large"]
At = Literal["small", "large", "own"]
"""Whose nodes a mapper could be on: an engine's, or those of its own placement."""

_WORTH = 1.1
"""How many times quicker another place must be than the one where fewer bytes cross."""


class Link(Node):
    """What NIXL reached from a mapper's node to an engine's, one transfer at a time."""

    at: At
    engine: Engine
    read_gbps: PositiveFloat
    write_gbps: PositiveFloat
    latency_ms: PositiveFloat
    """Of the smallest READ, from posting it to its end."""


class MeasuredLinks(Node):
    """The file."""

    addresses: dict[At, str]
    """The nodes that were measured."""
    links: tuple[Link, ...]

    def of(self, at: At, engine: Engine) -> Link | None:
        """The one between them; None where it was not measured."""
        found = (link for link in self.links if (link.at, link.engine) == (at, engine))
        return next(found, None)

    def chunk_s(self, at: At, handoff: Handoff) -> float | None:
        """Seconds that the slower of a chunk's two ways takes with a mapper there.

        The two overlap: one is read while another is written. None where a way was not measured.
        """
        read, written = self.of(at, handoff.source), self.of(at, handoff.target)
        if read is None or written is None:
            return None
        tokens = handoff.chunk_tokens
        return max(
            _seconds(read.latency_ms, read.read_gbps, handoff.read_bytes * tokens),
            _seconds(written.latency_ms, written.write_gbps, handoff.written_bytes * tokens),
        )


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """What crosses in one direction: bytes of KV of a token on each side, tokens of a chunk."""

    source: Engine
    target: Engine
    read_bytes: int
    written_bytes: int
    chunk_tokens: int

    @property
    def fewest_bytes(self) -> Engine:
        """A mapper there takes the other side's cache over the network, or sends it."""
        return self.target if self.read_bytes <= self.written_bytes else self.source


@dataclass(frozen=True)
class Choice:
    """Where a mapper belongs, and why in one line."""

    at: At
    reason: str


def choose(handoff: Handoff, links: MeasuredLinks | None) -> Choice:
    """The engine towards which fewer bytes cross, unless by `links` another place is quicker.

    Quicker is where the slower of the two ways of a chunk takes less time, by a tenth at least:
    links are never measured twice alike. ConfigError when `links` lack that engine.
    """
    fewest = handoff.fewest_bytes
    if links is None:
        crossing = min(handoff.read_bytes, handoff.written_bytes)
        other = max(handoff.read_bytes, handoff.written_bytes)
        return Choice(fewest, f"{crossing:,} B of KV per token cross the network, not {other:,} B")
    every: tuple[At, ...] = ("small", "large", "own")
    times = {at: time_s for at in every if (time_s := links.chunk_s(at, handoff)) is not None}
    if fewest not in times:
        raise ConfigError(
            f"args.mapper.links: the file says nothing of the nodes of `{fewest}`; make it again "
            "with `kvcascade links`, or remove the key"
        )
    quickest = min(times, key=times.__getitem__)
    at: At = quickest if times[quickest] * _WORTH <= times[fewest] else fewest
    shown = ", ".join(f"{name} {time_s * 1e3:.3g} ms" for name, time_s in times.items())
    return Choice(at, f"by measured links, a chunk of {handoff.chunk_tokens} tokens takes: {shown}")


def read_links(path: Path) -> MeasuredLinks:
    """The file at `path`; ConfigError when it is missing or no such file."""
    remedy = "make it with `kvcascade links`, or remove the key"
    try:
        return MeasuredLinks.model_validate_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"args.mapper.links: {path}: {error.strerror}; {remedy}") from None
    except (ValidationError, UnicodeDecodeError):
        raise ConfigError(f"args.mapper.links: {path} is no file of links; {remedy}") from None


def rows(links: MeasuredLinks) -> list[Mapping[str, str]]:
    """The table: a row per link."""
    return [
        {
            "mapper at": link.at,
            "engine": link.engine,
            "READ Gb/s": f"{link.read_gbps:.3g}",
            "WRITE Gb/s": f"{link.write_gbps:.3g}",
            "latency ms": f"{link.latency_ms:.2g}",
        }
        for link in links.links
    ]


def _seconds(latency_ms: float, gbps: float, num_bytes: float) -> float:
    return latency_ms / 1e3 + num_bytes * 8 / (gbps * 1e9)
