"""The calibration file: which threshold escalates which part of the traffic.

For n exchangeable scores, "escalate below the j-th smallest" escalates j / (n + 1) of future
requests on average, and the fraction in the long run is Beta(j, n + 1 - j) distributed over
calibration sets (order statistics; exact for scores of any distribution, since ties are split by
a draw per request). It does not know how scores are collected (`router/samples.py`).
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from cluster.errors import ConfigError
from router.scores import ScoreSpec
from router.threshold import Threshold


class Dependencies(BaseModel):
    """Everything that changes scores, or what an escalation is worth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    small_model: str
    small_weights_sha256: str
    small_dtype: str
    large_model: str
    large_weights_sha256: str
    tokenizer_sha256: str
    template_sha256: str | None
    mapper_id: str
    vllm_version: str
    logprobs_mode: str

    def difference(self, other: Dependencies) -> str | None:
        """`field: ours, theirs` for the first one that differs; None when all agree."""
        for name in type(self).model_fields:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} is {ours} there and {theirs} here"
        return None


class Promise(BaseModel):
    """What a file was made for, when that is more than a fraction.

    `cost`: the expected cost of a request is at most `limit`. `failure_rate`: with `confidence`
    over calibration sets, at most `limit` of the answers that the small model keeps fail.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["cost", "failure_rate"]
    limit: float
    confidence: float | None = None


class Calibration(BaseModel):
    """Scores of answers that the small model wrote, and what they depend on.

    `scores` rise; equal ones are in the order of their `ties`, the draw of each request. `unscored`
    answers gave no score (too short, no log-probabilities) and are never escalated. The lowest
    `blind` scores are only known to be low, because the large model took over before the end.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    score: ScoreSpec
    target_fraction: float
    promise: Promise | None = None
    scores: tuple[float, ...]
    ties: tuple[float, ...]
    unscored: int
    blind: int = 0
    depends: Dependencies
    created_unix_s: float

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        if len(self.ties) != len(self.scores):
            raise ValueError("scores and ties differ in number")
        pairs = list(zip(self.scores, self.ties, strict=True))
        if pairs != sorted(pairs) or not all(map(math.isfinite, self.scores)):
            raise ValueError("scores must be finite and rise")
        return self

    @property
    def size(self) -> int:
        """Answers that the calibration rests on."""
        return len(self.scores) + self.unscored

    @cached_property
    def calibration_id(self) -> str:
        """12 hex digits that change with anything in the file."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    def rank(self, target_fraction: float) -> int:
        """j of the j-th smallest score that is the threshold; at most `target_fraction` expected.

        Raises ConfigError when there are too few answers, or too few with a score that is known.
        """
        rank = max_rank(target_fraction, self.size)
        if rank < 1:
            raise ConfigError(
                f"{self.size} answers cannot tell {target_fraction:g}: calibrate on at least "
                f"{answers_needed(target_fraction)}"
            )
        if rank > len(self.scores):
            raise ConfigError(
                f"only {len(self.scores)} of {self.size} answers have a score, so "
                f"{target_fraction:g} cannot be escalated: ask for less, or shorten the window"
            )
        if rank <= self.blind:
            raise ConfigError(
                f"the large model took over {self.blind} of {self.size} answers of this log, so "
                f"{target_fraction:g} cannot be told from less: log with `policy: small`, or ask "
                f"for {(self.blind + 1) / (self.size + 1):.3f} or more"
            )
        return rank

    def threshold(self, target_fraction: float | None = None) -> Threshold:
        """The threshold for a fraction, or for what the file was made for; see `rank`."""
        rank = self.rank(self.target_fraction if target_fraction is None else target_fraction)
        return Threshold(self.scores[rank - 1], self.ties[rank - 1], self.calibration_id)

    def interval(self, target_fraction: float, confidence: float = 0.9) -> tuple[float, float]:
        """Central interval of the fraction that the threshold escalates in the long run."""
        from scipy.special import betaincinv

        rank = self.rank(target_fraction)
        tail = (1.0 - confidence) / 2.0
        above = self.size + 1 - rank
        return (
            float(betaincinv(rank, above, tail)),
            float(betaincinv(rank, above, 1.0 - tail)),
        )

    def check_score(self, spec: ScoreSpec | None) -> None:
        """Raises ConfigError unless the policy acts on exactly the calibrated score."""
        if spec is None:
            return
        for name in ScoreSpec.model_fields:
            theirs, ours = getattr(self.score, name), getattr(spec, name)
            if theirs != ours:
                raise ConfigError(
                    f"the calibration is for {name} {theirs}, the policy has {name} {ours}: "
                    "calibrate again"
                )

    def check_dependencies(self, running: Dependencies) -> None:
        """Raises ConfigError naming the first thing that changed since the calibration."""
        if difference := self.depends.difference(running):
            raise ConfigError(f"stale calibration: {difference}; calibrate again")


def max_rank(fraction: float, size: int) -> int:
    """Largest j with j / (size + 1) at most `fraction`, and at most `size`."""
    # The margin keeps 0.3 * 10 = 3 from becoming 2 in binary.
    return min(size, math.floor(fraction * (size + 1) + 1e-9))


def answers_needed(fraction: float) -> int:
    """Fewest answers for which a threshold exists."""
    return math.ceil(1.0 / fraction - 1e-9) - 1


def read_calibration(path: Path) -> Calibration:
    """The file; ConfigError when it is missing or not a calibration of this version."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such calibration; make it with `kvcascade calibrate`")
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(
            f"{path}: {where}: {first['msg']}; make it again with `kvcascade calibrate`"
        ) from None
