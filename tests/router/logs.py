"""Decision logs with known scores, for tests of calibration and replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from router.calibration import Dependencies
from router.record import AnswerRecord, Turn
from router.scores import ScoreSpec

WINDOW = ScoreSpec(name="margin", window_tokens=2, last_token=4)
DEPENDS = Dependencies(
    small_model="s",
    small_weights_sha256="1",
    small_dtype="bfloat16",
    large_model="l",
    large_weights_sha256="2",
    tokenizer_sha256="3",
    template_sha256=None,
    mapper_id="4",
    vllm_version="0.29.0",
    logprobs_mode="raw_logprobs",
)


def record(
    number: int,
    margins: Sequence[float | None],
    *,
    complete: bool = True,
    score: float | None = None,
    failed: bool | None = None,
) -> AnswerRecord:
    """One answer; `score` is what a policy acted on where the answer is not complete."""
    action: Literal["stay", "escalate"] = "stay" if complete else "escalate"
    turn = Turn(at_token=len(margins), action=action, reason="policy", score=score)
    return AnswerRecord(
        unix_s=float(number),
        request_hash=f"{number:016x}",
        policy="fixed",
        decision=turn,
        turns=(turn,),
        complete=complete,
        small_tokens=len(margins),
        large_tokens=0,
        margins=tuple(margins),
        depends=DEPENDS,
        failed=failed,
    )


def uniform_records(count: int, *, seed: int = 0) -> list[AnswerRecord]:
    """Answers of two tokens whose window mean is uniform in [0, 10)."""
    source = random.Random(seed)
    scores = [source.uniform(0.0, 10.0) for _ in range(count)]
    return [record(seed * 1_000_000 + i, [score, score]) for i, score in enumerate(scores)]
