"""Running the passes of a fit: text into moments, resumable, in shards, and from there to weights.

Knows where state is kept between calls; the mathematics is in `moments`, `select` and `ridge`.

Shapes: B sequences of T tokens in a batch, N = B*T, F features and O outputs of all layers, S
source layers, L target layers, G head groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.fitting.attention_weights import RelevanceSums, blended, grouped
from mappers.fitting.blocks import PairMoments
from mappers.fitting.passes import Pass, empty_moments
from mappers.fitting.ridge import LinearFit, solve_layers
from mappers.fitting.select import probe_SL
from mappers.fitting.spool import Feed, Observed
from mappers.fitting.work import Work
from mappers.geometry import KVGeometry
from mappers.manifest import Ridge, Support
from mappers.supports import groups

Alphas = tuple[Tensor, Tensor]
"""How strongly attention weights count, [L, G], for keys and for values."""

Bar = Callable[[str, int], Callable[[int], None]]
"""Starts a progress bar of a name and a total; what it returns advances it."""


class ShardWritten(Exception):
    """A shard is done and lies at `path`; others must be made before the fit goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


class PassState:
    """What one pass accumulates."""

    def __init__(self, moments: PairMoments, relevance: RelevanceSums | None = None) -> None:
        self.moments = moments
        self.relevance = relevance

    @torch.inference_mode()
    def add(
        self,
        seen: Observed,
        sequence_tokens: int,
        first_token_weight: int = 1,
        alphas: Alphas | None = None,
    ) -> None:
        """Add a batch of sequences, whose first tokens count `first_token_weight` times.

        With `alphas` tokens are weighted by `seen.relevance`, and a first token counts as often as
        the larger of both says. First tokens are added by themselves: their KV is so far from all
        others that beside it fp32 products would lose the rest.
        """
        if self.relevance is not None:
            assert seen.relevance is not None
            self.relevance.add(seen.relevance)
        weights = None
        if alphas is not None:
            assert seen.relevance is not None
            weights = [
                blended(grouped(part, alpha.shape[1]), alpha)
                for part, alpha in zip(seen.relevance, alphas, strict=True)
            ]
        parts = (self.moments.k, self.moments.v)
        for at, (part, x_NF, y_NO) in enumerate(zip(parts, seen.x, seen.y, strict=True)):
            x_BTF, y_BTO = (rows.unflatten(0, (-1, sequence_tokens)) for rows in (x_NF, y_NO))
            if weights is not None:
                weight_LGBT = weights[at].unflatten(-1, (-1, sequence_tokens))
                heavy_LGB = weight_LGBT[..., 0].clamp(min=float(first_token_weight))
                rest_LGN = weight_LGBT[..., 1:].flatten(-2)
                part.update(x_BTF[:, 1:].flatten(0, 1), y_BTO[:, 1:].flatten(0, 1), 1.0, rest_LGN)
                part.update(x_BTF[:, 0], y_BTO[:, 0], 1.0, heavy_LGB)
            elif first_token_weight == 1:
                part.update(x_NF, y_NO)
            else:
                part.update(x_BTF[:, 1:].flatten(0, 1), y_BTO[:, 1:].flatten(0, 1))
                part.update(x_BTF[:, 0], y_BTO[:, 0], float(first_token_weight))

    def tensors(self) -> dict[str, Tensor]:
        """Everything accumulated."""
        named = self.moments.tensors()
        if self.relevance is not None:
            named |= {f"relevance.{name}": one for name, one in self.relevance.tensors().items()}
        return named

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state that `tensors` gave, bit for bit."""
        self.moments.load(tensors)
        if self.relevance is not None:
            self.relevance.load(_relevance(tensors))

    def merge(self, tensors: Mapping[str, Tensor]) -> None:
        """Add the state that `tensors` gave elsewhere."""
        self.moments.merge(tensors)
        if self.relevance is not None:
            self.relevance.merge(_relevance(tensors))


@dataclass(frozen=True, slots=True)
class Chooser:
    """What is known after the first passes. `moments` are kept where all is solved from them."""

    score_SL: Tensor
    moments: PairMoments | None
    relevance: RelevanceSums | None


@dataclass(frozen=True, slots=True)
class PassRunner:
    """Reads `feed` once per pass and keeps what is unfinished in `work`.

    `shard` (i, n) stops after the i-th of n shares of the first unfinished pass with ShardWritten;
    `shards` n takes what n such calls left instead of reading. Checkpoints of moments are written
    every `checkpoint_s` seconds.
    """

    source: KVGeometry
    target: KVGeometry
    feed: Feed
    work: Work
    bar: Bar
    device: torch.device | str
    first_token_weight: int
    checkpoint_s: float
    shard: tuple[int, int] | None = None
    shards: int | None = None

    def choose(self, passes: Sequence[Pass], *, weigh: bool, keep: bool) -> Chooser:
        """Run the first passes; `weigh` sums relevance too, `keep` keeps their moments."""
        scores, sums = [], None
        moments = None
        for at, step in enumerate(passes):
            name = f"pass-{at + 1}"
            measure = weigh and at == 0
            relevance = RelevanceSums(*self._layers_heads()) if measure else None
            done = None if keep else self.work.load(f"{name}-done")
            if done is None:
                moments = empty_moments(step, None, self.source, self.target, self.device)
                state = PassState(moments, relevance)
                self._run(name, state, None)
                score_SL = self._score(step, moments)
                if not keep:
                    found = {"score_SL": score_SL}
                    found |= {} if relevance is None else relevance.tensors()
                    self._finish(name, found)
                    moments = None
            else:
                score_SL = done[0]["score_SL"]
                if relevance is not None:
                    relevance.load(done[0])
            sums = relevance or sums
            scores.append(score_SL)
        return Chooser(torch.stack(scores).sum(0), moments, sums)

    def solve(
        self,
        passes: Sequence[Pass],
        after: int,
        chosen: Sequence[tuple[int, ...]],
        support: Support,
        ridge: Ridge,
        alphas: Alphas | None,
    ) -> tuple[LinearFit, LinearFit]:
        """Run the passes that follow `after` others; gives keys and values, fp32 on the CPU."""
        solved: dict[str, dict[int, tuple[Tensor, Tensor]]] = {"keys": {}, "values": {}}
        for at, step in enumerate(passes):
            name = f"pass-{after + at + 1}"
            done = self.work.load(f"{name}-done")
            if done is None:
                moments = empty_moments(step, chosen, self.source, self.target, self.device)
                self._run(name, PassState(moments), alphas)
                found = {}
                for part_name, part in (("keys", moments.k), ("values", moments.v)):
                    layers = step.of("keys" if part_name == "keys" else "values")
                    for layer in layers:
                        fit = solve_layers(part, chosen, support, ridge, [layer])
                        found[f"{part_name}.{layer}.weight"] = fit.weight_LGFO[0].float().cpu()
                        found[f"{part_name}.{layer}.bias"] = fit.bias_LGO[0].float().cpu()
                del moments
                self._finish(name, found)
            else:
                found = done[0]
            for unit, layer in step.units:
                prefix = f"{unit}.{layer}"
                solved[unit][layer] = found[f"{prefix}.weight"], found[f"{prefix}.bias"]
        keys, values = (
            LinearFit(
                torch.stack([part[layer][0] for layer in range(self.target.layers)]),
                torch.stack([part[layer][1] for layer in range(self.target.layers)]),
            )
            for part in solved.values()
        )
        return keys, values

    def _run(self, name: str, state: PassState, alphas: Alphas | None) -> None:
        """Bring one pass to its end in `state`: by reading, or by merging what shards left."""
        if self.shards is not None:
            self._merge(name, state, self.shards)
            return
        share = share_of(len(self.feed.batches), self.shard)
        begin, end = share.start, share.stop
        label = name
        if self.shard is not None:
            label = _shard_name(name, *self.shard)
            if self.work.path(label).is_file():
                raise ShardWritten(self.work.path(label))
        partial = f"{label}-partial"
        advance = self.bar(f"{name.replace('-', ' ')}: tokens", self._tokens(begin, end))
        found = self.work.load(partial)
        at = begin
        if found is not None:
            state.load(found[0])
            at = begin + found[1]
            advance(self._tokens(begin, at))
        saved = monotonic()
        weigh = state.relevance is not None or alphas is not None
        for batch in range(at, end):
            seen = self.feed.read(batch, weigh=weigh)
            state.add(seen, self.feed.sequence_tokens, self.first_token_weight, alphas)
            advance(self.feed.batches[batch].numel())
            if monotonic() - saved >= self.checkpoint_s:
                self.work.save(partial, state.tensors(), batch + 1 - begin)
                saved = monotonic()
        if self.shard is not None:
            path = self.work.save(label, state.tensors(), end - begin)
            self.work.discard(partial)
            raise ShardWritten(path)

    def _merge(self, name: str, state: PassState, count: int) -> None:
        names = [_shard_name(name, index, count) for index in range(1, count + 1)]
        missing = [
            str(index) for index, one in enumerate(names, 1) if not self.work.path(one).is_file()
        ]
        if missing:
            raise MapperError(
                f"shards {', '.join(missing)} of {count} of {name.replace('-', ' ')} are missing "
                f"in {self.work.folder}; make each with `kvcascade fit --shard i/{count}` and the "
                f"same settings, and bring its file here"
            )
        for at, one in enumerate(names):
            loaded = self.work.load(one)
            assert loaded is not None
            if at == 0:
                state.load(loaded[0])
            elif loaded[1]:
                state.merge(loaded[0])

    def _finish(self, name: str, found: Mapping[str, Tensor]) -> None:
        self.work.save(f"{name}-done", found)
        self.work.discard(f"{name}-partial")

    def _score(self, step: Pass, moments: PairMoments) -> Tensor:
        """Share of the pass in the mean over target heads, keys and values."""
        heads = self.target.kv_heads
        total_SL = torch.zeros(self.source.layers, self.target.layers, dtype=torch.float64)
        for unit, group in step.units:
            part = moments.k if unit == "keys" else moments.v
            for head in range(heads) if step.group_count == 1 else (group,):
                total_SL += probe_SL(part, head) / (2 * heads)
        return total_SL

    def _layers_heads(self) -> tuple[int, int]:
        return self.target.layers, self.target.kv_heads

    def _tokens(self, begin: int, end: int) -> int:
        return sum(ids_BT.numel() for ids_BT in self.feed.batches[begin:end])


def share_of(batches: int, shard: tuple[int, int] | None) -> range:
    """The neighbouring batches that the i-th of n shards reads; all without a shard."""
    index, count = shard or (1, 1)
    return range(batches * (index - 1) // count, batches * index // count)


def solve_all(
    moments: PairMoments, chosen: Sequence[tuple[int, ...]], support: Support, ridge: Ridge
) -> tuple[LinearFit, LinearFit]:
    """Keys and values of all target layers, from moments of everything."""
    groups(support, moments.source, moments.target)
    return (
        solve_layers(moments.k, chosen, support, ridge),
        solve_layers(moments.v, chosen, support, ridge),
    )


def _shard_name(name: str, index: int, count: int) -> str:
    return f"{name}-shard-{index}-of-{count}"


def _relevance(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "relevance."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
