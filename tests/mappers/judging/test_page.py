"""The page of a report: complete, self-contained, and honest about what is missing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mappers.judging.page import page
from mappers.judging.plots import layer_plot
from mappers.judging.records import LocalAttention, ScoreReport, ScoreRow, Structure, Thresholds
from mappers.judging.report import (
    AnswerRow,
    DirectionReport,
    DriftReport,
    DriftTurn,
    Example,
    GenerationReport,
    PairReport,
)

LOCAL = LocalAttention(
    mapped_LH=((0.9, 0.8), (0.7, 0.95)),
    other_text_LH=((0.5, 0.5), (0.4, 0.6)),
    bucket_starts_B=(0, 4),
    mapped_LB=((0.9, 0.8), (0.9, 0.8)),
    other_text_LB=((0.5, 0.5), (0.5, 0.5)),
)


def score(**changes: Any) -> ScoreReport:
    row = ScoreRow(
        name="mapped",
        perplexity=9.25,
        kl_to_native=0.123,
        top1_agreement=0.875,
        attention_cosine=None,
        recovered_gap=0.71,
    )
    values: dict[str, Any] = {
        "rows": (row,),
        "windows": 3,
        "prefix_tokens": 256,
        "scored_tokens": 255,
        "injection_exact": True,
        "recovered_gap": 0.71,
        "verdict": "refuse",
        "reasons": ("layer 1 holds keys that belong to layer 2",),
        "local_attention": LOCAL,
        "structure": Structure(
            shift=9, shift_error_keys=0.002, shift_error_values=0.0, misplaced=()
        ),
        "absent_controls": ("random mapper: not linear",),
        "thresholds": Thresholds(),
    }
    return ScoreReport(**(values | changes))


GENERATION = GenerationReport(
    rows=(
        AnswerRow(name="native", correct=7, asked=8),
        AnswerRow(name="mapped", correct=5, asked=8),
    ),
    facts=6,
    context_tokens=80.0,
    examples=(Example(question="Which <code>?", expected="123", native="123", mapped="128"),),
    continuations=2,
    continuation_tokens=32,
    common_tokens=7.5,
    token_agreement=0.4,
    floor_normalised=None,
)


def direction(**changes: Any) -> DirectionReport:
    values: dict[str, Any] = {
        "source": "small",
        "target": "large",
        "mapper": "folder",
        "mapper_id": "abc",
        "score": score(),
        "generation": GENERATION,
        "cautions": ("facts are lost",),
    }
    return DirectionReport(**(values | changes))


def turns(step: float) -> tuple[DriftTurn, ...]:
    return tuple(
        DriftTurn(
            turn=turn,
            owner=("source", "target")[turn % 2],
            nll=2.0 + step * turn,
            native_nll=2.0,
            kl_to_native=step * turn,
            top1_agreement=0.9,
        )
        for turn in range(1, 5)
    )


@pytest.fixture(scope="module")
def report() -> PairReport:
    accepted = score(verdict="accept", reasons=())
    back = direction(source="large", target="small", score=accepted, cautions=())
    return PairReport(
        forward=direction(),
        reverse=back,
        drift=DriftReport(conversations=2, turn_tokens=46, kept=turns(0.1), remapped=turns(0.2)),
        notes=("a note",),
        created_by="kvcascade",
        created_at="2026-01-01",
    )


def test_the_page_says_verdict_reasons_bounds_and_numbers(report: PairReport) -> None:
    html = page(report)
    assert "<title>small → large: refuse</title>" in html
    assert html.index("small → large: refuse</b>") < html.index("large → small: accept</b>")
    assert "<li>layer 1 holds keys that belong to layer 2</li>" in html
    assert html.count("Caution: facts are lost.") == 1
    assert "<td>min_recovered_gap</td><td>0.5</td>" in html
    assert "<td>mapped</td><td>9.25</td><td>0.123</td><td>0.875</td><td>–</td><td>71%</td>" in html
    assert "Not run: random mapper: not linear." in html
    assert "<td>native</td><td>7 of 8</td><td>88%</td>" in html
    assert "<td>4, source</td><td>2.000</td><td>2.400</td><td>0.400</td>" in html
    # The worst head comes first: layer 1 head 0 keeps 1 - 0.3 / 0.6.
    assert html.index("<td>1, 0</td><td>0.700</td><td>0.400</td><td>50%</td>") > 0
    assert "a note" in html


def test_the_page_needs_nothing_from_outside(report: PairReport) -> None:
    html = page(report)
    assert html.count("<svg") == 5 == html.count("</svg>")
    assert "<script" not in html and "<img" not in html and "<link" not in html
    # Names of XML vocabularies are no requests.
    addresses = set(re.findall(r"(?:href|src)=\"([^\"]*)\"", html))
    assert all(address.startswith("#") for address in addresses)
    assert "Which &lt;code&gt;?" in html


def test_what_was_not_measured_is_left_out(report: PairReport) -> None:
    bare = score(local_attention=None, structure=None)
    html = page(report.model_copy(update={"reverse": None, "drift": None}))
    assert html.count("<svg") == 2 and "alternating" not in html
    one_place = LOCAL.model_copy(
        update={"bucket_starts_B": (), "mapped_LB": ((), ()), "other_text_LB": ((), ())}
    )
    assert one_place.bucket_share_B == ()
    same_text = direction(score=score(local_attention=one_place))
    html = page(report.model_copy(update={"forward": same_text, "reverse": None, "drift": None}))
    assert html.count("<svg") == 1
    alone = report.model_copy(
        update={"forward": direction(score=bare), "reverse": None, "drift": None}
    )
    assert page(alone).count("<svg") == 0


def test_plots_are_the_same_every_time() -> None:
    assert layer_plot(LOCAL, Thresholds()) == layer_plot(LOCAL, Thresholds())


def test_a_report_reads_back_as_written(report: PairReport) -> None:
    assert PairReport.model_validate_json(report.model_dump_json()) == report
