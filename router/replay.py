"""Runs logged answers through another policy or threshold, as if they came again.

Each record's margins are fed to a fresh policy in the order of time, and a budget's clock is the
log's. A replay ends where a log was cut: what the small model would have written after the large
one took over is not known. Where an escalation may not cut (tool calls) it knows from those that
were asked for there, so under other settings it may allow one that would have had to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.config import RoutingConfig
from cluster.errors import ConfigError
from router.api import CascadeOptions
from router.calibration import Calibration
from router.policies import RoutingState, make_policy
from router.policy import Decision, Policy
from router.ports import TokenStep
from router.record import AnswerRecord


@dataclass(frozen=True)
class Outcome:
    """One answer again. `certain` is false when it stayed, but only as far as the log goes."""

    decision: Decision
    certain: bool

    @property
    def escalated(self) -> bool:
        """Whether the large model takes part."""
        return self.decision.action != "stay"


@dataclass(frozen=True)
class Replay:
    """All answers again, in the order of time."""

    outcomes: tuple[Outcome, ...]

    @property
    def fraction(self) -> float:
        """Part of the answers that escalate."""
        return sum(one.escalated for one in self.outcomes) / len(self.outcomes)

    @property
    def uncertain(self) -> int:
        """Answers of which the log ends too early to be sure that they stay."""
        return sum(not one.certain for one in self.outcomes)


def in_order(records: Sequence[AnswerRecord]) -> list[AnswerRecord]:
    """Records in the order of time, as a replay's outcomes are."""
    return sorted(records, key=lambda one: one.unix_s)


def replay(
    records: Sequence[AnswerRecord],
    routing: RoutingConfig,
    calibration: Calibration | None = None,
    options: CascadeOptions | None = None,
) -> Replay:
    """What `routing` would have decided; ConfigError when the log has no margins.

    Request options are not in the log: `options` hold for all.
    """
    now_s = 0.0
    state = RoutingState.of(routing, calibration, clock=lambda: now_s)
    outcomes = []
    for record in in_order(records):
        now_s = record.unix_s
        policy = make_policy(routing, options or CascadeOptions(), state)
        outcomes.append(_again(record, policy))
        policy.on_end(record.large_tokens)
    return Replay(tuple(outcomes))


def _again(record: AnswerRecord, policy: Policy) -> Outcome:
    if record.margins is None:
        raise ConfigError("the log has no margins: write it with `routing.log_margins: true`")
    decision = policy.on_request(record.view)
    if decision.action != "stay":
        return Outcome(decision, True)
    if policy.reads_prompt:
        if record.prompt_logprobs is None:
            return Outcome(decision, False)
        decision = policy.on_prompt(record.prompt_logprobs)
        if decision.action != "stay" and 0 not in record.forbidden:
            return Outcome(decision, True)
    for token, margin in enumerate(record.margins, 1):
        decision = policy.on_token(_step(margin))
        if decision.action != "stay" and token not in record.forbidden:
            return Outcome(decision, True)
    if not record.complete:
        return Outcome(decision, False)
    decision = policy.on_complete("stop")
    if decision.action != "stay" and len(record.margins) in record.forbidden:
        decision = replace(decision, action="stay", reason="ended_early")
    return Outcome(decision, True)


def _step(margin: float | None) -> TokenStep:
    if margin is None:
        return TokenStep(token_id=0)
    return TokenStep(token_id=0, logprobs=((0, 0.0, 1), (1, -margin, 2)))
