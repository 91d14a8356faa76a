"""The options that `kvcascade plan --simulate` adds, and how they become a simulation.

Typer needs them in the command's signature (`cluster.cli_plan`); here are their types and texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.catalog import Architecture
    from cluster.plan_report import Scenario
    from cluster.simulate import Setup
    from cluster.simulate_spec import Lengths, Replicas, Rules, Targets, Variant
    from mappers.manifest import Support

PANEL = "Simulation of a fleet (--simulate)"


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PANEL, **more)


Simulate = Annotated[
    bool, _option("--simulate", help="Simulate a fleet under load, three variants side by side.")
]
Rate = Annotated[
    list[float] | None,
    _option(
        help="Requests per second; repeat it for a sweep. Pools are sized for the first.",
        min=0.001,
        show_default="100",
    ),
]
Saturate = Annotated[
    bool, _option("--saturate", help="Then raise the rate by tenths until a variant falls behind.")
]
Variants = Annotated[
    list[str] | None,
    _option(
        "--variant",
        help="`handoff`, `reprefill` or `all_large`; repeat it.",
        show_default="all three",
    ),
]
Seconds = Annotated[float, _option(help="Simulated time in which requests arrive.", min=0.1)]
Seed = Annotated[int, _option(help="Seed of arrivals, lengths and routing.", min=0)]
Burstiness = Annotated[
    float, _option(help="Shape of gamma gaps: 1 is Poisson, less is burstier.", min=0.01)
]
PromptTokens = Annotated[str, _option(help="Prompt lengths: median and 95th percentile.")]
AnswerTokens = Annotated[str, _option(help="Answer lengths, likewise.")]
EscalateAfter = Annotated[
    str, _option(help="Tokens of the small model's before an escalation, likewise.")
]
LengthsFile = Annotated[
    Path | None,
    _option("--lengths", help="JSONL of {prompt_tokens, answer_tokens} to draw from instead."),
]
MaxTokens = Annotated[int, _option(help="Longest prompt with its answer.", min=3)]
SmallReplicas = Annotated[
    int | None, _option(help="Replicas of the small model. Unset: sized for the targets.", min=1)
]
LargeReplicas = Annotated[
    int | None, _option(help="Replicas of the large model in the two cascades, likewise.", min=1)
]
MapperReplicas = Annotated[int | None, _option(help="Mapper replicas, likewise.", min=1)]
AllLargeReplicas = Annotated[
    int | None, _option(help="Replicas when the large model serves everything, likewise.", min=1)
]
SmallGpus = Annotated[int | None, _option(help="GPUs of one small replica. Unset: --gpus.", min=1)]
LargeGpus = Annotated[int | None, _option(help="GPUs of one large replica. Unset: --gpus.", min=1)]
MapperGpus = Annotated[int | None, _option(help="GPUs of one mapper. Unset: --gpus.", min=1)]
GpuMemoryGb = Annotated[
    float | None, _option(help="Memory of one GPU in GB. Unset: that of --gpu.", min=0.001)
]
MapperAt = Annotated[
    str, _option(help="`receiver`, `sender`, or `apart`: both copies go over links.")
]
LinkLatencyMs = Annotated[float, _option(help="Latency of one transfer.", min=0)]
ChunkTokens = Annotated[
    int | None,
    _option(help="Tokens that a handoff moves as one. Unset: as configured by default.", min=1),
]
ReadAhead = Annotated[
    bool, _option(help="Mappers begin before the target has blocks, as the product does.")
]
StepTokens = Annotated[
    int | None, _option(help="Tokens of one engine step. Unset: as configured by default.", min=1)
]
MaxSeqs = Annotated[
    int | None, _option(help="Requests in one engine step. Unset: as configured by default.", min=1)
]
LeaseS = Annotated[
    float | None, _option(help="Lease of source blocks. Unset: as configured by default.", min=0.01)
]
FirstTokenS = Annotated[
    float,
    _option(help="Target: p99 to the first token and, escalated, to the large model's.", min=0.001),
]
TpotMs = Annotated[float, _option(help="Target: p99 of the time per output token.", min=0.001)]
Price = Annotated[float, _option(help="Price of one GPU-hour.", min=0)]
MeasuredFiles = Annotated[
    list[Path] | None,
    _option(
        "--measured",
        help="Instead compare with measurements: what `bench/handoff.py --json` wrote, or a JSON "
        "list of {prompt_tokens, link_gbps, path, seconds}; repeat it.",
    ),
]


def parse_lengths(text: str, option: str) -> Lengths:
    """`median,p95` as lengths; ConfigError names the option."""
    from pydantic import ValidationError

    from cluster.simulate_spec import Lengths

    try:
        median, p95 = (int(part) for part in text.split(","))
        return Lengths(median_tokens=median, p95_tokens=p95)
    except (ValueError, ValidationError):
        raise ConfigError(
            f"{option} {text!r}: give a median and a 95th percentile that is not below it, as "
            "1000,4000"
        ) from None


def make_setup(
    given: Mapping[str, Any],
    source: Architecture,
    target: Architecture,
    scenario: Scenario,
    gpu_memory_gb: float | None,
    support: Support,
) -> Setup:
    """A fleet from the command's parameters by name. Raises ConfigError for what cannot be."""
    from cluster.simulate import Setup
    from cluster.simulate_spec import Load

    if gpu_memory_gb is None:
        raise ConfigError("give --gpu-memory-gb, or a --gpu of the catalog, to size KV pools")
    load = Load(
        seconds=given["seconds"],
        seed=given["seed"],
        burstiness=given["burstiness"],
        prompt=parse_lengths(given["prompt_tokens"], "--prompt-tokens"),
        answer=parse_lengths(given["answer_tokens"], "--answer-tokens"),
        escalate_after=parse_lengths(given["escalate_after"], "--escalate-after"),
        escalation=scenario.escalation,
        lengths_file=given["lengths_file"],
        max_tokens=given["max_tokens"],
    )
    rules = _rules(given, scenario, gpu_memory_gb, support)
    return Setup(source, target, scenario, scenario.links_gbps[0], load, rules)


def _rules(
    given: Mapping[str, Any], scenario: Scenario, gpu_memory_gb: float, support: Support
) -> Rules:
    from pydantic import ValidationError

    from cluster.simulate_spec import Rules

    defaulted = {
        name: given[name]
        for name in ("chunk_tokens", "step_tokens", "max_seqs", "lease_s")
        if given[name] is not None
    }
    if given["mapper_at"] not in ("receiver", "sender", "apart"):
        raise ConfigError(
            f"--mapper-at {given['mapper_at']!r}: choose `receiver`, `sender` or `apart`"
        )
    try:
        return Rules(
            gpu_memory_gb=gpu_memory_gb,
            small_gpus=given["small_gpus"] or scenario.gpus,
            large_gpus=given["large_gpus"] or scenario.gpus,
            mapper_gpus=given["mapper_gpus"] or scenario.gpus,
            place=given["mapper_at"],
            support=support,
            k=given["k"],
            link_latency_ms=given["link_latency_ms"],
            read_ahead=given["read_ahead"],
            **defaulted,
        )
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def chosen_variants(names: list[str] | None) -> tuple[Variant, ...]:
    """The variants by name, all of them for none. Raises ConfigError for an unknown one."""
    from cluster.simulate_spec import VARIANTS

    for name in names or ():
        if name not in VARIANTS:
            raise ConfigError(f"--variant {name!r}: choose `handoff`, `reprefill` or `all_large`")
    return tuple(one for one in VARIANTS if not names or one in names)


def fixed_replicas(given: Mapping[str, Any]) -> dict[Variant, Replicas]:
    """Variants whose pools are all given; the others are sized.

    Raises ConfigError when only some pools of a cascade are given.
    """
    from cluster.simulate_spec import Replicas

    small, large, mapper, alone = (
        given[f"{name}_replicas"] for name in ("small", "large", "mapper", "all_large")
    )
    fixed: dict[Variant, Replicas] = {}
    if small is not None and large is not None:
        fixed["reprefill"] = Replicas(small=small, large=large, mapper=0)
        if mapper is not None:
            fixed["handoff"] = Replicas(small=small, large=large, mapper=mapper)
    elif not small is large is mapper is None:
        raise ConfigError(
            "give --small-replicas and --large-replicas together, with --mapper-replicas for "
            "handoffs, or none of them to have pools sized"
        )
    if alone is not None:
        fixed["all_large"] = Replicas(small=0, large=alone, mapper=0)
    return fixed


def targets(given: Mapping[str, Any]) -> Targets:
    """What pools are sized for."""
    from cluster.simulate_spec import Targets

    return Targets(first_token_s=given["first_token_s"], tpot_s=given["tpot_ms"] / 1e3)
