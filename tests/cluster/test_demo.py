"""The demonstration's pure parts: statistics, verdict, rendering, port and files. No Ray."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster import demo
from cluster.demo_client import Answer, Piece
from cluster.demo_findings import Findings, Run, cpu_model, duration, problems_of, rows_of
from cluster.demo_print import AnswerWriter, bar, comparison_table, waterfall
from cluster.demo_scenes import EASY_QUESTIONS, REPETITIONS, SWITCH_AFTER_TOKENS, Scenes
from cluster.errors import ConfigError, EngineError
from router.api import CascadeInfo, HandoffInfo

# As the endpoint reported it for a conversation of 2,035 tokens.
RECORDED = {
    "served_by": [{"model": "small", "tokens": 2}, {"model": "large", "tokens": 1}],
    "decision": {"action": "escalate", "reason": "scheduled"},
    "handoff": {
        "path": "mapped",
        "handoff_ms": 200.0,
        "stages_ms": {
            "ticket": 20.0,
            "queue": 0.01,
            "read": 30.0,
            "map": 100.0,
            "write": 50.0,
            "wait_target": 0.0,
            "admit": 40.0,
        },
        "bytes_read": 24_000_000,
        "bytes_written": 48_000_000,
        "covered_tokens": 2_048,
        "reread_tokens": 3,
        "temperature": "warm",
    },
}
PIECES = (
    Piece(text="one", tokens=1, at_ms=10.0),
    Piece(text=" two", tokens=2, at_ms=15.0),
    Piece(text=" three", tokens=3, at_ms=215.0),
)


def _answer(**handoff: Any) -> Answer:
    report = {**RECORDED, "handoff": {**RECORDED["handoff"], **handoff}}  # type: ignore[dict-item]
    return Answer(pieces=PIECES, prompt_tokens=2_035, cascade=CascadeInfo.model_validate(report))


def _run(wanted: str, ms: float | None, *, tokens: int = 500, path: str | None = None) -> Run:
    answer = _answer(path=path or wanted, handoff_ms=ms, reason=None)
    return Run(tokens=tokens, repetition=1, wanted=wanted, answer=answer)


def _alone() -> Answer:
    info = CascadeInfo.model_validate({"served_by": [{"model": "small", "tokens": 3}]})
    return Answer(pieces=PIECES, prompt_tokens=9, cascade=info)


def _printed(renderable: Any, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def _findings(**fields: Any) -> Findings:
    return Findings(started="2026-01-01T00:00:00+00:00", machine={}, **fields)


def test_a_row_holds_medians_of_both_paths_and_their_ratio() -> None:
    runs = [_run("mapped", ms) for ms in (90.0, 300.0, 100.0)]
    runs += [_run("recompute", ms) for ms in (800.0, 500.0, 9_000.0)]
    (row,) = rows_of(runs)
    assert (row.mapped_ms, row.recompute_ms, row.repetitions) == (100.0, 800.0, 3)
    assert row.speedup == 8.0
    assert row.mapped_range_ms == (90.0, 300.0)


def test_rows_are_sorted_by_length() -> None:
    runs = [
        _run(wanted, 100.0, tokens=tokens)
        for tokens in (2_000, 500)
        for wanted in ("mapped", "recompute")
    ]
    assert [row.tokens for row in rows_of(runs)] == [500, 2_000]


def test_a_faster_mapped_path_is_no_problem() -> None:
    assert problems_of([_run("mapped", 100.0), _run("recompute", 500.0)]) == []


def test_a_slower_mapped_path_is_a_problem_that_names_its_length() -> None:
    runs = [_run("mapped", 100.0), _run("recompute", 500.0)]
    runs += [_run("mapped", 1_500.0, tokens=2_000), _run("recompute", 1_200.0, tokens=2_000)]
    assert problems_of(runs) == [
        "2,000 tokens: mapped KV took 1.50 s, not less than the 1.20 s of re-prefill"
    ]


def test_a_handoff_that_became_recompute_is_a_problem_and_stays_out_of_the_medians() -> None:
    fallen = Run(
        tokens=500,
        repetition=2,
        wanted="mapped",
        answer=_answer(path="recompute", handoff_ms=1.0, reason="deadline"),
    )
    runs = [_run("mapped", 100.0), fallen, _run("recompute", 500.0)]
    assert rows_of(runs)[0].mapped_ms == 100.0
    assert problems_of(runs) == [
        "500 tokens, repetition 2, mapped KV: went by re-prefill instead (deadline)"
    ]


def test_without_any_good_run_of_one_path_there_is_nothing_to_compare() -> None:
    problems = problems_of([_run("mapped", 100.0), _run("recompute", 5.0, path="mapped")])
    assert problems[-1] == "500 tokens: there is nothing to compare"


def test_an_answer_that_never_changed_models_is_a_problem() -> None:
    run = Run(tokens=500, repetition=1, wanted="mapped", answer=_alone())
    assert run.problem is not None and "nothing was handed over" in run.problem


def test_the_client_measures_the_pause_between_the_models() -> None:
    assert _answer().pause_ms == 200.0
    assert _alone().pause_ms is None


def test_an_easy_question_that_only_the_large_model_could_answer_is_a_problem() -> None:
    assert _findings(easy=[("q", _answer()), ("r", _alone())]).problems == []
    assert _findings(easy=[("q", _answer())]).problems == [
        "no easy question was answered by the small model alone"
    ]


def test_the_json_tells_what_failed_and_keeps_the_stages_of_every_run() -> None:
    found = _findings(runs=[_run("mapped", 100.0), _run("recompute", 500.0)], error="gone")
    content = found.as_json()
    assert (content["ok"], content["problems"]) == (False, ["gone"])
    assert content["runs"][0]["handoff"]["stages_ms"]["map"] == 100.0
    assert content["table"][0]["speedup"] == 5.0


@pytest.mark.parametrize(
    ("start_ms", "spent_ms", "drawn"),
    [
        (0.0, 100.0, "██████████"),
        (50.0, 20.0, "     ██   "),
        (90.0, 30.0, "       ███"),
        (100.0, 0.0, "         ▏"),
    ],
)
def test_a_bar_is_drawn_to_scale_and_stays_inside(
    start_ms: float, spent_ms: float, drawn: str
) -> None:
    assert bar(start_ms, spent_ms, 100.0, width=10) == drawn


def test_the_waterfall_begins_with_the_ticket_and_ends_with_the_total() -> None:
    handoff = _answer().cascade.handoff
    assert handoff is not None
    lines = _printed(waterfall(handoff), width=80).splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["ticket", "read", "map", "wait_target", "write", "admit", "total"]
    assert "100.0 ms" in lines[2] and "200.0 ms" in lines[-1]
    # The conversion ends where admitting begins, at 160 of 200 ms.
    write_end = lines[4].rindex("█")
    assert lines[5].index("█") == write_end + 1


def test_a_stage_unknown_here_is_drawn_too() -> None:
    handoff = HandoffInfo(path="mapped", handoff_ms=10.0, stages_ms={"copy": 5.0})
    assert _printed(waterfall(handoff)).startswith("copy")


def test_the_table_fits_eighty_columns() -> None:
    runs = [_run("mapped", 1_234.0, tokens=6_000), _run("recompute", 24_321.0, tokens=6_000)]
    text = _printed(comparison_table(rows_of(runs)), width=80)
    assert "1.23 s (1.23-1.23)" in text
    assert "24.32 s (24.32-24.32)" in text
    assert "19.7x" in text


def test_an_answer_is_marked_where_the_large_model_begins() -> None:
    console = Console(file=StringIO(), width=100)
    writer = AnswerWriter(console, 2)
    for piece in PIECES:
        writer(piece)
    assert console.file.getvalue() == "one two ‖  three"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("ms", "text"), [(12.4, "12 ms"), (999.0, "999 ms"), (1_234.0, "1.23 s")])
def test_durations_read_well(ms: float, text: str) -> None:
    assert duration(ms) == text


def test_the_processor_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU 9000\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU 9000"


def test_a_taken_port_is_replaced_unless_it_was_asked_for() -> None:
    console = Console(file=StringIO())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        document: dict[str, Any] = {"http_options": {"host": "127.0.0.1", "port": port}}
        with pytest.raises(ConfigError, match=f"port {port} .* choose another --port"):
            demo.choose_port(document, port, console)
        demo.choose_port(document, None, console)
    assert document["http_options"]["port"] not in (0, port)


def test_a_missing_folder_for_the_numbers_is_found_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it first"):
        demo.run_demo(keep=False, json_path=tmp_path / "none" / "numbers.json")


@dataclass
class Stage:
    """A demonstration without Ray: what `play` does is the test's; counts the stops."""

    play: Callable[[Findings], None]
    stopped: int = 0


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Everything heavy of `run_demo` replaced; all goes well unless `play` is replaced too."""
    stage = Stage(play=_good)

    class Played:
        def __init__(self, client: Any, model: str, talks: Any, found: Any, console: Any) -> None:
            self.found = found

        def play(self) -> None:
            stage.play(self.found)

    def stop() -> None:
        stage.stopped += 1

    monkeypatch.setattr("cluster.fitting.prepare_quickstart", lambda _: {"large": Path()})
    monkeypatch.setattr(demo, "conversations", lambda _: None)
    monkeypatch.setattr(demo, "connect", lambda _: None)
    monkeypatch.setattr(demo, "Scenes", Played)
    monkeypatch.setattr(demo.local, "start_local_ray", lambda: None)
    monkeypatch.setattr(demo.local, "deploy", lambda *_, **__: "http://127.0.0.1:1")
    monkeypatch.setattr(demo.local, "stop", stop)
    return stage


def _good(found: Findings) -> None:
    found.runs += [_run("mapped", 100.0), _run("recompute", 500.0)]


def test_a_demonstration_that_went_well_ends_with_0_and_writes_its_numbers(
    stage: Stage, tmp_path: Path
) -> None:
    file = tmp_path / "numbers.json"
    assert demo.run_demo(keep=False, json_path=file) == 0
    content = json.loads(file.read_text())
    assert content["ok"] and content["table"][0]["mapped_ms"] == 100.0
    assert stage.stopped == 1


def test_a_slower_mapped_path_ends_with_1(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.play = lambda found: found.runs.extend([_run("mapped", 9.0), _run("recompute", 5.0)])
    assert demo.run_demo(keep=False, json_path=None) == 1
    assert "500 tokens: mapped KV took 9 ms" in capsys.readouterr().out


def test_an_endpoint_that_fails_ends_with_1_and_keeps_what_was_measured(
    stage: Stage, tmp_path: Path
) -> None:
    def fail(found: Findings) -> None:
        _good(found)
        raise EngineError("the endpoint did not answer")

    stage.play = fail
    assert demo.run_demo(keep=False, json_path=tmp_path / "numbers.json") == 1
    content = json.loads((tmp_path / "numbers.json").read_text())
    assert content["problems"] == ["the endpoint did not answer"]
    assert len(content["runs"]) == 2 and stage.stopped == 1


def test_ctrl_c_stops_everything(stage: Stage) -> None:
    def interrupt(found: Findings) -> None:
        raise KeyboardInterrupt

    stage.play = interrupt
    assert demo.run_demo(keep=True, json_path=None) == demo.EXIT_INTERRUPTED
    assert stage.stopped == 1


def test_with_keep_ctrl_c_is_the_way_to_end_well(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        assert stage.stopped == 0
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.time, "sleep", interrupt)
    assert demo.run_demo(keep=True, json_path=None) == 0
    assert stage.stopped == 1


def test_the_scenes_measure_every_length_on_both_paths_with_conversations_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, Any]] = []

    def ask(client: Any, model: str, messages: Any, **wish: Any) -> Answer:
        asked.append((messages[-1]["content"], wish.get("cascade")))
        if (cascade := wish.get("cascade")) is None:
            return _alone()
        slow = cascade["recompute"]
        return _answer(path="recompute" if slow else "mapped", handoff_ms=900.0 if slow else 90.0)

    monkeypatch.setattr("cluster.demo_scenes.ask", ask)
    console = Console(file=StringIO(), width=80)
    found = _findings()
    Scenes(
        None,  # type: ignore[arg-type]
        "cascade",
        lambda tokens, repetition: [{"role": "user", "content": f"{tokens} {repetition}"}],
        found,
        console,
    ).play()

    assert found.problems == []
    assert {row.tokens: row.repetitions for row in rows_of(found.runs)} == REPETITIONS
    assert asked[0] == (EASY_QUESTIONS[0], None)
    # Conversation 0 of its length is the first handoff's alone.
    assert [content for content, _ in asked[1:3]] == ["500 0", "500 0"]
    assert all(content != "500 0" for content, _ in asked[3:])
    assert all(cascade["escalate_after_tokens"] == SWITCH_AFTER_TOKENS for _, cascade in asked[1:])
    firsts = [cascade["recompute"] for _, cascade in asked[5::2]]
    assert 0 < sum(firsts) < len(firsts)
