"""The checks of `kvcascade validate` on routing: does the calibration file fit the configuration?

It asks what a router asks when it starts, without starting one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.config import CascadeConfig
from cluster.errors import ConfigError, UserError
from cluster.validate import Finding

KEY = "routing.calibration"


def check_routing(config: CascadeConfig) -> Iterator[Finding]:
    """Findings about the calibration file; none when the configuration names none."""
    from cluster.dependencies import running_dependencies
    from router.calibration import read_calibration
    from router.policies import RoutingState

    routing = config.routing
    if routing.calibration is None:
        return
    try:
        made = read_calibration(Path(routing.calibration).expanduser())
        state = RoutingState.of(routing, made)
    except ConfigError as error:
        yield Finding("problem", KEY, str(error))
        return
    fraction = state.target_fraction(routing)
    assert fraction is not None
    low, high = made.interval(fraction)
    yield Finding(
        "ok",
        KEY,
        f"{made.calibration_id} sets {routing.policy}'s threshold to "
        f"{made.threshold(fraction).value:.4f} nats for {fraction:g} of the answers (90 %: "
        f"{low:.3f} to {high:.3f})",
    )
    try:
        depends = running_dependencies(config)
    except UserError as error:
        yield Finding("unchecked", KEY, f"whether it was made with these models: {error}")
        return
    try:
        made.check_dependencies(depends)
    except ConfigError as error:
        yield Finding("problem", KEY, str(error))
        return
    yield Finding("ok", KEY, "made with these models, this mapper and this vLLM")
