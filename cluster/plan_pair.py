"""Applies `cluster.plan`'s formulas to one ordered pair of models under given circumstances.

Knows nothing of printing, and of files only the catalog's number of source layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster import plan
from cluster.catalog import Architecture, catalog
from cluster.errors import MapperError
from cluster.plan_report import (
    SIDES,
    CascadePlan,
    FleetPlan,
    HandoffPlan,
    MapperPlan,
    ModelPlan,
    PlanReport,
    Scenario,
    Side,
)
from mappers.fitting.sizes import COMFORTABLE_RATIO
from mappers.manifest import Support

DEFAULT_K = 8
"""What `kvcascade fit` takes for a pair that the paper has not swept."""


def make_plan(
    source: Architecture,
    target: Architecture,
    scenario: Scenario,
    *,
    supports: Sequence[Support] = ("full", "head_local"),
    k: int | None = None,
) -> PlanReport:
    """Plan handing prompts from `source` to `target`.

    `k` None takes the paper's for its own pairs, else the smaller of 8 and the source's layers.
    With several supports an impossible one becomes a note; a single one raises MapperError.
    """
    k, origin = choose_k(source, target, k)
    notes = _notes(source, target, scenario)
    mappers = []
    for support in supports:
        try:
            mappers.append(_mapper(support, k, source, target, scenario))
        except MapperError as error:
            if support == "full" or len(supports) == 1:
                raise
            notes.append(str(error))
    small = _model(source, scenario)
    large = _model(target, scenario)
    handoffs = [
        handoff(source, target, one, side, gbps, scenario)
        for gbps in scenario.links_gbps
        for one in mappers
        for side in SIDES
    ]
    sizes = {"sender": large.kv_bytes_per_token, "receiver": small.kv_bytes_per_token}
    map_at: Side | None = None
    if sizes["sender"] != sizes["receiver"]:
        map_at = "sender" if sizes["sender"] < sizes["receiver"] else "receiver"
    return PlanReport(
        scenario=scenario,
        source=small,
        target=large,
        k_origin=origin,
        map_at=map_at,
        receiver_saved_bytes=1 - small.kv_bytes_per_token / large.kv_bytes_per_token,
        mappers=tuple(mappers),
        handoffs=tuple(handoffs),
        cascades=tuple(_cascades(small, large, mappers, scenario.escalation)),
        fleets=tuple(_fleets(mappers, scenario)),
        notes=tuple(notes),
    )


def handoff(
    source: Architecture,
    target: Architecture,
    mapper: MapperPlan,
    side: Side,
    link_gbps: float,
    scenario: Scenario,
) -> HandoffPlan:
    """One way to hand over `scenario.tokens`, and from which length on it is worth it."""
    limit_tokens = max(scenario.tokens, min(source.max_position_tokens, target.max_position_tokens))

    def seconds(tokens: int) -> float:
        return handoff_s(source, target, mapper, side, link_gbps, scenario, tokens)

    def reprefill_s(tokens: int) -> float:
        return plan.prefill_s(target, tokens, scenario.hardware)

    tokens = scenario.tokens
    moved_bytes = tokens * _moved_bytes_per_token(source, target, side)
    transfer_s = plan.transfer_s(moved_bytes, link_gbps)
    map_s = _map_s(source, target, mapper, scenario, tokens)
    overlapped_s = seconds(tokens)
    return HandoffPlan(
        support=mapper.support,
        mapped_at=side,
        link_gbps=link_gbps,
        moved_bytes=moved_bytes,
        transfer_s=transfer_s,
        map_s=map_s,
        serial_s=scenario.overhead_ms / 1e3 + transfer_s + map_s,
        overlapped_s=overlapped_s,
        reprefill_ratio=reprefill_s(tokens) / overlapped_s,
        break_even_tokens=plan.break_even_tokens(reprefill_s, seconds, limit_tokens),
    )


def handoff_s(
    source: Architecture,
    target: Architecture,
    mapper: MapperPlan,
    side: Side,
    link_gbps: float,
    scenario: Scenario,
    tokens: int,
) -> float:
    """Overhead, then mapping and transfer overlapped layer by layer.

    At the sender a target layer leaves once it is mapped; at the receiver mapping follows the
    source layers as they arrive.
    """
    moved_bytes = tokens * _moved_bytes_per_token(source, target, side)
    return scenario.overhead_ms / 1e3 + plan.overlapped_s(
        _map_s(source, target, mapper, scenario, tokens),
        plan.transfer_s(moved_bytes, link_gbps),
        target.layers if side == "sender" else source.layers,
    )


def _moved_bytes_per_token(source: Architecture, target: Architecture, side: Side) -> int:
    sent = target if side == "sender" else source
    return plan.kv_bytes_per_token(sent.geometry)


def _map_s(
    source: Architecture, target: Architecture, mapper: MapperPlan, scenario: Scenario, tokens: int
) -> float:
    return plan.map_s(mapper.weights, source.geometry, target.geometry, tokens, scenario.hardware)


def choose_k(source: Architecture, target: Architecture, k: int | None) -> tuple[int, str]:
    """Source layers per target layer, and where that number comes from."""
    if k is not None:
        return k, "as given"
    paper = catalog().paper_k(source.name, target.name)
    if paper is not None:
        return paper, "as in arXiv 2608.03893 for this pair"
    return min(DEFAULT_K, source.layers), "the default of `kvcascade fit`"


def _model(model: Architecture, scenario: Scenario) -> ModelPlan:
    counts = plan.parameters(model)
    kv_bytes = plan.kv_bytes_per_token(model.geometry)
    return ModelPlan(
        architecture=model,
        parameters=counts.total,
        active_parameters=counts.active,
        weights_bf16_bytes=counts.total * plan.BF16_BYTES,
        kv_bytes_per_token=kv_bytes,
        kv_bytes=kv_bytes * scenario.tokens,
        prefill_flop_per_token=plan.prefill_flop_per_token(model, scenario.tokens),
        table_head_flop_per_token=2 * (counts.embedding + counts.head),
        prefill_s=plan.prefill_s(model, scenario.tokens, scenario.hardware),
    )


def _mapper(
    support: Support, k: int, source: Architecture, target: Architecture, scenario: Scenario
) -> MapperPlan:
    shapes = source.geometry, target.geometry
    width = plan.feature_width(support, k, *shapes)
    weights = plan.mapper_weights(support, k, *shapes)
    biases = plan.mapper_biases(target.geometry)
    flop = plan.map_flop_per_token(weights)
    map_s = plan.map_s(weights, *shapes, scenario.tokens, scenario.hardware)
    statistics = plan.fit_statistics(support, k, *shapes)
    return MapperPlan(
        support=support,
        k=k,
        width=width,
        weights=weights,
        biases=biases,
        fp32_bytes=(weights + biases) * plan.FP32_BYTES,
        bf16_bytes=(weights + biases) * plan.BF16_BYTES,
        flop_per_token=flop,
        reprefill_flop_ratio=plan.prefill_flop_per_token(target, scenario.tokens) / flop,
        map_s=map_s,
        sooner_s=plan.prefill_s(target, scenario.tokens, scenario.hardware) - map_s,
        minimum_calibration_tokens=width + 1,
        comfortable_calibration_tokens=COMFORTABLE_RATIO * width,
        fit_one_pass_bytes=statistics.one_pass_bytes,
        fit_choosing_bytes=statistics.choosing_bytes,
        fit_chosen_together_bytes=statistics.chosen_together_bytes,
        fit_chosen_one_by_one_bytes=statistics.chosen_one_by_one_bytes,
    )


def _cascades(
    small: ModelPlan, large: ModelPlan, mappers: Sequence[MapperPlan], escalation: float
) -> list[CascadePlan]:
    rows: list[tuple[Support | None, float]] = [(None, 0.0)]
    rows += [(one.support, one.flop_per_token) for one in mappers]
    plans = []
    for support, map_flop in rows:
        saving = plan.prefill_saving(
            small.prefill_flop_per_token, large.prefill_flop_per_token, escalation, map_flop
        )
        plans.append(
            CascadePlan(
                support=support,
                cascade_flop=saving.cascade_flop,
                reprefill_cascade_flop=saving.reprefill_cascade_flop,
                all_large_flop=saving.all_large_flop,
                saved_of_reprefill_cascade=saving.of_reprefill_cascade,
                saved_of_all_large=saving.of_all_large,
            )
        )
    return plans


def _fleets(mappers: Sequence[MapperPlan], scenario: Scenario) -> list[FleetPlan]:
    if scenario.average_pair_gb is not None:
        sizes = [("the given average", scenario.average_pair_gb * 1e9)]
    else:
        sizes = [
            (f"this pair's size, {one.support}, {name}", float(size))
            for one in mappers
            for name, size in (("fp32", one.fp32_bytes), ("bf16", one.bf16_bytes))
        ]
    return [
        FleetPlan(
            basis=basis,
            models=scenario.models,
            directed_pairs=plan.directed_pairs(scenario.models),
            pair_bytes=pair_bytes,
            total_bytes=plan.fleet_bytes(scenario.models, pair_bytes),
        )
        for basis, pair_bytes in sizes
    ]


def _notes(source: Architecture, target: Architecture, scenario: Scenario) -> list[str]:
    notes = []
    models = tuple(dict.fromkeys((source, target)))
    for reason in dict.fromkeys(one.refusal for one in models if one.refusal is not None):
        names = " and ".join(one.name for one in models if one.refusal == reason)
        notes.append(
            f"`kvcascade fit` refuses {names}: {reason.rstrip('.')}. The numbers here take every "
            "layer for full attention."
        )
    for model in models:
        if model.experts > 1:
            notes.append(
                f"{model.name} is a mixture: FLOP count {model.active_experts} of {model.experts} "
                "experts, memory counts all, and every layer is taken to have them."
            )
        if scenario.tokens > model.max_position_tokens:
            notes.append(
                f"{scenario.tokens:,} tokens are more than the {model.max_position_tokens:,} "
                f"positions of {model.name}."
            )
    if source.vocab_size != target.vocab_size:
        notes.append(
            f"The vocabularies differ in size ({source.vocab_size:,} and {target.vocab_size:,}): "
            "a mapper needs one tokenizer, `kvcascade validate` compares them."
        )
    return notes
