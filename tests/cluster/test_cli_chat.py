"""`kvcascade chat` against an endpoint that answers from a script."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.chat_client import Reply
from cluster.chat_view import TerminalView, account, sparkline
from cluster.cli import app
from router.api import CascadeInfo
from tests import fake_endpoint as told
from tests.fake_endpoint import FakeEndpoint, fake_endpoint

SMALL, LARGE = "".join(told.SMALL_WORDS), "".join(told.LARGE_WORDS)


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as found:
        yield found


def run(url: str, *words: str, **options: Any) -> Any:
    options.setdefault("env", {"COLUMNS": "140"})
    return CliRunner().invoke(app, ["chat", "--url", url, *words], **options)


def json_lines(shown: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown.splitlines()]


def test_one_question_shows_the_answer_who_wrote_it_and_what_the_handoff_cost(
    endpoint: FakeEndpoint,
) -> None:
    done = run(endpoint.url, "--once", "hard")
    assert done.exit_code == 0, done.output
    shown = done.stdout
    assert f"{SMALL} ‖ {LARGE}" in shown
    assert "tiny-1b 4 tokens, then huge-70b 6 tokens: low margin, score 0.20 below 0.50" in shown
    assert "0.20 to 2.00 nats, threshold 0.50" in shown
    assert "map     ██████████████                 200.0 ms" in shown
    assert "reading again would have taken about 1.60 s" in shown
    assert "209 MB moved; held 202, converted 1,000; reread 36" in shown


def test_a_recompute_says_why_instead_of_drawing_stages(endpoint: FakeEndpoint) -> None:
    shown = run(endpoint.url, "--once", "hard", "--recompute").stdout
    assert "the large model read again: requested; 1.20 s" in shown
    assert "█" not in shown.partition("the large model read again")[2]


def test_each_models_tokens_have_its_colour() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", highlight=False)
    view = TerminalView(console, {"tiny-1b": "small", "huge-70b": "large"}.__getitem__)
    reply = Reply(model=None)
    for word, run_ in (("one ", ["tiny-1b"]), ("two", ["tiny-1b", "huge-70b"])):
        runs = [{"model": name, "tokens": 1} for name in run_]
        event = {
            "cascade": {"served_by": runs},
            "choices": [{"delta": {"content": word}, "logprobs": {"content": [{"token": word}]}}],
        }
        view.tokens(reply.take(event), reply)
    assert out.getvalue() == "\x1b[36mone \x1b[0m\x1b[2m ‖ \x1b[0m\x1b[1;32mtwo\x1b[0m"


def test_a_models_text_cannot_steer_the_terminal() -> None:
    out = StringIO()
    view = TerminalView(Console(file=out, highlight=False), str)
    reply = Reply(model="m")
    event = {"choices": [{"delta": {"content": "a\x1b[31mb\x07[bold]c\n\x9bd"}}]}
    view.tokens(reply.take(event), reply)
    assert out.getvalue() == "a[31mb[bold]c\nd"


def test_events_are_json_lines_that_name_each_tokens_model_and_margin(
    endpoint: FakeEndpoint,
) -> None:
    events = json_lines(run(endpoint.url, "--once", "hard", "--json").stdout)
    assert [event["event"] for event in events] == ["tokens"] * 9 + ["answer"]
    tokens = [token for event in events[:-1] for token in event["tokens"]]
    assert [(token["text"], token["model"]) for token in tokens] == [
        *((word, "tiny-1b") for word in told.SMALL_WORDS),
        *((word, "huge-70b") for word in told.LARGE_WORDS),
    ]
    assert {token["margin_nats"] for token in tokens} == {1.25}
    scores = [tuple(score) for event in events[:-1] for score in event["scores"]]
    assert scores == [*told.SCORES[:4], *told.DROPPED]
    answer = events[-1]
    assert answer["text"] == SMALL + LARGE
    assert answer["cascade"]["handoff"]["handoff_ms"] == told.HANDOFF_MS
    assert (answer["tokens"], answer["prompt_tokens"]) == (10, 1234)


def test_turns_share_a_session_and_the_conversation(endpoint: FakeEndpoint) -> None:
    done = run(endpoint.url, "--json", input="easy\n\nrefuse\nhard\n")
    assert done.exit_code == 0
    names = [event["event"] for event in json_lines(done.stdout) if event["event"] != "tokens"]
    assert names == ["answer", "error", "answer"]
    first, _, last = endpoint.bodies
    assert [message["content"] for message in last["messages"]] == ["easy", SMALL, "hard"]
    assert first["cascade"]["session_id"] == last["cascade"]["session_id"]


def test_options_become_those_of_the_request(endpoint: FakeEndpoint) -> None:
    run(endpoint.url, "--once", "easy", "--policy", "random", "--target-fraction", "0.25")
    run(endpoint.url, "--once", "easy", "--force", "large", "--max-tokens", "7")
    run(endpoint.url, "--once", "easy", "--escalate-after-tokens", "0", "--recompute")
    wishes = [body["cascade"] for body in endpoint.bodies]
    sessions = {wish.pop("session_id") for wish in wishes}
    assert len(sessions) == 3
    assert wishes == [
        {"explain": True, "policy": "random", "target_fraction": 0.25},
        {"explain": True, "force": "large"},
        {"explain": True, "escalate_after_tokens": 0, "recompute": True},
    ]
    assert endpoint.bodies[1]["max_tokens"] == 7


def test_a_fixed_model_is_asked_without_routing_options(endpoint: FakeEndpoint) -> None:
    done = run(endpoint.url, "--once", "easy", "--model", "huge-70b")
    assert "4 tokens by huge-70b" in done.stdout
    assert "cascade" not in endpoint.bodies[0]


def test_nothing_there_is_one_line_that_says_what_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = run(url, "--once", "easy")
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert f"nothing answers at {url}: start the cascade with `kvcascade serve`" in done.stderr


def test_a_refusal_is_the_endpoints_own_words_and_a_mistake_of_the_user(
    endpoint: FakeEndpoint,
) -> None:
    done = run(endpoint.url, "--once", "refuse")
    assert (done.exit_code, done.stderr) == (
        2,
        "error: cascade.target_fraction: no calibration\n",
    )


def test_an_answer_that_breaks_off_is_a_failure(endpoint: FakeEndpoint) -> None:
    done = run(endpoint.url, "--once", "break")
    assert done.exit_code == 1
    assert "Well" in done.stdout
    assert "the engine ended" in done.stderr


def test_the_key_comes_from_the_environment_and_its_absence_is_explained(
    endpoint: FakeEndpoint,
) -> None:
    endpoint.wanted_key = "k-1"
    refused = run(endpoint.url, "--once", "easy")
    assert refused.exit_code == 2
    assert "KVCASCADE_API_KEY" in refused.stderr
    assert run(endpoint.url, "--once", "easy", env={"KVCASCADE_API_KEY": "k-1"}).exit_code == 0
    assert endpoint.keys[-1] == "Bearer k-1"


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(endpoint: FakeEndpoint) -> None:
    code = "from cluster.cli import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "chat", "--url", endpoint.url, "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write("wait\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["event"] == "tokens"
        process.send_signal(signal.SIGINT)
        while (event := json.loads(process.stdout.readline())["event"]) == "tokens":
            pass
        assert event == "stopped"
        assert endpoint.left.wait(20)
        process.stdin.write("easy\n")
        process.stdin.flush()
        while json.loads(process.stdout.readline())["event"] != "answer":
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    messages = endpoint.bodies[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"].startswith("more ")


def test_tokens_that_share_a_character_are_shown_when_it_is_whole() -> None:
    entries = [{"token": "�"}, {"token": "�"}, {"token": " x"}]
    event = {
        "choices": [{"delta": {"content": "é x"}, "logprobs": {"content": entries}}],
        "cascade": {
            "served_by": [{"model": "s", "tokens": 2}, {"model": "l", "tokens": 1}],
            "scores": [],
        },
    }
    reply = Reply(model=None)
    assert [(token.text, token.model) for token in reply.take(event)] == [("é x", "l")]
    assert reply.tokens == 3


def test_the_sparkline_keeps_the_lowest_score_of_a_character() -> None:
    drawn = sparkline([(1, 8.0), (2, 1.0), (3, 8.0), (4, None), (5, 4.0), (6, 8.0)], 2.0, width=3)
    assert drawn is not None
    assert drawn.plain == "score ▂█▅ 1.00 to 8.00 nats, threshold 2.00 ▃"
    assert [span.style for span in drawn.spans][1:4] == ["red", "cyan", "cyan"]


def test_a_sparkline_needs_a_score_and_may_be_negative() -> None:
    assert sparkline([(1, None)], 0.5) is None
    drawn = sparkline([(0, -4.0), (1, -2.0)], -3.0)
    assert drawn is not None
    assert drawn.plain == "score ▁█ -4.00 to -2.00 nats, threshold -3.00 ▅"


def test_an_account_without_a_decision_says_who_wrote() -> None:
    info = CascadeInfo.model_validate({"served_by": [{"model": "tiny", "tokens": 3}]})
    assert account(info) == "tiny 3 tokens"
