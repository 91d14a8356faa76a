"""From logged answers to scores, and from scores to a calibration.

The score of an answer is what a policy would have reported had it never escalated. An answer that
the large model took over gives a bound only: its score is at most the lowest one seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import ConfigError
from router.calibration import Calibration, Dependencies, Promise
from router.chance import uniform
from router.prompt import prompt_score
from router.record import AnswerRecord
from router.scores import ScoreSpec
from router.threshold import Threshold


@dataclass(frozen=True)
class Sample:
    """One answer of the small model.

    `score` is None without evidence and a bound unless `exact`. `lows` holds (token, value) where
    the statistic fell to a new low, so that `handover_token` can say where a policy would act.
    """

    score: float | None
    tie: float
    exact: bool
    tokens: int
    lows: tuple[tuple[int, float], ...]
    failed: bool | None

    @property
    def order(self) -> tuple[float, float]:
        """Sorts from doubt to confidence; no score is the end, for it never escalates."""
        return (float("inf") if self.score is None else self.score, self.tie)

    def handover_token(self, threshold: Threshold) -> int | None:
        """The small model's token after which `threshold` escalates; None when it never does."""
        for token, value in self.lows:
            if threshold.doubts(value, self.tie):
                return token
        return None


def measure(record: AnswerRecord, spec: ScoreSpec) -> Sample | None:
    """The sample of one logged answer; None when the small model wrote nothing that counts.

    An answer that was cut for a reason other than its score says nothing about scores. Raises
    ConfigError when the log has no margins.
    """
    if record.margins is None:
        raise ConfigError("the log has no margins: write it with `routing.log_margins: true`")
    if spec.name == "prompt":
        return _measure_prompt(record, spec)
    if not record.complete and (not record.margins or record.decision.score is None):
        return None  # not the score but the request, chance or a failure called the large model
    last = spec.last_token
    statistic = spec.start()
    score: float | None = None
    lows: list[tuple[int, float]] = []
    for token, margin in enumerate(record.margins[:last], 1):
        if margin is None:
            continue
        statistic.push(margin)
        value = statistic.value
        if value is None or not spec.falls:
            continue
        if score is None or value < score:
            score = value
            lows.append((token, value))
    if not spec.falls:
        score = statistic.value
        lows = [] if score is None else [(len(record.margins), score)]
    reached = last is not None and len(record.margins) >= last
    return Sample(
        score=score,
        tie=uniform(record.request_hash, "tie"),
        exact=record.complete or reached,
        tokens=max(len(record.margins), record.small_tokens),
        lows=tuple(lows),
        failed=record.failed,
    )


def _measure_prompt(record: AnswerRecord, spec: ScoreSpec) -> Sample | None:
    """The score is known before the answer, whoever wrote that; None when nobody asked for it."""
    if record.prompt_logprobs is None:
        return None
    assert spec.window_tokens is not None and record.margins is not None
    score = prompt_score(record.prompt_logprobs, spec.window_tokens)
    return Sample(
        score=score,
        tie=uniform(record.request_hash, "tie"),
        exact=True,
        tokens=max(len(record.margins), record.small_tokens) + record.large_tokens,
        lows=() if score is None else ((0, score),),
        failed=record.failed,
    )


def collect(records: Sequence[AnswerRecord], spec: ScoreSpec) -> list[Sample]:
    """Samples of all answers that the small model began, in the order of the log.

    Raises ConfigError when none is left, or when the score needs whole answers and has not.
    """
    samples = [one for record in records if (one := measure(record, spec)) is not None]
    if not samples and spec.name == "prompt":
        raise ConfigError("no line of this log has prompt log-probabilities: log under `prompt`")
    if not samples:
        raise ConfigError("the small model wrote nothing in this log; log with `policy: small`")
    cut = sum(not one.exact for one in samples)
    if cut and not spec.falls:
        raise ConfigError(
            f"{spec.name} needs whole answers, and the large model took over {cut} of "
            f"{len(samples)}: log with `policy: small`"
        )
    if cut and any(one.score is None for one in samples if not one.exact):
        raise ConfigError(
            "the large model took over answers that have no score yet: log with `policy: small`"
        )
    return samples


def dependencies_of(records: Sequence[AnswerRecord]) -> Dependencies:
    """What all lines were made with; ConfigError when they differ or do not say."""
    first = records[0].depends
    if first is None:
        raise ConfigError("the log does not say what it was made with; write it with a deployment")
    for number, record in enumerate(records, 1):
        difference = "unknown" if record.depends is None else record.depends.difference(first)
        if difference:
            raise ConfigError(
                f"line {number} is of another deployment ({difference}): calibrate on one at a time"
            )
    return first


def calibrate(
    samples: Sequence[Sample],
    spec: ScoreSpec,
    target_fraction: float,
    depends: Dependencies,
    *,
    promise: Promise | None = None,
) -> Calibration:
    """The calibration of these samples; ConfigError when it cannot tell `target_fraction`."""
    scored = sorted((one for one in samples if one.score is not None), key=lambda one: one.order)
    # An answer that was cut may have fallen lower: what lies at or below it has no certain rank.
    blind = max((rank for rank, one in enumerate(scored, 1) if not one.exact), default=0)
    made = Calibration(
        score=spec,
        target_fraction=target_fraction,
        promise=promise,
        scores=tuple(one.order[0] for one in scored),
        ties=tuple(one.tie for one in scored),
        unscored=len(samples) - len(scored),
        blind=blind,
        depends=depends,
        created_unix_s=time.time(),
    )
    made.rank(target_fraction)
    return made


def realised_fraction(samples: Sequence[Sample], threshold: Threshold) -> float:
    """Part of the samples that the threshold escalates."""
    doubtful = sum(
        one.score is not None and threshold.doubts(one.score, one.tie) for one in samples
    )
    return doubtful / len(samples)
