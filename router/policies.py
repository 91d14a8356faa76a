"""Which policy a request gets: its own options first, then the configuration.

It holds what requests share (a calibration, a budget, a drifting threshold) and knows no engines.
Wrappers nest as sticky(budget(drift(policy))).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import RoutingConfig
from cluster.errors import ConfigError, RequestError
from router.api import CascadeOptions
from router.budget import Budget, BudgetPolicy
from router.calibration import Calibration
from router.chance import RandomPolicy
from router.drift import Drift, DriftPolicy
from router.policy import FixedPolicy, Policy, ScheduledPolicy
from router.prompt import PromptPolicy
from router.scores import SCORED, ScoreSpec
from router.sticky import StickyPolicy
from router.threshold import DeferralPolicy, ScorePolicy, Threshold


@dataclass(frozen=True)
class RoutingState:
    """What all requests of one router share."""

    calibration: Calibration | None = None
    budget: Budget | None = None
    drift: Drift | None = None

    @classmethod
    def of(
        cls,
        routing: RoutingConfig,
        calibration: Calibration | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> RoutingState:
        """The state of a router that begins; ConfigError when the calibration does not fit."""
        spec = ScoreSpec.of(routing, routing.policy)
        drift: Drift | None = None
        if calibration is not None:
            calibration.check_score(spec)
            start = calibration.threshold(routing.target_fraction)
            if routing.drift_step is not None:
                drift = Drift(
                    start,
                    target_fraction=routing.target_fraction or calibration.target_fraction,
                    low=calibration.scores[0],
                    high=calibration.scores[-1],
                    step=routing.drift_step,
                )
        budget: Budget | None = None
        if routing.budget_escalations is not None or routing.budget_large_tokens is not None:
            budget = Budget(
                routing.budget_escalations,
                routing.budget_window_s,
                clock,
                large_tokens=routing.budget_large_tokens,
            )
        return cls(calibration, budget, drift)

    def target_fraction(self, routing: RoutingConfig) -> float | None:
        """Which part of the answers is to be escalated; None when a plain threshold decides."""
        if routing.target_fraction is not None or self.calibration is None:
            return routing.target_fraction
        return self.calibration.target_fraction


NO_STATE = RoutingState()
"""No calibration, no budget and no drift."""


def make_policy(
    routing: RoutingConfig, options: CascadeOptions, state: RoutingState = NO_STATE
) -> Policy:
    """A fresh policy for one answer; the request's own options win over the configuration.

    Raises RequestError when the request asks for what the configuration cannot do.
    """
    if options.escalate_after_tokens is not None:
        return ScheduledPolicy(options.escalate_after_tokens)
    if options.force is not None:
        return FixedPolicy(options.force, "forced")
    policy = _chosen(routing, options, state)
    name = options.policy or routing.policy
    if state.budget is not None and name != "small":
        policy = BudgetPolicy(policy, state.budget)
    if routing.sticky_cost is not None and name in SCORED:
        policy = StickyPolicy(policy, routing.sticky_cost)
    return policy


def _chosen(routing: RoutingConfig, options: CascadeOptions, state: RoutingState) -> Policy:
    name = options.policy or routing.policy
    target = options.target_fraction or routing.target_fraction
    if name in ("small", "large"):
        if options.target_fraction is not None:
            raise _refused("target_fraction", f"policy `{name}` is a fixed choice")
        return FixedPolicy("large" if name == "large" else "small", "policy")
    if name == "random":
        if target is None:
            raise _refused("target_fraction", "policy `random` needs one, as 0.3")
        return RandomPolicy(target)
    if name == "deferral" and routing.hold_back_tokens == 0:
        raise _refused("policy", "`deferral` needs a deployment that holds tokens back")
    spec = ScoreSpec.of(routing, name)
    assert spec is not None
    if state.drift is not None and name == routing.policy and options.target_fraction is None:
        return DriftPolicy(_scored(spec, state.drift.threshold), state.drift)
    return _scored(spec, _threshold(routing, options, state, spec))


def _scored(spec: ScoreSpec, threshold: Threshold) -> Policy:
    if spec.name == "prompt":
        assert spec.window_tokens is not None
        return PromptPolicy(spec.window_tokens, threshold)
    if spec.name == "deferral":
        return DeferralPolicy(spec, threshold)
    return ScorePolicy(spec, threshold)


def _threshold(
    routing: RoutingConfig, options: CascadeOptions, state: RoutingState, spec: ScoreSpec
) -> Threshold:
    if state.calibration is None:
        if options.target_fraction is not None:
            raise _refused("target_fraction", "this deployment has no `routing.calibration`")
        return Threshold(routing.threshold_of(spec.name))
    try:
        state.calibration.check_score(spec)
        return state.calibration.threshold(options.target_fraction or routing.target_fraction)
    except ConfigError as error:
        param = "policy" if options.target_fraction is None else "target_fraction"
        raise _refused(param, str(error)) from None


def _refused(param: str, message: str) -> RequestError:
    param = f"cascade.{param}"
    return RequestError(f"{param}: {message}", code="invalid_value", param=param)
