"""The configuration's `routing` part: when the small model's answer goes to the large one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from cluster.config_base import Fraction, Node

PolicyName = Literal[
    "margin", "quantile", "first_token", "prompt", "deferral", "random", "small", "large"
]
"""What can decide who answers; `router/policies.py` makes them."""

OnEscalate = Literal["continue", "restart"]
"""Whether an escalation goes on after the small model's tokens or drops them all."""

DEFAULT_MARGIN_THRESHOLD = 0.35
"""Nats. Not a field's default, so that a threshold that somebody set can be told from none."""


class RoutingConfig(Node):
    """When the small model's answer is handed to the large one."""

    policy: PolicyName = Field(
        "margin",
        description="What decides. `margin`: doubt in a window of tokens; `quantile`: in the worst "
        "tokens so far; `first_token`: in the first token; `prompt`: in the prompt; `deferral`: in "
        "the finished answer; `random`: chance; the others are fixed.",
    )
    margin_window_tokens: PositiveInt = Field(
        8, description="Tokens over which the top-1 minus top-2 log-probability is averaged."
    )
    margin_quantile: float = Field(
        0.1, ge=0, le=1, description="Which low quantile of the margins `quantile` looks at."
    )
    margin_threshold: NonNegativeFloat | None = Field(
        None,
        description="Escalate when the policy's margin falls below this (nats). Unset: 0.35, or "
        "what `calibration` says.",
    )
    prompt_window_tokens: int = Field(
        64, gt=0, le=256, description="Last prompt tokens whose surprise `prompt` averages."
    )
    prompt_threshold: float = Field(
        -3.0,
        le=0,
        description="Escalate under `prompt` when their mean log-probability falls below this "
        "(nats). `calibration` replaces it.",
    )
    calibration: str | None = Field(
        None, description="File of `kvcascade calibrate` that sets the threshold instead."
    )
    target_fraction: Fraction | None = Field(
        None,
        description="Part of the answers to escalate, with `calibration` or `random`. Unset: what "
        "the file was made for.",
    )
    budget_escalations: PositiveInt | None = Field(
        None, description="Most escalations of one router in `budget_window_s`. Unset: no limit."
    )
    budget_window_s: PositiveFloat = Field(
        60.0, description="Length of the sliding window of the budget."
    )
    budget_large_tokens: PositiveInt | None = Field(
        None,
        description="Most tokens that escalations may let the large model write in "
        "`budget_window_s`. Unset: no limit.",
    )
    sticky_cost: PositiveFloat | None = Field(
        None,
        description="Nats by which the threshold rises per 1,000 prompt tokens that the small "
        "model still has to read and the large one has not, and falls the other way round. "
        "Unset: models change freely.",
    )
    drift_step: PositiveFloat | None = Field(
        None,
        description="Nats by which one answer moves the threshold towards `target_fraction`. "
        "Unset: it stays where `calibration` put it.",
    )
    shadow_fraction: Fraction | None = Field(
        None,
        description="Part of the small model's answers that the large model reads afterwards, to "
        "log whether it agrees. Unset: none.",
    )
    shadow_min_agreement: Fraction = Field(
        0.8, description="An answer fails when the large model agrees on fewer of its tokens."
    )
    hold_back_tokens: int = Field(
        4, ge=0, description="Tokens kept back so that doubtful ones are never shown."
    )
    on_escalate: OnEscalate = Field(
        "continue",
        description="`continue`: the large model goes on after what was sent. `restart`: one model "
        "writes the whole answer, so nothing changes once anything was sent.",
    )
    max_escalation_tokens: PositiveInt = Field(
        256, description="After so many tokens of its own the small model keeps the answer."
    )
    log_file: str | None = Field(
        None, description="Append each answer's decisions to this JSONL file. Unset: no log."
    )
    log_margins: bool = Field(
        False, description="Log every margin too, as calibration and replay need."
    )

    def threshold_of(self, policy: PolicyName) -> float:
        """The threshold of a policy where no calibration sets one (nats)."""
        if policy == "prompt":
            return self.prompt_threshold
        return DEFAULT_MARGIN_THRESHOLD if self.margin_threshold is None else self.margin_threshold

    @model_validator(mode="after")
    def _check(self) -> RoutingConfig:
        scored = self.policy not in ("random", "small", "large")
        if self.calibration is not None and self.margin_threshold is not None:
            raise ValueError("margin_threshold and calibration both set a threshold: drop one")
        if self.calibration is not None and self.policy == "random":
            raise ValueError("calibration: `random` needs none; drop it")
        if self.target_fraction is not None and self.policy in ("small", "large"):
            raise ValueError(f"target_fraction: `{self.policy}` is a fixed choice; drop it")
        if self.target_fraction is not None and scored and self.calibration is None:
            raise ValueError(
                "target_fraction needs `calibration`: a file made with `kvcascade calibrate`"
            )
        if self.target_fraction is None and self.policy == "random":
            raise ValueError("policy random needs `target_fraction`, as 0.3")
        if self.policy == "deferral" and self.hold_back_tokens == 0:
            raise ValueError(
                "policy deferral can only replace tokens that were held back: raise "
                "hold_back_tokens, to the longest answer if all of it shall be replaceable"
            )
        for key in ("budget_escalations", "budget_large_tokens"):
            if getattr(self, key) is not None and self.policy == "small":
                raise ValueError(f"{key}: `small` never escalates; drop it")
        if self.sticky_cost is not None and not scored:
            raise ValueError(f"sticky_cost: `{self.policy}` has no threshold to move; drop it")
        if self.drift_step is not None and (not scored or self.calibration is None):
            raise ValueError("drift_step needs `calibration`, which says where to begin")
        if self.shadow_fraction is not None and self.log_file is None:
            raise ValueError("shadow_fraction needs `log_file`, where its verdicts go")
        if self.log_margins and self.log_file is None:
            raise ValueError("log_margins needs `log_file`")
        return self
