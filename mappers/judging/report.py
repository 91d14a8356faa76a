"""The whole report on a pair of models, as `report.json` holds it.

Knows no tensors. Scores and verdicts, which mapper folders hold too, are `records`'.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mappers.judging.records import ScoreReport


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AnswerRow(_Frozen):
    """Questions that were answered right after one kind of prefix cache."""

    name: str
    correct: int
    asked: int

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.correct / self.asked


class Example(_Frozen):
    """One question with what was said to it."""

    question: str
    expected: str
    native: str
    mapped: str


class GenerationReport(_Frozen):
    """Recall of facts planted in a context, and how far free continuations follow native ones.

    `facts` in every context, one of them asked for. `floor_normalised` is (mapped - floor) /
    (native - floor), None when native is no better than the floor. Of greedy continuations of
    `continuation_tokens`: `common_tokens` before the first difference, on average, and
    `token_agreement`, the share of equal tokens place by place.
    """

    rows: tuple[AnswerRow, ...]
    facts: int
    context_tokens: float
    examples: tuple[Example, ...]
    continuations: int
    continuation_tokens: int
    common_tokens: float
    token_agreement: float
    floor_normalised: float | None

    def row(self, name: str) -> AnswerRow:
        """The row called `name`."""
        return next(row for row in self.rows if row.name == name)


class DriftTurn(_Frozen):
    """One turn after one handoff; nats per token, means over conversations.

    `owner` reads the turn on a cache that holds the other model's turns mapped; `native_nll` is the
    same model's, having read everything itself.
    """

    turn: int
    owner: str
    nll: float
    native_nll: float
    kl_to_native: float
    top1_agreement: float


class DriftReport(_Frozen):
    """Alternating handoffs: the models take over from each other at every turn.

    `kept`: a model that takes over keeps what it holds and has only the missing turns mapped, as in
    serving. `remapped`: it takes the whole cache of the last owner anew, so that everything older
    is mapped over and over: the worst case.
    """

    conversations: int
    turn_tokens: int
    kept: tuple[DriftTurn, ...]
    remapped: tuple[DriftTurn, ...]


class DirectionReport(_Frozen):
    """One ordered pair of models under one mapper, whose id was `mapper_id` before the verdict.

    `cautions` are shown beside the verdict and do not change it.
    """

    source: str
    target: str
    mapper: str
    mapper_id: str
    score: ScoreReport
    generation: GenerationReport
    cautions: tuple[str, ...]


class PairReport(_Frozen):
    """Everything measured of a pair. `notes` says what was not, and why."""

    forward: DirectionReport
    reverse: DirectionReport | None
    drift: DriftReport | None
    notes: tuple[str, ...]
    created_by: str
    created_at: str
