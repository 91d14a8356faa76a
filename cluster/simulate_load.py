"""Draws the requests of a simulated load. The same seed gives the same requests at every rate.

Each quantity has a random stream of its own, so request i keeps its lengths and its fate whatever
the rate or the variant, and only the time between arrivals is stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, PositiveInt, ValidationError

from cluster.errors import ConfigError
from cluster.simulate_spec import Lengths, Load

_P95 = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `small_tokens` of the answer are the small model's, 0 < them <= the answer.

    A request whose `escalates` is false has all of them; another one goes on after these.
    """

    number: int
    arrives_s: float
    prompt_tokens: int
    answer_tokens: int
    small_tokens: int
    escalates: bool

    @property
    def large_tokens(self) -> int:
        return self.answer_tokens - self.small_tokens


class _Line(BaseModel):
    prompt_tokens: PositiveInt
    answer_tokens: PositiveInt


def requests(load: Load, rate: float) -> list[Request]:
    """All requests that arrive within `load.seconds` at `rate` requests per second, in order.

    Raises ConfigError for a file of lengths that cannot be read.
    """
    gaps, prompts, answers, fates, points = (
        np.random.default_rng(seed) for seed in np.random.SeedSequence(load.seed).spawn(5)
    )
    arrives_s = _arrivals(gaps, load, rate)
    count = len(arrives_s)
    if load.lengths_file is None:
        prompt_tokens = draw_lengths(load.prompt, prompts, count)
        answer_tokens = draw_lengths(load.answer, answers, count)
    else:
        lines = read_lengths(load.lengths_file)
        chosen = prompts.integers(len(lines), size=count)
        prompt_tokens, answer_tokens = lines[chosen, 0], lines[chosen, 1]
    prompt_tokens = np.minimum(prompt_tokens, load.max_tokens - 2)
    # An escalated answer has a token from either model.
    answer_tokens = np.minimum(answer_tokens, load.max_tokens - prompt_tokens)
    escalates = (fates.random(count) < load.escalation) & (answer_tokens > 1)
    points_tokens = draw_lengths(load.escalate_after, points, count)
    small_tokens = np.where(escalates, np.minimum(points_tokens, answer_tokens - 1), answer_tokens)
    columns = (arrives_s, prompt_tokens, answer_tokens, small_tokens, escalates)
    return [
        Request(number, *row)
        for number, row in enumerate(zip(*(one.tolist() for one in columns), strict=True))
    ]


def draw_lengths(lengths: Lengths, stream: np.random.Generator, count: int) -> NDArray[np.int64]:
    """`count` whole numbers of tokens, at least 1, from a log-normal distribution."""
    sigma = math.log(lengths.p95_tokens / lengths.median_tokens) / _P95
    drawn = lengths.median_tokens * np.exp(sigma * stream.standard_normal(count))
    tokens: NDArray[np.int64] = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return tokens


def read_lengths(path: Path) -> NDArray[np.int64]:
    """Prompt and answer lengths, one pair a row, of a JSONL file with `prompt_tokens` and
    `answer_tokens` in each line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a JSONL file of lengths") from None
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = _Line.model_validate_json(line)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise ConfigError(
                f'{path}, line {number}: {said}; write {{"prompt_tokens": 900, '
                '"answer_tokens": 200}'
            ) from None
        rows.append((one.prompt_tokens, one.answer_tokens))
    if not rows:
        raise ConfigError(f"{path} has no lengths; write one JSON object a line")
    return np.array(rows, dtype=np.int64)


def _arrivals(stream: np.random.Generator, load: Load, rate: float) -> NDArray[np.float64]:
    """Times of arrival in seconds, from gaps of mean 1/rate."""
    parts: list[NDArray[np.float64]] = []
    last_s = 0.0
    block = 1_024
    while last_s < load.seconds:
        gaps_s = stream.gamma(load.burstiness, 1 / load.burstiness, block) / rate
        times_s = last_s + np.cumsum(gaps_s)
        last_s = float(times_s[-1])
        parts.append(times_s)
    every_s = np.concatenate(parts)
    return every_s[every_s < load.seconds]
