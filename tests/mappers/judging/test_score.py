"""Scores, controls and verdicts: an exact mapper passes, broken ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mappers.capture import TokenSequences, load_model, pack
from mappers.fingerprint import fingerprint
from mappers.judging.local import bucket_starts
from mappers.judging.records import LocalAttention, ScoreReport, Structure, Thresholds
from mappers.judging.report import AnswerRow, GenerationReport
from mappers.judging.score import score_mapper
from mappers.judging.verdict import (
    INJECTED,
    MAPPED,
    NATIVE,
    OTHER_TEXT,
    RANDOM,
    RAW,
    SOURCE,
    cautions,
    judge,
)
from mappers.mapper import IdentityMapper, Mapper
from tests.mappers.oracle import (
    oracle,
    with_swapped_layers,
    with_wrong_head_order,
    with_wrong_theta,
)
from tests.mappers.tiny import sentences, write_model

PREFIX = "no better with a prefix"
"""Random models' only fault: to them text is noise, whatever came before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose attention is sharp enough to depend on positions."""
    torch.set_num_threads(1)
    folder = write_model(tmp_path_factory.mktemp("score") / "model", layers=4, seed=5)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor *= 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(folder, torch.float32, "cpu")


@pytest.fixture(scope="module")
def windows(folder: Path) -> TokenSequences:
    return pack(sentences(6, seed=3), folder, 96, 96 * 4)


def scored(model: Any, mapper: Mapper, windows: TokenSequences, **options: Any) -> ScoreReport:
    return score_mapper(model, model, mapper, windows, prefix_tokens=64, **options)


def faults(report: ScoreReport) -> list[str]:
    assert report.verdict == "refuse"
    assert PREFIX in report.reasons[0]
    return list(report.reasons[1:])


@pytest.fixture(scope="module")
def exact(model: Any, folder: Path, windows: TokenSequences) -> ScoreReport:
    return scored(model, oracle(folder), windows)


def test_the_exact_mapper_of_a_model_to_itself_has_no_fault(exact: ScoreReport) -> None:
    assert faults(exact) == []
    assert exact.injection_exact
    assert exact.row(INJECTED).kl_to_native == 0.0
    assert exact.row(MAPPED).kl_to_native == pytest.approx(0.0, abs=1e-5)
    assert exact.row(MAPPED).layer_cosine_L == pytest.approx([1.0] * 4, abs=1e-4)
    assert exact.row(SOURCE).perplexity == pytest.approx(exact.row(NATIVE).perplexity)
    assert exact.row(MAPPED).floor_normalised == 1.0
    assert exact.local_attention is not None and exact.structure is not None
    assert exact.local_attention.layer_share_L == pytest.approx([1.0] * 4, abs=1e-3)
    assert exact.structure.shift == 4 * 63
    assert exact.structure.shift_error_keys == pytest.approx(0.0, abs=1e-4)


def test_every_control_runs_and_is_worse_than_the_mapped_cache(exact: ScoreReport) -> None:
    names = [row.name for row in exact.rows]
    assert names == [
        "native",
        "native injected",
        "mapped",
        "another text's cache",
        "random mapper",
        "raw source cache",
        "no prefix",
        "source alone",
    ]
    for name in (OTHER_TEXT, RANDOM, "no prefix"):
        assert exact.row(name).kl_to_native > 100 * abs(exact.row(MAPPED).kl_to_native) + 1e-3
    # The raw cache of a model is its own.
    assert exact.row(RAW).kl_to_native == 0.0
    assert exact.absent_controls == ()
    assert exact.thresholds == Thresholds()


def test_swapped_layers_are_refused_by_name(
    model: Any, folder: Path, windows: TokenSequences
) -> None:
    reasons = faults(scored(model, with_swapped_layers(folder, 1, 3), windows))
    assert "layer 1 holds keys and values that belong to layer 3" in reasons
    assert "layer 3 holds keys and values that belong to layer 1" in reasons
    by_layer = next(one for one in reasons if one.startswith("attention outputs by layer"))
    assert "3 keeps" in by_layer and "1 keeps" in by_layer and "2 keeps" not in by_layer


@pytest.mark.parametrize("theta", [500_000.0, 11_000.0])
def test_a_wrong_theta_is_refused_as_one_of_positions(
    model: Any, folder: Path, windows: TokenSequences, theta: float
) -> None:
    report = scored(model, with_wrong_theta(folder, theta), windows)
    reasons = faults(report)
    assert reasons[0].startswith("positions: text moved by 252 positions maps to other keys")
    assert "theta" in reasons[0]
    assert not any("belong to" in one for one in reasons)
    assert report.local_attention is not None
    share_B = report.local_attention.bucket_share_B
    assert share_B[-1] < share_B[0] - 0.001, "the further from position 0, the worse"


def test_a_wrong_head_order_is_refused_by_name(
    model: Any, folder: Path, windows: TokenSequences
) -> None:
    reasons = faults(scored(model, with_wrong_head_order(folder), windows))
    for at, belongs in ((0, 1), (1, 0)):
        assert (
            f"head order: KV head {at} holds keys and values that belong to head {belongs} in "
            "layers 0, 1, 2, 3"
        ) in reasons


def test_without_controls_three_caches_run_and_nothing_is_accepted(
    model: Any, folder: Path, windows: TokenSequences
) -> None:
    report = scored(model, oracle(folder), windows, controls=False)
    assert [row.name for row in report.rows] == [NATIVE, INJECTED, MAPPED]
    assert report.row(MAPPED).attention_cosine == pytest.approx(1.0, abs=1e-4)
    assert report.verdict == "refuse" and "without controls" in report.reasons[0]


def test_positions_where_both_texts_are_the_same_are_left_out(
    model: Any, folder: Path, windows: TokenSequences
) -> None:
    ids_ST = windows.ids_ST.clone()
    ids_ST[:, :12] = ids_ST[0, :12]
    report = scored(model, oracle(folder), TokenSequences(ids_ST, 4))
    assert report.local_attention is not None
    assert report.local_attention.bucket_starts_B == (16,)
    assert report.local_attention.bucket_share_B == pytest.approx((1.0,), abs=1e-3)


def test_controls_that_cannot_run_are_said_to_be_absent(
    model: Any, folder: Path, windows: TokenSequences
) -> None:
    identity = IdentityMapper(fingerprint(folder).geometry, torch.float32)
    one = TokenSequences(windows.ids_ST[:1], 1)
    report = scored(model, identity, one)
    assert OTHER_TEXT not in [row.name for row in report.rows]
    assert [one.split(":")[0] for one in report.absent_controls] == [OTHER_TEXT, RANDOM]
    assert report.local_attention is None


def test_reports_of_earlier_versions_are_read_with_unknowns() -> None:
    row = {"name": "mapped", "perplexity": 9.0, "kl_to_native": 0.1}
    row |= {"top1_agreement": 0.8, "attention_cosine": None}
    text = json.dumps(
        {
            "rows": [row],
            "windows": 1,
            "prefix_tokens": 2,
            "scored_tokens": 2,
            "injection_exact": True,
            "recovered_gap": 0.7,
            "verdict": "accept",
            "reasons": [],
        }
    )
    report = ScoreReport.model_validate_json(text)
    assert report.thresholds is None and report.row("mapped").layer_cosine_L is None
    assert ScoreReport.model_validate_json(report.model_dump_json()) == report


def test_perplexities_alone_decide_on_gap_source_and_controls() -> None:
    row = {"native": 20.0, "mapped": 40.0, "no prefix": 320.0, "source alone": 60.0}
    recovered, reasons = judge(row, injection_exact=True)
    assert recovered == pytest.approx(0.75) and reasons == ()
    assert "source model alone" in judge(row | {"source alone": 30.0}, True)[1][0]
    # A larger source that beats the target itself is no measure of the mapper.
    assert judge(row | {"source alone": 10.0}, True)[1] == ()
    assert "random mapper predicts nearly" in judge(row | {"random mapper": 45.0}, True)[1][0]
    assert judge(row | {"random mapper": 300.0}, True)[1] == ()
    strict = Thresholds(min_recovered_gap=0.9)
    assert "90% is required" in judge(row, True, strict)[1][0]


def local(mapped: float, **changes: Any) -> LocalAttention:
    rows = [[mapped, mapped]] * 4
    values: dict[str, Any] = {"mapped_LH": rows, "other_text_LH": [[0.5, 0.5]] * 4}
    values |= {"bucket_starts_B": [0, 4], "mapped_LB": rows, "other_text_LB": [[0.5, 0.5]] * 4}
    return LocalAttention(**(values | changes))


def test_one_bad_layer_head_or_bucket_is_named() -> None:
    row = {"native": 20.0, "mapped": 40.0, "no prefix": 320.0}
    good = [0.9, 0.9]

    def reasons(**changes: Any) -> tuple[str, ...]:
        return judge(row, True, None, None, local(0.9, **changes))[1]

    assert local(0.9).layer_share_L == pytest.approx([0.8] * 4)
    assert reasons() == ()
    assert "layer: 2 keeps 4%" in reasons(mapped_LH=[good, good, [0.52, 0.52], good])[0]
    # Far below the median, though above the bound that holds for every layer.
    assert "25% is required" in reasons(mapped_LH=[good, good, [0.6, 0.6], good])[0]
    assert "layer 3 head 1 keeps -40%" in reasons(mapped_LH=[good] * 3 + [[0.99, 0.3]])[0]
    assert "from 4 on 0% is kept" in reasons(mapped_LB=[[0.9, 0.5]] * 4)[0]
    # Where any text gives the same output there is nothing to lose.
    assert LocalAttention.share(0.99, 0.999) == pytest.approx(0.8)


def test_moved_values_are_refused_too() -> None:
    moved = Structure(shift=9, shift_error_keys=0.0, shift_error_values=0.5, misplaced=())
    row = {"native": 20.0, "mapped": 40.0, "no prefix": 320.0}
    assert "other values (error 50%" in judge(row, True, None, moved)[1][0]


def generation(native: int, mapped: int) -> GenerationReport:
    counts = {"native": native, "mapped": mapped, "no prefix": 0}
    return GenerationReport(
        rows=tuple(AnswerRow(name=n, correct=c, asked=20) for n, c in counts.items()),
        facts=4,
        context_tokens=50,
        examples=(),
        continuations=1,
        continuation_tokens=8,
        common_tokens=8,
        token_agreement=1,
        floor_normalised=mapped / native if native else None,
    )


def test_lost_recall_is_a_caution_where_the_target_can_recall() -> None:
    assert "3 of 20 are recalled" in cautions(generation(18, 3))[0]
    assert cautions(generation(18, 12)) == ()
    assert cautions(generation(8, 1)) == () == cautions(generation(0, 0))


def test_buckets_grow_fourfold_and_stay_within_the_prefix() -> None:
    assert bucket_starts(63) == (0, 4, 16)
    assert bucket_starts(1_023) == (0, 4, 16, 64, 256)
    assert bucket_starts(3) == (0,)
