"""What the endpoint adds to OpenAI's API: `cascade` in the request and in the response.

These models are the published format. They know nothing of engines or policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.config import Fraction, OnEscalate, PolicyName
from cluster.errors import RequestError


class CascadeOptions(BaseModel):
    """`extra_body={"cascade": {...}}`: how this one request wants to be routed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    force: Literal["small", "large"] | None = Field(
        None, description="`small` never escalates; `large` answers on the large model."
    )
    escalate_after_tokens: int | None = Field(
        None,
        ge=0,
        description="The small model writes so many tokens, then the large one goes on. "
        "0: the small model only reads the prompt.",
    )
    recompute: bool | None = Field(
        None,
        description="true: escalate by reading the conversation again. false: with a handoff even "
        "where reading is expected to be quicker. Unset: the quicker of the two.",
    )
    policy: PolicyName | None = Field(
        None, description="What decides for this request instead of the configured policy."
    )
    target_fraction: Fraction | None = Field(
        None, description="Part of such requests to escalate; needs a calibration or `random`."
    )
    on_escalate: OnEscalate | None = Field(
        None,
        description="`continue`: the large model goes on after what was sent. `restart`: it writes "
        "the whole answer, or the small model does once anything was sent.",
    )
    session_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Turns of one conversation share KV. Unset: the conversation's opening.",
    )
    explain: bool = Field(
        False, description="Streamed events say who wrote them, and the policy's scores."
    )

    @model_validator(mode="after")
    def _check(self) -> CascadeOptions:
        if self.force == "small" and self.escalate_after_tokens is not None:
            raise ValueError("`force: small` never escalates: drop `escalate_after_tokens`")
        settled = self.force is not None or self.escalate_after_tokens is not None
        if settled and (self.policy is not None or self.target_fraction is not None):
            raise ValueError(
                "`force` and `escalate_after_tokens` settle the request: drop `policy` and "
                "`target_fraction`"
            )
        return self


def parse_options(value: Any) -> CascadeOptions:
    """The `cascade` object of a request body; None is no wish at all.

    Raises RequestError (400, `invalid_value`) that names the offending field.
    """
    if value is None:
        return CascadeOptions()
    try:
        return CascadeOptions.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(["cascade", *(str(part) for part in first["loc"])])
        if first["type"] == "extra_forbidden":
            allowed = ", ".join(CascadeOptions.model_fields)
            message = f"{param}: unknown; allowed are {allowed}"
        else:
            message = f"{param}: {first['msg'].removeprefix('Value error, ')}"
        raise RequestError(message, code="invalid_value", param=param) from None


class Segment(BaseModel):
    """A run of tokens that one model wrote."""

    model: str
    tokens: int


class DecisionInfo(BaseModel):
    """The decision that settled who answers."""

    action: Literal["stay", "escalate", "large"]
    reason: str
    score: float | None = None
    threshold: float | None = None
    calibration_id: str | None = None


class Prediction(BaseModel):
    """What the router expected both ways to take, from its own measurements; None: too few."""

    mapped: float | None = None
    recompute: float | None = None


class HandoffInfo(BaseModel):
    """How the large model got the conversation.

    `handoff_ms` runs on the router's clock from the decision to the large model's first token.
    `stages_ms` are durations that the processes themselves measured; they overlap. `covered_tokens`
    came as mapped KV, `reread_tokens` were computed by the large model before its first token,
    and the rest, `held_tokens`, it had from earlier turns.
    """

    path: Literal["mapped", "recompute"]
    reason: str | None = None
    handoff_ms: float | None = None
    stages_ms: Mapping[str, float] = Field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    covered_tokens: int = 0
    held_tokens: int = 0
    reread_tokens: int | None = None
    temperature: Literal["cold", "warm"] | None = None
    predicted_ms: Prediction = Field(default_factory=Prediction)


class SessionInfo(BaseModel):
    """The conversation that an answer belongs to.

    `turn` counts answers from 1. `drift_handoffs` are the mapped handoffs that the large model's
    KV of this conversation had seen before this answer, since it last read everything itself.
    """

    id: str
    turn: int
    drift_handoffs: int = 0


class CascadeInfo(BaseModel):
    """The `cascade` object of a response: who wrote what, and why.

    `handoff` is an escalation's; `borrowed` is one at the start of the answer, of what only the
    other model had of earlier turns.
    """

    served_by: list[Segment]
    decision: DecisionInfo | None = None
    handoff: HandoffInfo | None = None
    borrowed: HandoffInfo | None = None
    session: SessionInfo | None = None


class CascadeProgress(BaseModel):
    """The `cascade` object of a streamed event, for `explain`.

    `scores` are new since the last event: (number of the small model's token from 1, the policy's
    score in nats), also of tokens that were dropped unseen.
    """

    served_by: list[Segment]
    scores: list[tuple[int, float | None]] = Field(default_factory=list)
    threshold: float | None = None
