"""`kvcascade replay`: what other settings would have decided about a log. See `router.replay`.

Like `cluster.cli`, it imports what is heavy only when the command runs.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import RoutingConfig
    from router.calibration import Calibration
    from router.record import AnswerRecord
    from router.replay import Replay


def replay(
    log: Annotated[Path, typer.Argument(help="Decision log with margins.")],
    config: Annotated[
        Path | None, typer.Option(help="Serve config whose `routing` decides. Unset: defaults.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="`routing.policy` instead.")] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Threshold of the policy instead (nats).")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Calibration file instead; without --config its score is the policy."),
    ] = None,
    target_fraction: Annotated[
        float | None,
        typer.Option(help="`routing.target_fraction` instead.", min=0.0001, max=1),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Decide the answers of a log again under other settings, and count what changes.

    Answers that the large model took over are known only up to there: those that would now stay
    longer are counted as uncertain.
    """
    from cluster.errors import ConfigError
    from router.calibration import read_calibration
    from router.record import read_log
    from router.replay import in_order
    from router.replay import replay as again

    if threshold is not None and calibration is not None:
        raise ConfigError("--threshold and --calibration both set a threshold: give one")
    routing = _routing(config, policy, threshold, calibration, target_fraction)
    file = None if routing.calibration is None else Path(routing.calibration).expanduser()
    made = None if file is None else read_calibration(file)
    records = in_order(read_log(log))
    result = again(records, routing, made)
    summary = _summary(records, result, routing, made)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _print(summary)


def _routing(
    config: Path | None,
    policy: str | None,
    threshold: float | None,
    calibration: Path | None,
    target_fraction: float | None,
) -> RoutingConfig:
    """The settings to decide under: those of the file, with what the options say instead."""
    from pydantic import ValidationError

    from cluster.config import RoutingConfig, load_serve_config
    from cluster.errors import ConfigError
    from router.calibration import read_calibration

    keys: dict[str, Any] = {}
    if config is not None:
        keys = load_serve_config(config)[1].routing.model_dump(exclude_unset=True)
    if calibration is not None:
        keys.pop("margin_threshold", None)
        keys["calibration"] = str(calibration)
        if config is None:
            keys |= read_calibration(calibration).score.routing_keys()
    if policy is not None:
        keys["policy"] = policy
    if threshold is not None:
        for key in ("calibration", "target_fraction", "drift_step"):
            keys.pop(key, None)
        prompt = keys.get("policy") == "prompt"
        keys["prompt_threshold" if prompt else "margin_threshold"] = threshold
    if target_fraction is not None:
        keys["target_fraction"] = target_fraction
    try:
        return RoutingConfig.model_validate(keys)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("routing", *map(str, first["loc"])))
        raise ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def _summary(
    records: Sequence[AnswerRecord],
    result: Replay,
    routing: RoutingConfig,
    made: Calibration | None,
) -> dict[str, Any]:
    pairs = list(zip(records, result.outcomes, strict=True))
    before = sum(record.escalated for record in records)
    after = sum(outcome.escalated for outcome in result.outcomes)
    return {
        "answers": len(records),
        "policy": routing.policy,
        "calibration_id": None if made is None else made.calibration_id,
        "escalated_before": before,
        "escalated_after": after,
        "fraction_before": before / len(records),
        "fraction_after": result.fraction,
        "changed_to_large": sum(b.escalated and not a.escalated for a, b in pairs),
        "changed_to_small": sum(a.escalated and not b.escalated for a, b in pairs),
        "uncertain": result.uncertain,
        "reasons_before": dict(Counter(record.decision.reason for record in records)),
        "reasons_after": dict(Counter(one.decision.reason for one in result.outcomes)),
    }


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{summary['answers']} answers, decided again by {summary['policy']}")
    for name in ("", "logged", "again"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("escalated", str(summary["escalated_before"]), str(summary["escalated_after"]))
    before, after = summary["fraction_before"], summary["fraction_after"]
    table.add_row("fraction", f"{before:.3f}", f"{after:.3f}")
    old, new = summary["reasons_before"], summary["reasons_after"]
    for reason in sorted({*old, *new}):
        table.add_row(f"  {reason}", str(old.get(reason, 0)), str(new.get(reason, 0)))
    console = Console()
    console.print(table)
    changed = summary["changed_to_large"] + summary["changed_to_small"]
    console.print(
        f"decisions that change: {changed} (to large: {summary['changed_to_large']}, to small: "
        f"{summary['changed_to_small']}); uncertain: {summary['uncertain']}"
    )
