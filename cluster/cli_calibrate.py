"""`kvcascade calibrate`: its options and its table. The statistics are in `router.calibration`,
the questions to an endpoint in `cluster.prompt_run`.

Like `cluster.cli`, it imports what is heavy only when the command runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.config import CascadeConfig
    from router.calibration import Calibration
    from router.record import AnswerRecord
    from router.samples import Sample

_TARGETS = (0.1, 0.2, 0.3, 0.5)
_QUICKSTART_CONFIG = Path(__file__).with_name("quickstart.yaml")


def calibrate(
    out: Annotated[Path, typer.Option(help="The calibration file to write.")],
    log: Annotated[
        Path | None,
        typer.Option(help="Decision log with margins, best written under `policy: small`."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Instead: JSONL of {"prompt": "..."} or {"messages": [...]}, which the small '
            "model of a running endpoint answers now."
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(help="The endpoint that answers --prompts.")
    ] = "http://127.0.0.1:8000",
    config: Annotated[
        Path,
        typer.Option(
            help="The endpoint's Serve config, for --prompts; its models have to be here too.",
            show_default="cluster/quickstart.yaml",
        ),
    ] = _QUICKSTART_CONFIG,
    concurrency: Annotated[
        int, typer.Option(help="Prompts that are answered at a time.", min=1)
    ] = 8,
    max_tokens: Annotated[
        int, typer.Option(help="Longest answer to one of --prompts.", min=2)
    ] = 256,
    api_key: Annotated[
        str | None,
        typer.Option(help="The endpoint's API key, if it wants one.", envvar="KVCASCADE_API_KEY"),
    ] = None,
    target_fraction: Annotated[
        float | None,
        typer.Option(help="Part of the answers to escalate.", min=0.0001, max=1),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(help="Instead: highest expected cost of an answer, in the prices' unit."),
    ] = None,
    max_failure_rate: Annotated[
        float | None,
        typer.Option(
            help="Instead: highest part of the small model's answers that may be wrong; needs "
            "`failed` in the log's lines.",
            min=0.0001,
            max=0.9999,
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="How sure --max-failure-rate is to hold.", min=0.5, max=0.9999)
    ] = 0.95,
    small_price: Annotated[
        float, typer.Option(help="Cost of a token of the small model.", min=0)
    ] = 0.25,
    large_price: Annotated[
        float, typer.Option(help="Cost of a token of the large model.", min=0)
    ] = 1.0,
    handoff_price: Annotated[float, typer.Option(help="Cost of one handoff.", min=0)] = 0.0,
    longest_tokens: Annotated[
        int, typer.Option(help="No answer is longer; bounds the cost.", min=1)
    ] = 1_024,
    hold_back_tokens: Annotated[
        int | None,
        typer.Option(
            help="`routing.hold_back_tokens`, when not the default: the large model writes them "
            "again.",
            min=0,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Policy to calibrate: margin, quantile, first_token, prompt or deferral."
        ),
    ] = "margin",
    window_tokens: Annotated[
        int | None,
        typer.Option(
            help="`routing.margin_window_tokens` or `prompt_window_tokens`, when not the default."
        ),
    ] = None,
    quantile: Annotated[
        float | None, typer.Option(help="`routing.margin_quantile`, when not the default.")
    ] = None,
    last_token: Annotated[
        int | None, typer.Option(help="`routing.max_escalation_tokens`, when not the default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Turn logged answers into the threshold that escalates a stated part of the traffic.

    The answers come from a log, or from an endpoint that gets your prompts now. Set
    `routing.calibration` to the file. It is refused for other models, another mapper, vLLM version,
    template or score than it was made with.
    """
    from cluster.config import RoutingConfig, load_serve_config
    from cluster.errors import ConfigError
    from router.calibration import Promise
    from router.promises import Prices, fraction_for_cost, fraction_for_failures
    from router.record import read_log
    from router.samples import calibrate as make
    from router.samples import collect, dependencies_of

    asked = [value for value in (target_fraction, max_cost, max_failure_rate) if value is not None]
    if len(asked) != 1:
        raise ConfigError("give one of --target-fraction, --max-cost and --max-failure-rate")
    if (log is None) == (prompts is None):
        raise ConfigError("give one of --log and --prompts")
    if log is not None:
        spec = _spec(policy, {}, window_tokens, quantile, last_token)
        records = read_log(log)
    else:
        assert prompts is not None
        cascade = load_serve_config(config)[1]
        spec = _spec(policy, _score_keys(cascade), window_tokens, quantile, last_token)
        records = _answers(prompts, cascade, url, policy, max_tokens, concurrency, api_key)
    samples = collect(records, spec)
    promise: Promise | None = None
    if max_cost is not None:
        if hold_back_tokens is None:
            hold_back_tokens = RoutingConfig().hold_back_tokens
        prices = Prices(small_price, large_price, handoff_price, longest_tokens, hold_back_tokens)
        fraction = fraction_for_cost(samples, prices, max_cost)
        promise = Promise(kind="cost", limit=max_cost)
    elif max_failure_rate is not None:
        fraction = fraction_for_failures(samples, max_failure_rate, confidence)
        promise = Promise(kind="failure_rate", limit=max_failure_rate, confidence=confidence)
    else:
        assert target_fraction is not None
        fraction = target_fraction
    made = make(samples, spec, fraction, dependencies_of(records), promise=promise)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(made.model_dump_json(indent=2) + "\n")
    rows = [_row(made, samples, one) for one in sorted({*_TARGETS, fraction})]
    if as_json:
        typer.echo(json.dumps(_summary(made, out) | {"targets": rows}, indent=2))
    else:
        _print(made, out, rows)


def _answers(
    prompts: Path,
    cascade: CascadeConfig,
    url: str,
    policy: str,
    max_tokens: int,
    concurrency: int,
    api_key: str | None,
) -> list[AnswerRecord]:
    """What the endpoint's small model answers now; says on stderr what it could not."""
    from rich.console import Console
    from rich.progress import Progress

    from cluster.dependencies import running_dependencies
    from cluster.prompt_run import read_prompts, run_prompts

    asked = read_prompts(prompts)
    console = Console(stderr=True)
    with console.status("reading the models' fingerprints"):
        depends = running_dependencies(cascade)
    with Progress(console=console) as progress:
        task = progress.add_task("answering", total=len(asked))
        run = run_prompts(
            asked,
            cascade,
            depends,
            url=url,
            reads_prompt=policy == "prompt",
            max_tokens=max_tokens,
            concurrency=concurrency,
            api_key=api_key,
            on_answer=lambda: progress.advance(task),
        )
    if run.failures:
        console.print(f"{len(run.failures)} prompts have no answer; the first: {run.failures[0]}")
    return list(run.records)


def _score_keys(cascade: CascadeConfig) -> dict[str, Any]:
    """The keys of a configuration that change a score."""
    keys = ("margin_window_tokens", "prompt_window_tokens", "margin_quantile")
    return {key: getattr(cascade.routing, key) for key in (*keys, "max_escalation_tokens")}


def _spec(
    policy: str,
    base: dict[str, Any],
    window_tokens: int | None,
    quantile: float | None,
    last_token: int | None,
) -> Any:
    """The score that the policy acts on, checked as the configuration's keys are."""
    from pydantic import ValidationError

    from cluster.config import RoutingConfig
    from cluster.errors import ConfigError
    from router.scores import SCORED, ScoreSpec

    if policy not in SCORED:
        raise ConfigError(f"policy {policy}: only {', '.join(SCORED)} have a score to calibrate")
    keys = {
        "prompt_window_tokens" if policy == "prompt" else "margin_window_tokens": window_tokens,
        "margin_quantile": quantile,
        "max_escalation_tokens": last_token,
    }
    given = {key: value for key, value in keys.items() if value is not None}
    try:
        routing = RoutingConfig.model_validate({"policy": policy, **base, **given})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}") from None
    return ScoreSpec.of(routing, routing.policy)


def _row(made: Calibration, samples: Sequence[Sample], target: float) -> dict[str, Any]:
    """One target: its threshold, the interval of its fraction, and a trial on the other half."""
    from cluster.errors import ConfigError
    from router.samples import calibrate as make
    from router.samples import realised_fraction

    row: dict[str, Any] = {"target_fraction": target, "threshold": None, "realised": None}
    try:
        row["threshold"] = made.threshold(target).value
        row["low"], row["high"] = made.interval(target)
    except ConfigError as error:
        return row | {"problem": str(error)}
    try:
        half = make(samples[::2], made.score, target, made.depends)
    except ConfigError:
        return row
    if all(one.exact for one in samples):
        row["realised"] = realised_fraction(samples[1::2], half.threshold())
    return row


def _summary(made: Calibration, out: Path) -> dict[str, Any]:
    return {
        "file": str(out),
        "calibration_id": made.calibration_id,
        "score": made.score.model_dump(exclude_none=True),
        "answers": made.size,
        "unscored": made.unscored,
        "cut_short": made.blind,
        "target_fraction": made.target_fraction,
        "promise": None if made.promise is None else made.promise.model_dump(),
    }


def _print(made: Calibration, out: Path, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{made.score.name}: {made.size} answers, {made.unscored} without a score")
    for name in ("target", "threshold (nats)", "90 % interval", "realised on the other half"):
        table.add_column(name, justify="right")
    for row in rows:
        chosen = ">" if row["target_fraction"] == made.target_fraction else ""
        target = f"{chosen} {row['target_fraction']:.3g}"
        if row["threshold"] is None:
            table.add_row(target, "-", row["problem"], "-")
            continue
        realised = "-" if row["realised"] is None else f"{row['realised']:.3f}"
        between = f"{row['low']:.3f} to {row['high']:.3f}"
        table.add_row(target, f"{row['threshold']:.4f}", between, realised)
    console = Console()
    console.print(table)
    if made.promise is not None:
        sure = (
            "" if made.promise.confidence is None else f", confidence {made.promise.confidence:g}"
        )
        kind = made.promise.kind.replace("_", " ")
        console.print(f"> keeps the {kind} at or below {made.promise.limit:g}{sure}")
    console.print(f"calibration {made.calibration_id} in {out}: set it as `routing.calibration`")
