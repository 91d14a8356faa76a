"""The planner against published figures, against the mappers package and against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster import plan
from cluster.catalog import Architecture, architecture, catalog
from cluster.errors import ConfigError, MapperError, ModelError
from cluster.plan import Gpus
from cluster.plan_pair import make_plan
from cluster.plan_report import PlanReport, Scenario
from mappers.geometry import KVGeometry, kv_geometry, read_config

FOUR_A100 = Gpus(312, 2_039, 4)
T32K = 32_768


def scenario(**changes: Any) -> Scenario:
    usual: dict[str, Any] = {
        "tokens": T32K,
        "gpus": 4,
        "gpu_name": "A100",
        "gpu_tflops": 312,
        "gpu_memory_gb_s": 2_039,
        "efficiency": 1.0,
        "links_gbps": (400.0, 100.0),
        "overhead_ms": 20.0,
        "escalation": 0.3,
        "models": 3,
        "average_pair_gb": None,
    }
    return Scenario(**(usual | changes))


def planned(source: str, target: str, k: int | None = None, **changes: Any) -> PlanReport:
    return make_plan(architecture(source), architecture(target), scenario(**changes), k=k)


def llama_config(**changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return usual | changes


# Published and derived figures. A tolerance is half a unit of the last digit given.


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.721),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("qwen3-14b", 14.768),
        ("qwen3-32b", 32.762),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.554),
    ],
)
def test_catalog_models_have_the_parameters_their_checkpoints_have(
    name: str, billions: float
) -> None:
    assert plan.parameters(architecture(name)).total / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize(("size", "billions"), [("3b", 3.4), ("8b", 8.5), ("14b", 13.5)])
def test_ministral_3_language_models_have_the_stated_size(size: str, billions: float) -> None:
    model = architecture(f"ministral-3-{size}")
    assert plan.parameters(model).total / 1e9 == pytest.approx(billions, abs=0.05)


def test_kv_bytes_of_qwen3_are_those_of_its_shapes() -> None:
    sizes = [plan.kv_bytes_per_token(architecture(f"qwen3-{n}").geometry) for n in ("14b", "32b")]
    assert sizes == [163_840, 262_144]


def test_prefill_of_qwen3_32b_at_32k_takes_99_9_gflop_a_token() -> None:
    flop = plan.prefill_flop_per_token(architecture("qwen3-32b"), T32K)
    assert flop / 1e9 == pytest.approx(99.9, abs=0.05)


def test_maps_of_qwen3_14b_to_32b_take_2_15_and_0_268_gflop_a_token() -> None:
    full, local = planned("qwen3-14b", "qwen3-32b").mappers
    assert full.flop_per_token / 1e9 == pytest.approx(2.15, abs=0.005)
    assert local.flop_per_token / 1e9 == pytest.approx(0.268, abs=0.0005)


def test_maps_of_qwen3_14b_to_32b_save_46_and_372_times_the_flop() -> None:
    """46 is 46.5 cut to whole numbers, as it was published; 372 is rounded."""
    full, local = planned("qwen3-14b", "qwen3-32b").mappers
    assert full.reprefill_flop_ratio == pytest.approx(46.5, abs=0.05)
    assert local.reprefill_flop_ratio == pytest.approx(372, abs=0.5)


def test_head_local_is_2_62_seconds_sooner_on_four_gpus_of_312_tflops() -> None:
    _, local = planned("qwen3-14b", "qwen3-32b").mappers
    assert local.sooner_s == pytest.approx(2.62, abs=0.005)


def test_a_cascade_at_30_percent_saves_41_and_57_percent_of_prefill() -> None:
    bare, _, local = planned("qwen3-14b", "qwen3-32b").cascades
    for row in (bare, local):
        assert row.saved_of_reprefill_cascade == pytest.approx(0.41, abs=0.005)
        assert row.saved_of_all_large == pytest.approx(0.57, abs=0.005)


@pytest.mark.parametrize(
    ("source", "target", "k", "billions"),
    [
        ("qwen3-14b", "qwen3-32b", 8, 1.07),
        ("qwen3-8b", "qwen3-32b", 12, 1.61),
        ("llama-3.1-8b", "llama-3.1-70b", 20, 3.36),
        ("ministral-3-3b", "ministral-3-8b", 26, 1.85),
        ("ministral-3-8b", "ministral-3-14b", 12, 1.01),
        ("ministral-3-3b", "ministral-3-14b", 20, 1.68),
    ],
)
def test_the_papers_pairs_get_its_k_and_its_parameter_counts(
    source: str, target: str, k: int, billions: float
) -> None:
    full = planned(source, target).mappers[0]
    assert full.k == k
    assert full.weights / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(("models", "gigabytes"), [(3, 39), (4, 79), (5, 131)])
def test_fleets_of_an_average_pair_take_the_published_memory(models: int, gigabytes: int) -> None:
    fleet = planned("qwen3-14b", "qwen3-32b", models=models, average_pair_gb=6.55).fleets[0]
    assert fleet.total_bytes / 1e9 == pytest.approx(gigabytes, abs=0.5)


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [("qwen3-14b", "qwen3-32b", 0.375), ("llama-3.1-8b", "llama-3.1-70b", 0.6)],
)
def test_mapping_at_the_receiver_moves_fewer_bytes(source: str, target: str, share: float) -> None:
    report = planned(source, target)
    assert report.map_at == "receiver"
    assert report.receiver_saved_bytes == pytest.approx(share, abs=1e-12)


def test_the_reverse_direction_is_better_mapped_at_the_sender() -> None:
    assert planned("qwen3-32b", "qwen3-14b").map_at == "sender"
    assert planned("qwen3-8b", "qwen3-4b").map_at is None


# Independent properties.


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_transformers_model(kind: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    more = {"qwen3_moe": {"moe_intermediate_size": 12, **experts}, "mixtral": experts}
    settings = llama_config(tie_word_embeddings=tied, **more.get(kind, {}))
    del settings["model_type"]
    if kind == "qwen2":  # its heads are hidden_size / heads wide whatever the config says
        settings |= {"head_dim": 6}
    config = AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ours = plan.parameters(Architecture.from_config(kind, config.to_dict()))
    assert ours.total == model.num_parameters()
    assert (ours.active < ours.total) == (kind in more)


@pytest.mark.parametrize("support", ["full", "head_local"])
def test_widths_and_weights_are_those_of_the_mappers_package(support: Any) -> None:
    from mappers.supports import feature_width

    source, target = KVGeometry(7, 4, 16), KVGeometry(9, 4, 8)
    width = plan.feature_width(support, 3, source, target)
    assert width == feature_width(support, 3, source, target)
    groups = 1 if support == "full" else 4
    per_group = width * target.width // groups
    assert plan.mapper_weights(support, 3, source, target) == 2 * 9 * groups * per_group


def test_the_memory_of_a_fit_is_what_its_passes_keep() -> None:
    from mappers.fitting.passes import plan_fit

    source, target = architecture("qwen3-14b").geometry, architecture("qwen3-32b").geometry
    full = plan.fit_statistics("full", 8, source, target)
    (whole,) = plan_fit(source, target, "full", 8, 128 * 10**9).first
    assert full.one_pass_bytes == whole.moments_bytes == pytest.approx(56.7e9, abs=0.05e9)
    little = plan_fit(source, target, "full", 8, 23 * 10**9)
    assert full.choosing_bytes == sum(one.moments_bytes for one in little.first)
    assert full.chosen_together_bytes == sum(one.moments_bytes for one in little.solve)


def test_every_way_with_fewer_choices_takes_less_memory() -> None:
    source, target = architecture("qwen3-14b").geometry, architecture("qwen3-32b").geometry
    full = plan.fit_statistics("full", 8, source, target)
    local = plan.fit_statistics("head_local", 8, source, target)
    assert full.chosen_one_by_one_bytes < full.chosen_together_bytes < full.one_pass_bytes
    assert local.one_pass_bytes == full.choosing_bytes == local.choosing_bytes
    assert local.one_pass_bytes == pytest.approx(full.one_pass_bytes / 8, rel=0.06)


def test_the_calibration_ratio_is_the_one_that_fit_warns_at() -> None:
    from mappers.fitting.fit import COMFORTABLE_RATIO

    full = planned("qwen3-14b", "qwen3-32b").mappers[0]
    assert full.comfortable_calibration_tokens == COMFORTABLE_RATIO * full.width == 40_960
    assert full.minimum_calibration_tokens == 8_193


def test_a_folder_gives_the_geometry_that_the_mappers_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    model = architecture(str(tmp_path))
    assert model.geometry == kv_geometry(read_config(tmp_path)) == KVGeometry(3, 2, 8)
    assert model.refusal is None


def test_the_quickstart_pair_is_read_from_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCASCADE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="run `kvcascade models`"):
        architecture("small")
    for name, layers in (("small", 3), ("large", 6)):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(llama_config(num_hidden_layers=layers)))
    report = planned("small", "large")
    assert report.target.architecture.geometry == KVGeometry(6, 2, 8)
    assert report.mappers[0].k == 3


# Times.


def test_a_roofline_is_the_longer_of_arithmetic_and_memory() -> None:
    gpus = Gpus(100, 1_000, count=2, efficiency=0.5)
    assert gpus.seconds(flop=1e14, moved_bytes=1e11) == pytest.approx(1.0)
    assert gpus.seconds(flop=1e14, moved_bytes=3e12) == pytest.approx(3.0)
    assert Gpus(100, None, 2, 0.5).seconds(flop=1e14, moved_bytes=3e12) == pytest.approx(1.0)


def test_a_short_prefill_takes_the_time_of_reading_the_weights() -> None:
    model = architecture("qwen3-32b")
    weights_s = plan.parameters(model).total * 2 / (4 * 2_039e9)
    assert plan.prefill_s(model, 1, FOUR_A100) == pytest.approx(weights_s, rel=1e-4)


def test_transfers_take_the_bytes_over_the_rate() -> None:
    source_bytes = T32K * 163_840
    assert plan.transfer_s(source_bytes, 400) == pytest.approx(0.107, abs=0.0005)
    assert plan.transfer_s(source_bytes, 100) == pytest.approx(0.4295, abs=0.0005)


def test_overlap_hides_the_shorter_step_but_for_one_part() -> None:
    assert plan.overlapped_s(3.0, 1.0, stages=1) == 4.0
    assert plan.overlapped_s(1.0, 3.0, stages=4) == 3.25


def test_overlap_is_between_the_longer_step_and_both() -> None:
    for row in planned("qwen3-14b", "qwen3-32b").handoffs:
        steps = row.map_s, row.transfer_s
        assert max(steps) + 0.02 < row.overlapped_s < row.serial_s
        assert row.serial_s == pytest.approx(sum(steps) + 0.02)


@pytest.mark.parametrize("link", [1.0, 10.0, 100.0, 400.0])
def test_break_even_agrees_with_trying_every_length(link: float) -> None:
    source, target = architecture("qwen3-8b"), architecture("qwen3-14b")
    weights = plan.mapper_weights("full", 8, source.geometry, target.geometry)

    def handoff(tokens: int) -> float:
        moved_bytes = tokens * plan.kv_bytes_per_token(source.geometry)
        return (
            0.002
            + plan.map_s(weights, source.geometry, target.geometry, tokens, FOUR_A100)
            + plan.transfer_s(moved_bytes, link)
        )

    def reprefill(tokens: int) -> float:
        return plan.prefill_s(target, tokens, FOUR_A100)

    limit = 20_000
    lost = [tokens for tokens in range(1, limit + 1) if handoff(tokens) > reprefill(tokens)]
    expected = None if lost and lost[-1] == limit else (lost[-1] + 1 if lost else 1)
    assert plan.break_even_tokens(reprefill, handoff, limit) == expected


def test_a_longer_prompt_and_a_faster_link_favour_the_handoff() -> None:
    report = planned("qwen3-14b", "qwen3-32b")
    fast, slow = report.handoffs[0], report.handoffs[4]
    assert (fast.link_gbps, slow.link_gbps) == (400, 100)
    assert fast.break_even_tokens is not None and slow.break_even_tokens is not None
    assert fast.break_even_tokens < slow.break_even_tokens
    assert planned("qwen3-14b", "qwen3-32b", tokens=512).handoffs[0].reprefill_ratio < (
        fast.reprefill_ratio
    )


def test_efficiency_scales_what_is_computed_and_not_what_is_sent() -> None:
    whole = planned("qwen3-14b", "qwen3-32b")
    half = planned("qwen3-14b", "qwen3-32b", efficiency=0.5)
    assert half.target.prefill_s == pytest.approx(2 * whole.target.prefill_s)
    assert half.handoffs[0].map_s == pytest.approx(2 * whole.handoffs[0].map_s)
    assert half.handoffs[0].transfer_s == whole.handoffs[0].transfer_s


# What cannot be planned, and what is planned with a note.


def test_unequal_heads_leave_full_support_and_a_note() -> None:
    narrow = Architecture.from_config("narrow", llama_config(num_key_value_heads=1))
    wide = Architecture.from_config("wide", llama_config())
    report = make_plan(narrow, wide, scenario())
    assert [one.support for one in report.mappers] == ["full"]
    assert any("head_local needs equal KV heads" in note for note in report.notes)
    with pytest.raises(MapperError, match="use support full"):
        make_plan(narrow, wide, scenario(), supports=("head_local",))


def test_a_model_that_mappers_refuse_is_planned_with_a_note() -> None:
    windowed = llama_config(
        model_type="gemma3_text", sliding_window=64, layer_types=["sliding_attention"] * 3
    )
    model = Architecture.from_config("windowed", windowed)
    report = make_plan(model, model, scenario())
    assert report.source.kv_bytes_per_token == 2 * 3 * 2 * 8 * 2
    (refused,) = (note for note in report.notes if "refuses" in note)
    assert refused.startswith("`kvcascade fit` refuses windowed: ")


def test_prompts_beyond_the_positions_and_other_vocabularies_are_noted() -> None:
    first = Architecture.from_config("first", llama_config())
    second = Architecture.from_config("second", llama_config(vocab_size=60))
    notes = make_plan(first, second, scenario(tokens=300)).notes
    assert "300 tokens are more than the 256 positions of first." in notes
    assert any("vocabularies differ in size (50 and 60)" in note for note in notes)


def test_a_latent_cache_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="caches latent vectors"):
        Architecture.from_config("deep", llama_config(kv_lora_rank=512))


def test_a_missing_key_is_named() -> None:
    config = llama_config()
    del config["intermediate_size"]
    with pytest.raises(ModelError, match="lacks 'intermediate_size'"):
        Architecture.from_config("mine", config)


@pytest.mark.parametrize("k", [0, 41])
def test_a_k_that_the_source_lacks_is_refused(k: int) -> None:
    with pytest.raises(MapperError, match="give 1 to 40"):
        planned("qwen3-14b", "qwen3-32b", k=k)


def test_catalog_names_are_found_in_any_case_and_unknown_ones_listed() -> None:
    assert architecture("QWEN/qwen3-14b").name == "Qwen/Qwen3-14B"
    assert architecture("meta-llama/Llama-3.1-8B-Instruct").layers == 32
    with pytest.raises(ConfigError, match=r"not in the catalog \(qwen3-0\.6b"):
        architecture("qwen9")
    with pytest.raises(ConfigError, match="A100, L40S, H100"):
        catalog().gpu("abacus")


def test_every_pair_of_the_catalog_names_its_models() -> None:
    known = {one.repository: one for one in catalog().models}
    assert len(catalog().pairs) == 6
    for pair in catalog().pairs:
        assert pair.k <= known[pair.source].config["num_hidden_layers"]
        assert pair.target in known


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-32b", "llama-3.1-8b", "llama-3.1-70b"])
def test_catalog_configs_are_complete_enough_for_the_mappers(name: str) -> None:
    assert architecture(name).refusal is None
