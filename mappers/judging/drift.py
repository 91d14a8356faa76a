"""What is lost over many handoffs: two models that take over from each other at every turn.

A conversation is a held-out window cut into turns of equal length. The source reads the first; at
every later turn the other model takes over on a cache in which the last owner's turns are mapped,
and reads the turn itself. Each turn is compared with the same model having read everything, so
that drift is the mappers' alone. Follows the alternating protocol of arXiv 2608.03893, section 4.6,
with likelihoods in place of answers.

Shapes: T tokens, L layers, H KV heads, D head_dim, U vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.errors import MapperError
from mappers.capture import TokenSequences, cache_to_kv, kv_to_cache
from mappers.judging.report import DriftReport, DriftTurn
from mappers.mapper import Mapper

OWNERS = ("source", "target")


@dataclass(slots=True)
class _Side:
    """One model in a conversation: the map into it, its own predictions, and what it holds."""

    model: Any
    into: Mapper
    native_TU: Tensor
    held: tuple[Tensor, Tensor] | None = None

    @property
    def tokens(self) -> int:
        return 0 if self.held is None else self.held[0].shape[1]

    def read(self, ids_T: Tensor) -> Tensor:
        """Read tokens after what is held; gives log-probabilities [T, U] and holds them too."""
        cache = None
        if self.held is not None:
            k_LTHD, v_LTHD = self.held
            cache = kv_to_cache(k_LTHD[:, None], v_LTHD[:, None])
        output = self.model(input_ids=ids_T[None], cache=cache, use_cache=True)
        k_LBTHD, v_LBTHD = cache_to_kv(output.cache)
        self.held = k_LBTHD[:, 0], v_LBTHD[:, 0]
        log_TU: Tensor = output.logits[0].float().log_softmax(-1)
        return log_TU

    def take_over(self, other: _Side, keep_own: bool) -> None:
        """Hold everything the other side holds, mapped from the first token that is missing."""
        assert other.held is not None
        start = self.tokens if keep_own else 0
        mapped = self.into.apply(other.held[0][:, start:], other.held[1][:, start:], start)
        if self.held is None or not keep_own:
            self.held = mapped
        else:
            k_LTHD, v_LTHD = (
                torch.cat((own, new), dim=1) for own, new in zip(self.held, mapped, strict=True)
            )
            self.held = k_LTHD, v_LTHD


@torch.inference_mode()
def drift(
    small: Any,
    large: Any,
    forward: Mapper,
    reverse: Mapper,
    conversations: TokenSequences,
    *,
    handoffs: int = 10,
    advance: Callable[[int], None] = lambda conversations: None,
) -> DriftReport:
    """Hand every conversation over `handoffs` times, small first, and compare turn by turn.

    `forward` maps small to large, `reverse` back. `conversations` are cut into `handoffs` + 1 turns
    of equal length; what is left over is not read. `advance` is called with 1 after each. Raises
    MapperError when they are too short for turns of 2 tokens.
    """
    turn_tokens = conversations.ids_ST.shape[1] // (handoffs + 1)
    if turn_tokens < 2:
        raise MapperError(
            f"conversations of {conversations.ids_ST.shape[1]} tokens are too short for "
            f"{handoffs} handoffs; give longer windows or fewer handoffs"
        )
    sums: dict[bool, dict[int, list[Tensor]]] = {True: defaultdict(list), False: defaultdict(list)}
    for ids_T in conversations.ids_ST.to(large.device):
        native = [
            model(input_ids=ids_T[None]).logits[0].float().log_softmax(-1)
            for model in (small, large)
        ]
        for keep_own, by_turn in sums.items():
            sides = (_Side(small, reverse, native[0]), _Side(large, forward, native[1]))
            sides[0].read(ids_T[: turn_tokens - 1])
            for turn in range(1, handoffs + 1):
                owner, last = sides[turn % 2], sides[(turn + 1) % 2]
                owner.take_over(last, keep_own)
                by_turn[turn].append(_compare(owner, ids_T, turn * turn_tokens, turn_tokens))
        advance(1)
    return DriftReport(
        conversations=len(conversations.ids_ST),
        turn_tokens=turn_tokens,
        kept=_turns(sums[True]),
        remapped=_turns(sums[False]),
    )


def _compare(owner: _Side, ids_T: Tensor, start: int, tokens: int) -> Tensor:
    """Read a turn; its NLL, native NLL, KL to native and agreement, means over its tokens [4]."""
    # The token before the turn is read natively: it predicts the turn's first.
    span = slice(start - 1, start + tokens - 1)
    log_TU, native_TU = owner.read(ids_T[span]), owner.native_TU[span]
    answer_T1 = ids_T[start : start + tokens, None]
    return torch.stack(
        [
            -log_TU.gather(1, answer_T1).mean(),
            -native_TU.gather(1, answer_T1).mean(),
            (native_TU.exp() * (native_TU - log_TU)).sum(1).mean(),
            (log_TU.argmax(1) == native_TU.argmax(1)).float().mean(),
        ]
    )


def _turns(by_turn: dict[int, list[Tensor]]) -> tuple[DriftTurn, ...]:
    turns = []
    for turn, values in sorted(by_turn.items()):
        nll, native_nll, kl, agreement = torch.stack(values).mean(0).tolist()
        turns.append(
            DriftTurn(
                turn=turn,
                owner=OWNERS[turn % 2],
                nll=nll,
                native_nll=native_nll,
                kl_to_native=kl,
                top1_agreement=agreement,
            )
        )
    return tuple(turns)
