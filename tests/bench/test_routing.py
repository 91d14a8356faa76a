"""The routing bench from requests to its page, with a client that answers from a script."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from bench.prompts import Check, Prompt
from bench.routing import TARGETS, baseline_asks, repeated_asks, routed_asks
from bench.routing_collect import Answer, Ask, Cache, answer_of, collect
from bench.routing_costs import Prices
from bench.routing_page import page, plot
from bench.routing_report import LARGE, SMALL, Study, score_of
from bench.routing_serve import calibrated, variant, watching
from cluster.config import parse_cascade_config
from router.calibration import Calibration, Dependencies
from router.scores import ScoreSpec

SPEC = ScoreSpec(name="margin", window_tokens=2, last_token=256)
PROMPTS = [
    Prompt("fact", "alpha?", Check(("one",))),
    Prompt("fact", "beta?", Check(("two",))),
    Prompt("fact", "gamma?", Check(("three",))),
    Prompt("open", "Say something.", None),
]
SMALL_SAYS = ["it is wrong", "it is two", "no idea", "well well"]
LARGE_SAYS = ["it is one", "it is wrong", "it is three", "well then"]
# The lowest mean of two in a row, without the last: 1, 3, 2; the last answer is too short.
MARGINS: list[tuple[float | None, ...]] = [
    (1.0, 1.0, 9.0, 0.0),
    (4.0, 2.0, 4.0, 0.0),
    (3.0, None, 1.0, 5.0),
    (1.0, 1.0),
]


def calibration() -> Calibration:
    """Of nine answers that score 1 to 9."""
    names = dict.fromkeys(Dependencies.model_fields, "x")
    return Calibration(
        score=SPEC,
        target_fraction=0.3,
        scores=tuple(float(one) for one in range(1, 10)),
        ties=(0.5,) * 9,
        unscored=0,
        depends=Dependencies.model_validate(names),
        created_unix_s=0.0,
    )


class Script:
    """Answers at once; of a routed request, those prompts escalate whose number is in `doubted`."""

    def __init__(self, doubted: dict[float, tuple[int, ...]]) -> None:
        self.asked: list[Ask] = []
        self._doubted = doubted

    async def answer(self, ask: Ask) -> Answer:
        self.asked.append(ask)
        at = next(i for i, one in enumerate(PROMPTS) if one.key == ask.key)
        options = ask.cascade or {}
        target = options.get("target_fraction")
        escalated = target is not None and at in self._doubted[target]
        text = LARGE_SAYS[at] if ask.model == "large" or escalated else SMALL_SAYS[at]
        if options.get("recompute"):
            text = "read again, " + text
        # Prompts 0 and 3 are short, so that an escalation reads again; 1 and 2 are mapped.
        mapped = escalated and at in (1, 2) and not options.get("recompute")
        served = [{"model": ask.model, "tokens": 10}]
        if ask.model == "cascade":
            served = [{"model": "small", "tokens": 4 if escalated else 10}]
            served += [{"model": "large", "tokens": 6}] if escalated else []
        cascade: dict[str, Any] = {
            "served_by": served,
            "decision": {"action": "escalate" if escalated else "stay", "reason": "x"},
        }
        if escalated:
            cascade["handoff"] = {
                "path": "mapped" if mapped else "recompute",
                "covered_tokens": 20 if mapped else 0,
                "bytes_read": 100 if mapped else 0,
                "bytes_written": 200 if mapped else 0,
            }
        return Answer.model_validate(
            {
                "key": ask.key,
                "run": ask.run,
                "text": text,
                "prompt_tokens": 30,
                "tokens": 10,
                "finish_reason": "stop",
                "cascade": cascade,
                "margins": MARGINS[at] if ask.margins else None,
            }
        )


def everything(folder: Path, script: Script) -> Cache:
    """All phases against the script."""
    cache = Cache(folder / "answers.jsonl")
    made = calibration().calibration_id

    def run(asks: list[Ask]) -> None:
        asyncio.run(collect(script, asks, cache, concurrency=3, advance=lambda: None))

    run(baseline_asks(PROMPTS[:2], PROMPTS, "cascade", "small", "large"))
    run(routed_asks(PROMPTS, "cascade", made))
    run(repeated_asks(PROMPTS, "cascade", made, cache))
    return cache


DOUBTED = {0.1: (), 0.3: (0,), 0.5: (0, 2), 0.7: (0, 2, 3), 0.9: (0, 1, 2, 3)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = everything(tmp_path_factory.mktemp("bench"), Script(DOUBTED))
    names = {SMALL: "small", LARGE: "large"}
    prices = Prices(1.0, 10.0, 2.0)
    return Study(PROMPTS, PROMPTS[:2], cache, calibration(), TARGETS, names, prices).report()


def test_each_prompt_is_asked_once_and_only_mapped_answers_again(tmp_path: Path) -> None:
    script = Script(DOUBTED)
    everything(tmp_path, script)
    again = [one for one in script.asked if (one.cascade or {}).get("recompute")]
    # Prompt 2 is mapped at 0.5, 0.7 and 0.9, prompt 1 at 0.9.
    assert len(again) == 4 and len({one.cascade["session_id"] for one in again if one.cascade}) == 4
    routed = [one for one in script.asked if one.cascade and not one.cascade["recompute"]]
    assert len(routed) == 20
    assert {one.cascade["target_fraction"] for one in routed if one.cascade} == set(TARGETS)


def test_a_second_run_asks_only_what_the_first_did_not_finish(tmp_path: Path) -> None:
    everything(tmp_path, Script(DOUBTED))
    path = tmp_path / "answers.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-2], lines[-2][:40]]))  # cut in the middle of a line
    script = Script(DOUBTED)
    everything(tmp_path, script)
    assert len(script.asked) == 2
    assert sorted(path.read_text().splitlines()) == sorted(lines)


def test_an_error_ends_the_run_and_keeps_what_was_answered(tmp_path: Path) -> None:
    class Broken(Script):
        async def answer(self, ask: Ask) -> Answer:
            if len(self.asked) == 3:
                raise ConnectionError("gone")
            return await super().answer(ask)

    asks = routed_asks(PROMPTS, "cascade", "x")
    cache = Cache(tmp_path / "answers.jsonl")
    with pytest.raises(ConnectionError):
        asyncio.run(collect(Broken(DOUBTED), asks, cache, concurrency=1, advance=lambda: None))
    assert len(Cache(tmp_path / "answers.jsonl").lacks(asks)) == 17


def test_the_score_is_the_lowest_window_without_the_last_token() -> None:
    assert [score_of(one, SPEC) for one in MARGINS] == [1.0, 3.0, 2.0, None]


def test_quality_curves_are_those_of_the_script(report: dict[str, Any]) -> None:
    right = report["qualities"]["right"]
    # Right: small 1 of 3, large 2 of 3 (prompts 0 and 2).
    assert (right["small"], right["large"]) == pytest.approx((1 / 3, 2 / 3))
    mapped = dict(zip(TARGETS, right["curves"]["cascade, mapped"], strict=True))
    assert mapped[0.1] == pytest.approx((0, 1 / 3))
    assert mapped[0.3] == pytest.approx((1 / 3, 2 / 3))
    assert mapped[0.5] == pytest.approx((2 / 3, 1))
    assert mapped[0.9] == pytest.approx((1, 2 / 3))
    # 0.5 of three is two: the doubtful ones, prompts 0 and 2, and the large model knows both.
    assert right["curves"]["score, whole answers"][2] == pytest.approx((2 / 3, 1))
    assert dict(right["curves"]["oracle"])[1.0] == pytest.approx(2 / 3)
    # 0.65 of three is 1.95 answers: one rescue, and 0.95 of the other.
    assert dict(right["curves"]["oracle"])[0.65] == pytest.approx((1 + 1.95) / 3)
    assert right["summary"]["cascade, mapped"]["cpt50"] == pytest.approx(1 / 6)
    like = report["qualities"]["likeness"]
    # F1 of words with the large answer: 2/3, 2/3, 0 and 1/2.
    assert like["small"] == pytest.approx((2 / 3 + 2 / 3 + 0 + 1 / 2) / 4) and like["large"] == 1


def test_realised_fractions_stand_beside_both_intervals(report: dict[str, Any]) -> None:
    row = report["targets"][1]
    assert row["realised"] == 0.25 and row["gap"] == pytest.approx(0.05)
    # Rank 3 of 9: Beta(3, 7).
    assert row["interval"] == pytest.approx([0.0977, 0.5496], abs=1e-3) and row["inside"]
    assert row["share_interval"] == [0.0, 0.75] and row["share_inside"]
    assert row["threshold_nats"] == 3.0
    assert [one["mapped_handoffs"] for one in report["targets"]] == [0, 0, 1, 1, 2]
    # Thresholds 1, 3, 5, 7, 9: at 0.3 prompt 2 scores 2 but stays; at 0.9 prompt 3 has no score.
    assert [one["unexpected"] for one in report["targets"]] == [0, 1, 1, 2, 1]


def test_the_score_and_the_quadrants_are_counted(report: dict[str, Any]) -> None:
    # Wrong at scores 1 and 2, right at 3.
    assert report["score"]["auroc_wrong"] == 1 and report["score"]["unscored"] == 1
    assert report["quadrants"]["all"] == {"RESCUE": 2, "LOSS": 1, "SAFE": 0, "HARD": 0}
    assert report["quadrants"]["0.9"]["LOSS"] == 1 and report["quadrants"]["0.5"]["LOSS"] == 0
    assert report["handoffs"]["answers"] == 4 and report["handoffs"]["equal"] == 0
    # Reading again puts two words before: F1 of three words and five is 6 / 8.
    assert report["handoffs"]["likeness"] == pytest.approx(0.75)


def test_costs_count_reading_writing_mapping_and_bytes(report: dict[str, Any]) -> None:
    costs = report["costs"]
    assert costs["always small"]["flop"] == 40 and costs["always large"]["flop"] == 400
    last = costs["0.9, mapped"]
    # All escalate: 30 read and 4 written by small; large reads 34, or 14 after 20 mapped tokens.
    assert last["small_tokens_read"] == 30 and last["large_tokens_read"] == (34 * 2 + 14 * 2) / 4
    assert last["flop"] == 34 + 10 * (24 + 6) + 2 * 10 and last["moved_bytes"] == 150
    assert costs["0.9, read again"]["flop"] == 34 + 10 * (34 + 6)
    assert last["flop_of_large"] == pytest.approx(354 / 400)


def test_the_page_and_the_plot_hold_the_numbers(report: dict[str, Any], tmp_path: Path) -> None:
    text = page(json.loads(json.dumps(report)), 48)
    assert "`right`: always small 0.333, always large 0.667." in text
    assert "| 0.3 | 0.250 | 0.050 | 0.098 to 0.550 | yes | 0.000 to 0.750 | yes |" in text
    assert "| all | 2 | 1 | 0 | 0 |" in text
    plot(report, tmp_path / "routing.png")
    assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_a_response_becomes_a_record_with_margins_of_the_two_likeliest() -> None:
    def token(*logprobs: float) -> dict[str, Any]:
        top = [{"token": "a", "logprob": one, "bytes": None} for one in logprobs]
        return {"token": "a", "logprob": logprobs[0], "bytes": None, "top_logprobs": top}

    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "cascade",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": "hi there"},
                "logprobs": {"content": [token(-0.25, -2.0), token(-3.0, -0.5), token(-1.0)]},
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        "cascade": {"served_by": [{"model": "small", "tokens": 3}]},
    }
    ask = Ask(key="k", run="r", text="t", model="cascade", margins=True)
    found = answer_of(ask, ChatCompletion.model_validate(body))
    assert found.margins == (1.75, 2.5, None)
    assert (found.prompt_tokens, found.tokens, found.written("small")) == (7, 3, 3)
    assert not found.escalated


def test_the_served_configs_differ_from_the_quickstart_in_routing_alone(
    repository: Path, tmp_path: Path
) -> None:
    from cluster.cli import QUICKSTART_CONFIG
    from cluster.config import load_serve_config

    document, plain = load_serve_config(QUICKSTART_CONFIG)
    for routing in (watching(tmp_path / "log"), calibrated(tmp_path / "file")):
        changed = variant(document, routing, 8123)
        assert changed["http_options"]["port"] == 8123
        config = parse_cascade_config(changed["applications"][0]["args"])
        assert config.routing.policy == "margin"
        assert config.routing.hold_back_tokens == plain.routing.hold_back_tokens
        assert config.model_copy(update={"routing": plain.routing}) == plain
    assert document["http_options"]["port"] == 8000
