"""How well the large model goes on from a mapped cache, beside the controls that give it meaning.

Every window of held-out text is a prefix and the tokens after it. The large model scores those
tokens after its own prefix cache, that cache taken out and put back (must be exact), the mapped
cache, the small model's cache unmapped, and no prefix; the small model scores them too. The last
prefix token is always read natively, as in serving. Teacher-forced: says nothing of long
generations.

Shapes: T tokens, L layers, H KV heads, D head_dim, Q query heads, U vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import DynamicCache

from cluster.errors import MapperError
from mappers.capture import TokenSequences, cache_to_kv, kv_to_cache
from mappers.geometry import KVGeometry
from mappers.manifest import ScoreReport, ScoreRow
from mappers.mapper import Mapper

MIN_RECOVERED_GAP = 0.5

NATIVE = "native"
INJECTED = "native injected"
MAPPED = "mapped"
RAW = "raw source cache"
NO_PREFIX = "no prefix"
SMALL = "small alone"


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
    cosine: list[float] = field(default_factory=list)

    def add(self, run: _Run, native: _Run, answer_T: Tensor) -> None:
        self.tokens += len(answer_T)
        self.nll -= float(run.logprob_TU.gather(1, answer_T[:, None]).sum())
        gap_TU = native.logprob_TU - run.logprob_TU
        self.kl += float((native.logprob_TU.exp() * gap_TU).sum())
        self.agree += int((run.logprob_TU.argmax(1) == native.logprob_TU.argmax(1)).sum())
        if run.attention_LTQD is not None and native.attention_LTQD is not None:
            cosine_LTQ = cosine_similarity(run.attention_LTQD, native.attention_LTQD, dim=-1)
            self.cosine.append(float(cosine_LTQ.mean()))

    def row(self, name: str) -> ScoreRow:
        return ScoreRow(
            name=name,
            perplexity=math.exp(self.nll / self.tokens),
            kl_to_native=self.kl / self.tokens,
            top1_agreement=self.agree / self.tokens,
            attention_cosine=sum(self.cosine) / len(self.cosine) if self.cosine else None,
        )


@torch.inference_mode()
def score_mapper(
    small: Any,
    large: Any,
    mapper: Mapper,
    windows: TokenSequences,
    *,
    prefix_tokens: int = 256,
    advance: Callable[[int], None] = lambda windows: None,
) -> ScoreReport:
    """Score `mapper` on every sequence of `windows`, split after `prefix_tokens`.

    `small` and `large` are HF causal models (`capture.load_model`) on one device. `advance` is
    called with 1 after each window. MapperError when a window has nothing after its prefix.
    """
    length = windows.ids_ST.shape[1]
    if not 2 <= prefix_tokens < length:
        raise MapperError(
            f"windows of {length} tokens cannot be split after {prefix_tokens}; the prefix needs 2 "
            f"tokens or more and something must follow it"
        )
    sums: dict[str, _Sums] = {}
    exact = True
    for ids_T in windows.ids_ST.to(large.device):
        # The last prefix token is read natively and predicts the first scored one.
        prefix_T, tail_T = ids_T[: prefix_tokens - 1], ids_T[prefix_tokens - 1 : -1]
        answer_T = ids_T[prefix_tokens:]
        small_cache = small(input_ids=prefix_T[None], use_cache=True, logits_to_keep=1).cache
        k_STHD, v_STHD = (kv[:, 0] for kv in cache_to_kv(small_cache))
        large_cache = large(input_ids=prefix_T[None], use_cache=True, logits_to_keep=1).cache
        own = cache_to_kv(large_cache)
        native = _run(large, tail_T, large_cache, mapper.target)
        injected = _run(large, tail_T, kv_to_cache(*own), mapper.target)
        exact &= torch.equal(native.logprob_TU, injected.logprob_TU)
        mapped = mapper.apply(k_STHD, v_STHD, 0)
        runs = {
            NATIVE: native,
            INJECTED: injected,
            MAPPED: _run(large, tail_T, _one_sequence(*mapped), mapper.target),
            NO_PREFIX: _run(large, tail_T, DynamicCache(), mapper.target),
            SMALL: _run(small, tail_T, small_cache, None),
        }
        raw = _raw_source(k_STHD, v_STHD, mapper)
        if raw is not None:
            runs[RAW] = _run(large, tail_T, raw, mapper.target)
        for name, run in runs.items():
            sums.setdefault(name, _Sums()).add(run, native, answer_T)
        advance(1)
    order = (NATIVE, INJECTED, MAPPED, RAW, NO_PREFIX, SMALL)
    rows = tuple(sums[name].row(name) for name in order if name in sums)
    recovered, reasons = judge({row.name: row.perplexity for row in rows}, exact)
    return ScoreReport(
        rows=rows,
        windows=windows.ids_ST.shape[0],
        prefix_tokens=prefix_tokens,
        scored_tokens=length - prefix_tokens,
        injection_exact=exact,
        recovered_gap=recovered,
        verdict="refuse" if reasons else "accept",
        reasons=reasons,
    )


def judge(
    perplexity: Mapping[str, float], injection_exact: bool
) -> tuple[float | None, tuple[str, ...]]:
    """Recovered gap (see `ScoreReport`) and the reasons to refuse; no reasons means accept."""
    nll = {name: math.log(value) for name, value in perplexity.items()}
    gap = nll[NO_PREFIX] - nll[NATIVE]
    recovered = (nll[NO_PREFIX] - nll[MAPPED]) / gap if gap > 0 else None
    reasons = []
    if not injection_exact:
        reasons.append("putting the native cache back changes predictions: the test itself is off")
    if recovered is None:
        reasons.append("the held-out text is predicted no better with a prefix than without")
    elif recovered < MIN_RECOVERED_GAP:
        reasons.append(
            f"the mapped cache recovers {recovered:.0%} of the gap between no prefix and native; "
            f"{MIN_RECOVERED_GAP:.0%} is required"
        )
    if nll[MAPPED] >= nll[SMALL]:
        reasons.append("the small model alone predicts at least as well as the mapped cache")
    return recovered, tuple(reasons)


def _run(model: Any, ids_T: Tensor, cache: DynamicCache, geometry: KVGeometry | None) -> _Run:
    """Continue from `cache`, which grows; attention outputs are kept when a geometry is given."""
    with _attention_outputs(model) as outputs:
        logits_TU = model(input_ids=ids_T[None], cache=cache).logits[0]
    attention = None
    if geometry is not None:
        stacked = torch.stack(outputs)
        attention = stacked.view(*stacked.shape[:2], -1, geometry.head_dim)
    return _Run(logits_TU.float().log_softmax(-1), attention)


@contextmanager
def _attention_outputs(model: Any) -> Iterator[list[Tensor]]:
    """Collect the input of every attention's output projection, [T, Q*D] per layer, in fp32."""
    outputs: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        outputs.append(inputs[0][0].float())

    modules = model.named_modules()
    handles = [
        module.register_forward_pre_hook(keep)
        for name, module in modules
        if name.endswith("self_attn.o_proj")
    ]
    assert handles, "supported model types name their output projection self_attn.o_proj"
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _raw_source(k_STHD: Tensor, v_STHD: Tensor, mapper: Mapper) -> DynamicCache | None:
    """The source's cache under the target's layers; None when heads differ in number or size."""
    source, target = mapper.source, mapper.target
    if (source.kv_heads, source.head_dim) != (target.kv_heads, target.head_dim):
        return None
    layers = [layer * source.layers // target.layers for layer in range(target.layers)]
    return _one_sequence(k_STHD[layers], v_STHD[layers])


def _one_sequence(k_LTHD: Tensor, v_LTHD: Tensor) -> DynamicCache:
    return kv_to_cache(k_LTHD[:, None], v_LTHD[:, None])
