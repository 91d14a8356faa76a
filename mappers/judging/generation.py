"""A generation task with checkable answers: facts planted in a context, one of them asked for.

The context's cache is native, mapped or another text's; the question is read natively by the
target, as a new turn is in serving. Perplexity can hide a mapper that blurs what stands where:
an answer of several digits cannot. Chance is about one in a thousand.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mappers.capture import TokenSequences, cache_to_kv, kv_to_cache
from mappers.judging.report import AnswerRow, Example, GenerationReport
from mappers.judging.verdict import MAPPED, NATIVE, NO_PREFIX, OTHER_TEXT, SOURCE
from mappers.mapper import Mapper

_THINGS = (
    *("apple", "river", "window", "garden", "bottle", "castle", "pencil", "rocket"),
    *("violin", "forest", "bridge", "candle", "mirror", "basket", "island", "hammer"),
    *("ladder", "pillow", "engine", "camera", "jacket", "market", "tunnel", "wallet"),
)
_ANSWER_TOKENS = 8
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Item:
    """A context, the beginning of the sentence that its reader must finish, and how it ends."""

    context: str
    question: str
    answer: str


def recall_items(count: int, facts: int, seed: int = 0) -> list[Item]:
    """`count` contexts of `facts` sentences each, the same for the same seed."""
    rng = Random(seed)
    items = []
    for _ in range(count):
        things = rng.sample(_THINGS, facts)
        codes = [str(code) for code in rng.sample(range(100, 1000), facts)]
        lines = [
            f"The code of the {thing} is {code}." for thing, code in zip(things, codes, strict=True)
        ]
        asked = rng.randrange(facts)
        items.append(
            Item(
                context="Remember these codes.\n" + "\n".join(lines) + "\n",
                question=f"\nNow one of them again. The code of the {things[asked]} is",
                answer=codes[asked],
            )
        )
    return items


@torch.inference_mode()
def generation_task(
    small: Any,
    large: Any,
    mapper: Mapper,
    tokenizer: Any,
    windows: TokenSequences,
    *,
    items: int = 24,
    facts: int = 6,
    continuations: int = 6,
    continuation_tokens: int = 32,
    prefix_tokens: int = 256,
    advance: Callable[[int], None] = lambda items: None,
) -> GenerationReport:
    """Ask `items` questions, then continue the first `continuations` windows from their prefix.

    `small` and `large` are source and target, `tokenizer` either's. Decoding is greedy. `advance`
    is called with 1 after every question and every continuation.
    """
    asked = recall_items(items, facts)
    caches = [_Caches.read(small, large, mapper, _ids(tokenizer, i.context, True)) for i in asked]
    correct = dict.fromkeys((NATIVE, MAPPED, OTHER_TEXT, NO_PREFIX, SOURCE), 0)
    examples = []
    for at, item in enumerate(asked):
        question_T = _ids(tokenizer, item.question, False).to(large.device)
        own, other = caches[at], caches[at - 1]
        alone_T = _ids(tokenizer, item.question, True).to(large.device)
        said = {
            name: tokenizer.decode(greedy(model, ids_T, cache, _ANSWER_TOKENS))
            for name, model, ids_T, cache in (
                (NATIVE, large, question_T, own.native()),
                (MAPPED, large, question_T, own.mapped()),
                (OTHER_TEXT, large, question_T, other.mapped()),
                (NO_PREFIX, large, alone_T, DynamicCache()),
                (SOURCE, small, question_T, own.source()),
            )
        }
        for name, text in said.items():
            correct[name] += text.strip().startswith(item.answer)
        if at < _EXAMPLES:
            question = item.question.strip()
            examples.append(
                Example(
                    question=question,
                    expected=item.answer,
                    native=said[NATIVE],
                    mapped=said[MAPPED],
                )
            )
        advance(1)
    common, equal, used = 0, 0, windows.ids_ST[:continuations].to(large.device)
    for ids_T in used:
        own = _Caches.read(small, large, mapper, ids_T[: prefix_tokens - 1])
        last_T = ids_T[prefix_tokens - 1 : prefix_tokens]
        native = greedy(large, last_T, own.native(), continuation_tokens)
        mapped = greedy(large, last_T, own.mapped(), continuation_tokens)
        same = [a == b for a, b in zip(native, mapped, strict=True)]
        common += (*same, False).index(False)
        equal += sum(same)
        advance(1)
    rows = tuple(AnswerRow(name=name, correct=n, asked=items) for name, n in correct.items())
    room = correct[NATIVE] - correct[NO_PREFIX]
    return GenerationReport(
        rows=rows,
        facts=facts,
        context_tokens=sum(cache.tokens for cache in caches) / items,
        examples=tuple(examples),
        continuations=len(used),
        continuation_tokens=continuation_tokens,
        common_tokens=common / len(used),
        token_agreement=equal / (len(used) * continuation_tokens),
        floor_normalised=(correct[MAPPED] - correct[NO_PREFIX]) / room if room > 0 else None,
    )


@torch.inference_mode()
def greedy(model: Any, ids_T: Tensor, cache: DynamicCache, tokens: int) -> list[int]:
    """Read `ids_T` after `cache`, which grows, and go on for `tokens` tokens, each the likeliest.

    An end-of-text token is a token like any other, so that every answer has the same length.
    """
    said: list[int] = []
    while len(said) < tokens:
        logits_U = model(input_ids=ids_T[None], cache=cache, logits_to_keep=1).logits[0, -1]
        said.append(int(logits_U.argmax()))
        ids_T = torch.tensor(said[-1:], device=ids_T.device)
    return said


@dataclass(frozen=True, slots=True)
class _Caches:
    """A context's caches as tensors; each call gives a cache that may grow."""

    tokens: int
    kv: dict[str, tuple[Tensor, Tensor]]

    @classmethod
    def read(cls, small: Any, large: Any, mapper: Mapper, ids_T: Tensor) -> _Caches:
        ids_BT = ids_T[None].to(large.device)
        source = cache_to_kv(small(input_ids=ids_BT, use_cache=True, logits_to_keep=1).cache)
        native = cache_to_kv(large(input_ids=ids_BT, use_cache=True, logits_to_keep=1).cache)
        k_LTHD, v_LTHD = mapper.apply(source[0][:, 0], source[1][:, 0], 0)
        mapped = (k_LTHD[:, None], v_LTHD[:, None])
        return cls(len(ids_T), {SOURCE: source, NATIVE: native, MAPPED: mapped})

    def source(self) -> DynamicCache:
        return kv_to_cache(*self.kv[SOURCE])

    def native(self) -> DynamicCache:
        return kv_to_cache(*self.kv[NATIVE])

    def mapped(self) -> DynamicCache:
        return kv_to_cache(*self.kv[MAPPED])


def _ids(tokenizer: Any, text: str, first: bool) -> Tensor:
    """Token ids [T]; the first text of a sequence begins as served prompts do."""
    begin = [] if not first or tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    return torch.tensor(begin + tokenizer(text, add_special_tokens=False)["input_ids"])
