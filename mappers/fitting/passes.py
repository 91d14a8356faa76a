"""How often a fit reads its text, and what it keeps each time: chosen by memory before it begins.

In one pass every source layer is held against every output, and anything can be solved afterwards.
Where that does not fit, a first pass holds matching heads alone and chooses layers, and later ones
keep what the chosen layers need, in as many slices as memory demands. Knows shapes only.

Units: a pass keeps, of keys or of values, head groups (`all`, `choose`) or target layers (`solve`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from cluster.errors import MapperError
from mappers.fitting.blocks import BlockSpec, PairMoments
from mappers.geometry import KVGeometry
from mappers.manifest import Support
from mappers.supports import feature_width, groups

Part = Literal["keys", "values"]
Unit = tuple[Part, int]
_PARTS: tuple[Part, Part] = ("keys", "values")

_BATCH_TOKENS = 4096
# Of the position-free KV of one batch, all layers of both models in fp32.
_BATCH_BYTES = 1_000_000_000
# A batch's KV is held as captured, as fp32, and once more centred.
_BATCH_COPIES = 3


class Pass(BaseModel):
    """One reading of the text. `all` serves every choice of layers, k and ridge.

    With `shared_gram` the products of all source layers' features serve all target layers of the
    pass; otherwise each target layer has its own, as observation weights demand.
    """

    model_config = ConfigDict(frozen=True)

    purpose: Literal["all", "choose", "solve"]
    units: tuple[Unit, ...]
    group_count: int
    shared_gram: bool
    moments_bytes: int

    def of(self, part: Part) -> tuple[int, ...]:
        """Groups or target layers that the pass keeps of keys or of values."""
        return tuple(index for name, index in self.units if name == part)


class FitPlan(BaseModel):
    """Passes in order. `reserve_bytes` is kept free of moments for a batch, a solution and weights.

    `solve` is empty when all is solved from the first passes.
    """

    model_config = ConfigDict(frozen=True)

    first: tuple[Pass, ...]
    solve: tuple[Pass, ...]
    reserve_bytes: int
    memory_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What the largest pass takes, reserve included."""
        return self.reserve_bytes + max(p.moments_bytes for p in self.first + self.solve)

    def describe(self) -> str:
        """One line: passes over the text, and memory."""
        steps = [
            {
                "all": "everything in one pass",
                "choose": _times(len(self.first), "choose layers"),
            }[self.first[0].purpose]
        ]
        if self.solve:
            steps.append(_times(len(self.solve), "fit the chosen layers"))
        return (
            f"{' then '.join(steps)}: up to {self.peak_bytes / 1e9:.2f} GB of "
            f"{self.memory_bytes / 1e9:.2f} GB of memory"
        )


def plan_fit(
    source: KVGeometry,
    target: KVGeometry,
    support: Support,
    k: int,
    memory_bytes: int,
    *,
    weighted: bool = False,
    sweep: bool = False,
    greedy: bool = False,
) -> FitPlan:
    """The plan with the fewest passes that fits into `memory_bytes`, besides the models.

    `weighted` fits (attention weights) need the choice of layers before they can be solved, and a
    `sweep` over k and supports (then `k` is the largest) needs everything at once. Greedy selection
    needs all heads at once. Raises MapperError when not even one unit of a pass fits.
    """
    reserve = reserve_bytes(source, target, support, k)
    room = memory_bytes - reserve
    group_count = groups(support, source, target)
    whole = _whole(source, target, group_count)
    heads = _whole(source, target, target.kv_heads)
    choose = heads.model_copy(update={"purpose": "choose"})
    if sweep or (not weighted and whole.moments_bytes <= room):
        _require_room(whole.moments_bytes, room, reserve, "a sweep needs all at once")
        return FitPlan(first=(whole,), solve=(), reserve_bytes=reserve, memory_bytes=memory_bytes)
    if greedy:
        _require_room(choose.moments_bytes, room, reserve, "greedy selection needs all heads")
    return FitPlan(
        first=_sliced(choose, source, target, k, room, reserve),
        solve=plan_solve(source, target, support, k, memory_bytes, weighted=weighted),
        reserve_bytes=reserve,
        memory_bytes=memory_bytes,
    )


def plan_solve(
    source: KVGeometry,
    target: KVGeometry,
    support: Support,
    k: int,
    memory_bytes: int,
    *,
    weighted: bool,
) -> tuple[Pass, ...]:
    """Passes that fit target layers on chosen source layers. See `plan_fit`."""
    reserve = reserve_bytes(source, target, support, k)
    options = []
    errors = []
    for shared in (False,) if weighted else (True, False):
        everything = Pass(
            purpose="solve",
            units=tuple((part, layer) for part in _PARTS for layer in range(target.layers)),
            group_count=groups(support, source, target),
            shared_gram=shared,
            moments_bytes=0,
        )
        try:
            options.append(_sliced(everything, source, target, k, memory_bytes - reserve, reserve))
        except MapperError as error:
            errors.append(error)
    if not options:
        raise errors[-1]
    return min(options, key=lambda passes: (len(passes), max(p.moments_bytes for p in passes)))


def specs(
    step: Pass, chosen: Sequence[tuple[int, ...]] | None, source: KVGeometry, target: KVGeometry
) -> tuple[list[BlockSpec], list[BlockSpec]]:
    """Blocks of keys and of values that a pass keeps; one that solves needs the chosen layers."""
    both = []
    every_source, every_target = tuple(range(source.layers)), tuple(range(target.layers))
    for part in _PARTS:
        blocks: list[BlockSpec] = []
        for unit in step.of(part):
            if step.purpose != "solve":
                blocks.append(BlockSpec(every_source, every_target, unit, step.group_count))
                continue
            assert chosen is not None, "layers are chosen before they are solved"
            blocks += [
                BlockSpec(chosen[unit], (unit,), group, step.group_count, not step.shared_gram)
                for group in range(step.group_count)
            ]
        if step.shared_gram and blocks:
            blocks += [
                BlockSpec(every_source, (), group, step.group_count)
                for group in range(step.group_count)
            ]
        both.append(blocks)
    return both[0], both[1]


def empty_moments(
    step: Pass,
    chosen: Sequence[tuple[int, ...]] | None,
    source: KVGeometry,
    target: KVGeometry,
    device: torch.device | str = "cpu",
) -> PairMoments:
    """Moments with the blocks of a pass."""
    return PairMoments(source, target, *specs(step, chosen, source, target), device=device)


def batch_tokens(source: KVGeometry, target: KVGeometry) -> int:
    """Tokens that both models read at a time: fewer the wider their caches, whatever the memory."""
    per_token = _token_bytes(source, target)
    return max(1, min(_BATCH_TOKENS, _BATCH_BYTES // per_token))


def reserve_bytes(source: KVGeometry, target: KVGeometry, support: Support, k: int) -> int:
    """Memory beside moments: a batch, the factor of one design (three copies), fp32 weights."""
    width = feature_width(support, k, source, target)
    batch = _BATCH_COPIES * batch_tokens(source, target) * _token_bytes(source, target)
    weights = 2 * 4 * target.layers * target.width * width
    return batch + 3 * 8 * width**2 + weights


def _token_bytes(source: KVGeometry, target: KVGeometry) -> int:
    return 2 * 4 * (source.layers * source.width + target.layers * target.width)


def _whole(source: KVGeometry, target: KVGeometry, group_count: int) -> Pass:
    """One pass of everything, all heads together or each target head by itself."""
    units = tuple((part, group) for part in _PARTS for group in range(group_count))
    step = Pass(
        purpose="all", units=units, group_count=group_count, shared_gram=False, moments_bytes=0
    )
    return _sized(step, source, target, 0)


def _sized(step: Pass, source: KVGeometry, target: KVGeometry, k: int) -> Pass:
    chosen = [tuple(range(k))] * target.layers
    blocks = [block for part in specs(step, chosen, source, target) for block in part]
    size = sum(block.bytes(source, target) for block in blocks)
    return step.model_copy(update={"moments_bytes": size})


def _sliced(
    step: Pass,
    source: KVGeometry,
    target: KVGeometry,
    k: int,
    room: int,
    reserve: int,
) -> tuple[Pass, ...]:
    """Cut a pass into as few as fit into `room`, units in order and evenly spread."""

    def cut(size: int) -> list[Pass]:
        return [
            _sized(step.model_copy(update={"units": step.units[at : at + size]}), source, target, k)
            for at in range(0, len(step.units), size)
        ]

    for count in range(1, len(step.units) + 1):
        passes = cut(-(-len(step.units) // count))
        if max(one.moments_bytes for one in passes) <= room:
            return tuple(passes)
    smallest = max(one.moments_bytes for one in cut(1))
    _require_room(smallest, room, reserve, "one target layer or head is the least a pass keeps")
    raise AssertionError("unreachable: the smallest pass fits")


def _require_room(needed: int, room: int, reserve: int, why: str) -> None:
    if needed > room:
        raise MapperError(
            f"fitting this pair takes {(needed + reserve) / 1e9:.1f} GB of memory "
            f"({why}) but only {(room + reserve) / 1e9:.1f} GB is free; use a machine with more, a "
            f"smaller k or support head_local"
        )


def _times(count: int, what: str) -> str:
    return f"{count} passes to {what}" if count > 1 else f"one pass to {what}"
