"""What routing follows now. It may change while answers are written: each keeps what it began with.

Policies and their state are `router/policies.py`'s; here they are made from the configuration, and
made anew from another one (`user_config` of the router's deployment).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config import CascadeConfig, RoutingConfig, parse_router_config
from cluster.errors import ConfigError
from deployments.decision_log import DecisionLog
from router.calibration import read_calibration
from router.job import Site
from router.policies import RoutingState
from router.ports import EnginePort
from router.shadow import Shadow, Verdict

log = logging.getLogger("kvcascade.routing")


@dataclass(frozen=True)
class Routing:
    """One configuration of routing, and what the answers under it share."""

    config: RoutingConfig
    state: RoutingState
    log: DecisionLog | None = None
    shadow: Shadow | None = None

    @property
    def target_fraction(self) -> float | None:
        """Which part of the answers is to be escalated, if that is known."""
        return self.state.target_fraction(self.config)

    def at(self, site: Site) -> Site:
        """The site of an answer that is written under this."""
        return replace(
            site,
            hold_back_tokens=self.config.hold_back_tokens,
            on_escalate=self.config.on_escalate,
            log=self.log,
            shadow=self.shadow,
        )


class LiveRouting:
    """Holds the routing of one router replica. `now` is that of answers that begin.

    `large` reads the answers that are judged; `changed` hears of another routing. Raises
    ConfigError for a stale calibration, OSError for a log that cannot be written.
    """

    def __init__(
        self,
        cascade: CascadeConfig,
        large: EnginePort,
        *,
        count_shadow: Callable[[Verdict], None] = lambda verdict: None,
        count_dropped: Callable[[], None] = lambda: None,
        changed: Callable[[Routing], None] = lambda routing: None,
    ) -> None:
        self._cascade = cascade
        self._large = large
        self._count_shadow = count_shadow
        self._count_dropped = count_dropped
        self._changed = changed
        # Answers that began before still write to the one before.
        self._logs: dict[tuple[str, bool], DecisionLog] = {}
        self.now = self._made(cascade.routing)

    def apply(self, user_config: Any) -> None:
        """Follow the `routing` of the deployment's `user_config`, or without one the `args`'.

        What is the same already goes on as it is; else budgets and a drifting threshold begin
        anew. Raises what the constructor raises, and then nothing has changed.
        """
        config = parse_router_config(user_config).routing or self._cascade.routing
        if config == self.now.config:
            return
        self.now = self._made(config)
        self._changed(self.now)
        log.info("routing follows another configuration: policy %s", config.policy)

    def offer(self, user_config: Any) -> str | None:
        """As `apply`, of a router that serves: returns why it cannot be followed and logs it, for
        to raise would end the replica (Serve). None when it is followed."""
        try:
            self.apply(user_config)
        except (ConfigError, OSError) as error:
            log.error("routing stays as it was: %s", error)
            return " ".join(str(error).split())
        return None

    def close(self) -> None:
        """Write out and close the decision logs."""
        for decisions in self._logs.values():
            decisions.close()

    def _made(self, config: RoutingConfig) -> Routing:
        """Only a calibration or a log needs the files of both models on the router's node."""
        shadow = None
        if config.shadow_fraction is not None:
            shadow = Shadow(
                self._large,
                fraction=config.shadow_fraction,
                min_agreement=config.shadow_min_agreement,
                count=self._count_shadow,
            )
        if config.calibration is None and config.log_file is None:
            return Routing(config, RoutingState.of(config, None), shadow=shadow)
        from cluster.dependencies import running_dependencies

        depends = running_dependencies(self._cascade)
        calibration = None
        if config.calibration is not None:
            calibration = read_calibration(Path(config.calibration).expanduser())
            calibration.check_dependencies(depends)
        state = RoutingState.of(config, calibration)
        decisions = None
        if config.log_file is not None:
            decisions = self._logs.get((config.log_file, config.log_margins))
            if decisions is None:
                path = Path(config.log_file).expanduser()
                decisions = DecisionLog(
                    path, depends, margins=config.log_margins, on_drop=self._count_dropped
                )
                self._logs[config.log_file, config.log_margins] = decisions
        return Routing(config, state, decisions, shadow)
