"""How well the target goes on from a mapped cache, beside the controls that give it meaning.

Every window of held-out text is a prefix and the tokens after it. The target scores those tokens
after its own prefix cache, that cache taken out and put back (must be exact), the mapped cache,
and the caches that should fail; the source scores them too. The last prefix token is always read
natively, as in serving. Teacher-forced: says nothing of long generations.

Shapes: P prefix tokens, T tokens, L layers, H KV heads, D head_dim, Q query heads, U vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import DynamicCache

from cluster.errors import MapperError
from mappers.attention import Attended, watched_attention
from mappers.capture import TokenSequences, cache_to_kv, kv_to_cache
from mappers.judging.controls import random_like, raw_source
from mappers.judging.local import KV, LocalSums, Query, few_queries
from mappers.judging.records import LocalAttention, ScoreReport, ScoreRow, Structure, Thresholds
from mappers.judging.structure import PlaceSums, shift_errors
from mappers.judging.verdict import (
    INJECTED,
    MAPPED,
    NATIVE,
    NO_PREFIX,
    OTHER_TEXT,
    RANDOM,
    RAW,
    SOURCE,
    judge,
)
from mappers.mapper import Mapper

_ROWS = (NATIVE, INJECTED, MAPPED, OTHER_TEXT, RANDOM, RAW, NO_PREFIX, SOURCE)
_UNJUDGED = "scored without controls, so not judged; run `kvcascade validate-pair`"


@dataclass(slots=True)
class _Run:
    """Predictions of one run over the scored tokens of a window."""

    logprob_TU: Tensor
    attention_LTQD: Tensor | None


@dataclass(slots=True)
class _Sums:
    """Per-token sums of one row over all windows."""

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agree: int = 0
    cosine_L: list[Tensor] = field(default_factory=list)

    def add(self, run: _Run, native: _Run, answer_T: Tensor) -> None:
        self.tokens += len(answer_T)
        self.nll -= float(run.logprob_TU.gather(1, answer_T[:, None]).sum())
        gap_TU = native.logprob_TU - run.logprob_TU
        self.kl += float((native.logprob_TU.exp() * gap_TU).sum())
        self.agree += int((run.logprob_TU.argmax(1) == native.logprob_TU.argmax(1)).sum())
        if run.attention_LTQD is not None and native.attention_LTQD is not None:
            cosine_LTQ = cosine_similarity(run.attention_LTQD, native.attention_LTQD, dim=-1)
            self.cosine_L.append(cosine_LTQ.mean((1, 2)))

    def row(self, name: str, native: _Sums, floor: _Sums | None) -> ScoreRow:
        mean_L = torch.stack(self.cosine_L).mean(0).tolist() if self.cosine_L else None
        gap = None if floor is None else floor.nll - native.nll
        room = None if floor is None else floor.tokens - floor.agree
        return ScoreRow(
            name=name,
            perplexity=math.exp(self.nll / self.tokens),
            kl_to_native=self.kl / self.tokens,
            top1_agreement=self.agree / self.tokens,
            attention_cosine=sum(mean_L) / len(mean_L) if mean_L else None,
            layer_cosine_L=tuple(round(value, 5) for value in mean_L) if mean_L else None,
            recovered_gap=(floor.nll - self.nll) / gap if floor and gap and gap > 0 else None,
            floor_normalised=(self.agree - floor.agree) / room if floor and room else None,
        )


@dataclass(slots=True)
class _Prefix:
    """One window's prefix as both models hold it. The two caches grow when they are used."""

    ids_P: Tensor
    source_cache: DynamicCache
    target_cache: DynamicCache
    source: KV
    native: KV
    mapped: KV


@torch.inference_mode()
def score_mapper(
    small: Any,
    large: Any,
    mapper: Mapper,
    windows: TokenSequences,
    *,
    prefix_tokens: int = 256,
    native_suffix_tokens: int = 1,
    controls: bool = True,
    thresholds: Thresholds | None = None,
    advance: Callable[[int], None] = lambda windows: None,
) -> ScoreReport:
    """Score `mapper` on every sequence of `windows`, split after `prefix_tokens`.

    `small` and `large` are the source and the target, HF causal models (`capture.load_model`) on
    one device. The target reads the last `native_suffix_tokens` of every prefix itself, as in
    serving. Without `controls` only native, injected and mapped caches run, and the mapper is
    refused as unjudged. `advance` is called with 1 after each window. MapperError when a window has
    nothing after its prefix.
    """
    length = windows.ids_ST.shape[1]
    if not 2 <= prefix_tokens < length:
        raise MapperError(
            f"windows of {length} tokens cannot be split after {prefix_tokens}; the prefix needs 2 "
            f"tokens or more and something must follow it"
        )
    if not 1 <= native_suffix_tokens < prefix_tokens:
        raise MapperError(
            f"a native suffix of {native_suffix_tokens} tokens leaves nothing to map of a prefix "
            f"of {prefix_tokens}; give 1 or more, and less than the prefix"
        )
    mapped_tokens = prefix_tokens - native_suffix_tokens
    bounds = thresholds or Thresholds()
    ids_ST = windows.ids_ST.to(large.device)
    sums: dict[str, _Sums] = {}
    measured = _Measured(bounds) if controls else None
    random = random_like(mapper) if controls else None
    # Another text of the same length: the window before. A window alone has none.
    other = None
    if controls and len(ids_ST) > 1:
        other = _read(small, large, mapper, ids_ST[-1, :mapped_tokens])
    exact = True
    for ids_T in ids_ST:
        # The last prefix token predicts the first scored one.
        tail_T, answer_T = ids_T[mapped_tokens:-1], ids_T[prefix_tokens:]
        scored = len(answer_T)
        prefix = _read(small, large, mapper, ids_T[:mapped_tokens])
        queries: list[Query] = []
        native = _run(
            large, tail_T, prefix.target_cache, scored, queries=queries if controls else None
        )
        runs = {
            NATIVE: native,
            INJECTED: _run(large, tail_T, _one_sequence(prefix.native), scored),
        }
        exact &= torch.equal(native.logprob_TU, runs[INJECTED].logprob_TU)
        caches = {MAPPED: prefix.mapped}
        if measured is not None:
            runs[NO_PREFIX] = _run(large, tail_T, DynamicCache(), scored)
            runs[SOURCE] = _run(small, tail_T, prefix.source_cache, scored, attention=False)
            caches |= _control_caches(mapper, random, prefix, other)
            measured.add(small, large, mapper, prefix, other, queries)
            other = prefix if other is not None else None
        for name, cache in caches.items():
            runs[name] = _run(large, tail_T, _one_sequence(cache), scored)
        for name, run in runs.items():
            sums.setdefault(name, _Sums()).add(run, native, answer_T)
        advance(1)
    rows = tuple(
        sums[name].row(name, sums[NATIVE], sums.get(NO_PREFIX)) for name in _ROWS if name in sums
    )
    local = structure = recovered = None
    reasons: tuple[str, ...] = (_UNJUDGED,)
    if measured is not None:
        local, structure = measured.local_attention(), measured.structure()
        perplexity = {row.name: row.perplexity for row in rows}
        recovered, reasons = judge(perplexity, exact, bounds, structure, local)
    return ScoreReport(
        rows=rows,
        windows=windows.ids_ST.shape[0],
        prefix_tokens=prefix_tokens,
        native_suffix_tokens=native_suffix_tokens,
        scored_tokens=length - prefix_tokens,
        injection_exact=exact,
        recovered_gap=recovered,
        verdict="refuse" if reasons else "accept",
        reasons=reasons,
        local_attention=local,
        structure=structure,
        absent_controls=tuple(_absent(sums, other is None)) if controls else (),
        thresholds=bounds if controls else None,
    )


class _Measured:
    """What is measured on the caches themselves, over all windows."""

    def __init__(self, bounds: Thresholds) -> None:
        self._bounds = bounds
        self._local: LocalSums | None = None
        self._places = PlaceSums()
        self._shift: tuple[int, float, float] | None = None

    def add(
        self,
        small: Any,
        large: Any,
        mapper: Mapper,
        prefix: _Prefix,
        other: _Prefix | None,
        queries: list[Query],
    ) -> None:
        if self._places.windows == 0:
            self._shift = shift_errors(mapper, small, large, prefix.source)
        self._places.add(prefix.native, prefix.mapped)
        if other is not None:
            self._local = self._local or LocalSums(prefix.native[0].shape[1])
            differs_P = prefix.ids_P != other.ids_P
            self._local.add(queries, prefix.native, prefix.mapped, other.mapped, differs_P)

    def local_attention(self) -> LocalAttention | None:
        return None if self._local is None else self._local.report()

    def structure(self) -> Structure:
        shift, keys, values = self._shift or (None, None, None)
        return Structure(
            shift=shift,
            shift_error_keys=keys,
            shift_error_values=values,
            misplaced=self._places.misplaced(self._bounds.min_misplaced_margin),
        )


def _control_caches(
    mapper: Mapper, random: Mapper | None, prefix: _Prefix, other: _Prefix | None
) -> dict[str, KV]:
    """Caches that should fail, by name of row."""
    caches = {}
    if other is not None:
        caches[OTHER_TEXT] = other.mapped
    if random is not None:
        caches[RANDOM] = random.apply(*prefix.source, 0)
    raw = raw_source(prefix.source, mapper)
    if raw is not None:
        caches[RAW] = raw
    return caches


def _absent(sums: dict[str, _Sums], one_window: bool) -> Iterator[str]:
    if one_window:
        yield f"{OTHER_TEXT}: there is one window only; attention layer by layer needs it too"
    if RANDOM not in sums:
        yield f"{RANDOM}: only linear mappers have a random counterpart"
    if RAW not in sums:
        yield f"{RAW}: the models differ in KV heads or head_dim"


def _read(small: Any, large: Any, mapper: Mapper, ids_P: Tensor) -> _Prefix:
    """Both models' caches of the part of a prefix that is mapped, and the mapped one."""
    source_cache = small(input_ids=ids_P[None], use_cache=True, logits_to_keep=1).cache
    target_cache = large(input_ids=ids_P[None], use_cache=True, logits_to_keep=1).cache
    k_STHD, v_STHD = (kv[:, 0] for kv in cache_to_kv(source_cache))
    k_LTHD, v_LTHD = (kv[:, 0] for kv in cache_to_kv(target_cache))
    mapped = mapper.apply(k_STHD, v_STHD, 0)
    source, native = (k_STHD, v_STHD), (k_LTHD, v_LTHD)
    return _Prefix(ids_P, source_cache, target_cache, source, native, mapped)


def _run(
    model: Any,
    ids_T: Tensor,
    cache: DynamicCache,
    scored: int,
    *,
    attention: bool = True,
    queries: list[Query] | None = None,
) -> _Run:
    """Continue from `cache`, which grows; what the last `scored` tokens predict and attend to.

    Some of the queries, layer by layer, are appended to `queries`.
    """
    outputs: list[Tensor] = []

    def see(one: Attended) -> None:
        outputs.append(one.output_BTQD[0, -scored:].float())
        if queries is not None:
            queries.append(few_queries(one))

    with watched_attention(model, see):
        logits_TU = model(input_ids=ids_T[None], cache=cache, logits_to_keep=scored).logits[0]
    return _Run(logits_TU.float().log_softmax(-1), torch.stack(outputs) if attention else None)


def _one_sequence(kv: KV) -> DynamicCache:
    k_LTHD, v_LTHD = kv
    return kv_to_cache(k_LTHD[:, None], v_LTHD[:, None])
