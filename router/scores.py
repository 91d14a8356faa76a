"""The scalars that policies act on, and that thresholds are calibrated on: one definition of each.

Every score is in nats, made of margins or of log-probabilities, and a low score is doubt. It
knows no thresholds.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict

from cluster.config import PolicyName, RoutingConfig
from router.signals import SlidingMean

ScoreName = Literal["margin", "quantile", "first_token", "prompt", "deferral"]
"""Policies that act on a score; the score has the name of its policy."""

SCORED: tuple[ScoreName, ...] = get_args(ScoreName)


class ScoreSpec(BaseModel):
    """A score with everything that changes its value; unset means that it plays no part.

    `margin`: the lowest mean of `window_tokens` margins in a row. `quantile`: the lowest that the
    `quantile` of all margins so far has been, from `window_tokens` margins on. `first_token`: the
    first token's margin. `prompt`: the mean log-probability of the prompt's last `window_tokens`
    (`router/prompt.py`). `deferral`: the mean margin of the whole answer. Margins count up to the
    answer's token number `last_token`; tokens without log-probabilities have none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ScoreName
    window_tokens: int | None = None
    quantile: float | None = None
    last_token: int | None = None

    @classmethod
    def of(cls, routing: RoutingConfig, policy: PolicyName) -> ScoreSpec | None:
        """The score that `policy` acts on under this configuration; None when on none."""
        window, last = routing.margin_window_tokens, routing.max_escalation_tokens
        if policy == "margin":
            return cls(name="margin", window_tokens=window, last_token=last)
        if policy == "quantile":
            quantile = routing.margin_quantile
            return cls(name="quantile", window_tokens=window, quantile=quantile, last_token=last)
        if policy == "first_token":
            return cls(name="first_token", last_token=1)
        if policy == "prompt":
            return cls(name="prompt", window_tokens=routing.prompt_window_tokens)
        return cls(name="deferral") if policy == "deferral" else None

    def routing_keys(self) -> dict[str, str | int | float]:
        """The keys of `routing` under which a policy acts on this score."""
        keys: dict[str, str | int | float | None] = {"policy": self.name}
        if self.name == "prompt":
            keys["prompt_window_tokens"] = self.window_tokens
        else:
            keys["margin_window_tokens"] = self.window_tokens
        keys["margin_quantile"] = self.quantile
        if self.name != "first_token":
            keys["max_escalation_tokens"] = self.last_token
        return {key: value for key, value in keys.items() if value is not None}

    @property
    def falls(self) -> bool:
        """Whether the score of a longer answer can only be lower."""
        return self.name not in ("prompt", "deferral")

    def start(self) -> Statistic:
        """A running statistic; the score of an answer is its lowest value, or for `deferral` its
        last one. `prompt` has none, for it does not look at the answer."""
        assert self.name != "prompt"
        if self.name == "deferral":
            return RunningMean()
        if self.name == "quantile":
            assert self.window_tokens is not None and self.quantile is not None
            return RunningQuantile(self.quantile, self.window_tokens)
        return SlidingMean(self.window_tokens or 1)


class Statistic(Protocol):
    """A number about the margins so far."""

    def push(self, value: float) -> None:
        """Add one margin (nats)."""

    @property
    def value(self) -> float | None:
        """The number, or None while there are too few margins."""


class RunningMean:
    """Mean of everything so far."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def push(self, value: float) -> None:
        """Add one value."""
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """The mean, or None before the first value."""
        return math.fsum(self._values) / len(self._values) if self._values else None


class RunningQuantile:
    """Lower `quantile` of everything so far; unknown until `least` values arrived."""

    def __init__(self, quantile: float, least: int) -> None:
        assert 0.0 <= quantile <= 1.0 and least > 0
        self._quantile = quantile
        self._least = least
        self._values: list[float] = []

    def push(self, value: float) -> None:
        """Add one value."""
        insort(self._values, value)

    @property
    def value(self) -> float | None:
        """The largest value with at most `quantile` of the others below it, or None."""
        if len(self._values) < self._least:
            return None
        return self._values[math.floor(self._quantile * (len(self._values) - 1))]
