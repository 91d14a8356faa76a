"""The web page in a real browser, against an endpoint that answers from a script."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from cluster.config import PolicyName
from deployments.page import CONTENT_SECURITY_POLICY, page_files
from tests import fake_endpoint as told
from tests.deployments.browser import Tab, browser
from tests.fake_endpoint import FakeEndpoint, fake_endpoint

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TOKENS = "[...document.querySelectorAll('.turn:last-child .body .token')]"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium as `chromium`")


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as found:
        yield found


@pytest.fixture
def tab(connection: Any, endpoint: FakeEndpoint) -> Iterator[Tab]:
    found = Tab(connection)
    found.resize(1400, 1000)
    found.open(endpoint.url)
    wait_state(found, "Ready")
    yield found
    assert {re.sub(r"(?<=\d)/.*", "", url) for url in found.requests} == {endpoint.url}
    found.close()


def wait_state(tab: Tab, words: str) -> None:
    tab.wait(f"document.getElementById('state')?.textContent.includes({words!r})")


def write(tab: Tab, question: str) -> None:
    tab.value("document.getElementById('prompt').focus()")
    tab.type(question)
    tab.press("Enter")


def ask(tab: Tab, question: str) -> None:
    write(tab, question)
    wait_state(tab, "Answered")


def choose(tab: Tab, field: str, value: str) -> None:
    at = f"document.getElementById({field!r})"
    tab.value(f"{at}.value = {value!r}, {at}.dispatchEvent(new Event('change'))")


def widths(tab: Tab, table: str) -> dict[str, float]:
    """Pixels of every bar of a table, by its row's name."""
    rows = f"[...document.querySelectorAll('.{table} tr')]"
    measure = "row.querySelector('.bar').getBoundingClientRect().width"
    found: dict[str, float] = tab.value(
        f"Object.fromEntries({rows}.map(row => [row.dataset.row, {measure}]))"
    )
    return found


def test_every_file_that_the_page_names_is_served_with_its_type() -> None:
    files = page_files()
    assert set(files) >= {"/", "/app.js", "/style.css"}
    for path, (content_type, content) in files.items():
        text = content.decode()
        named = re.findall(r'(?:src|href)="([\w.]+)"|from "\./([\w.]+)"', text)
        assert {f"/{''.join(one)}" for one in named} <= set(files), path
        kind = {"/": "text/html", "css": "text/css", "svg": "image/svg+xml"}
        assert content_type.startswith(kind.get(path.rsplit(".")[-1], "text/javascript"))


def test_nothing_in_the_page_needs_more_than_its_security_policy_gives() -> None:
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'self';")
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    for content in (content.decode() for _, content in page_files().values()):
        assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", content) == []
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", content) == []


def test_the_page_offers_every_policy() -> None:
    html = page_files()["/"][1].decode()
    select = html.partition('<select id="policy">')[2].partition("</select>")[0]
    assert re.findall(r"<option>(\w+)</option>", select) == list(get_args(PolicyName))


@needs_browser
def test_each_token_has_the_class_of_the_model_that_wrote_it(tab: Tab) -> None:
    ask(tab, "hard")
    written = tab.value(f"{TOKENS}.map(one => [one.className, one.textContent])")
    small = [["token small", word] for word in told.SMALL_WORDS]
    assert written == small + [["token large", word] for word in told.LARGE_WORDS]
    assert tab.value(f"{TOKENS}[0].title") == "tiny-1b, margin 1.25 nats"
    assert tab.value("document.querySelectorAll('.turn .change').length") == 1
    assert "huge-70b" in tab.value("document.getElementById('large-name').textContent")
    assert tab.complaints == []


@needs_browser
def test_the_curve_has_a_point_for_every_score_and_the_threshold_at_its_height(tab: Tab) -> None:
    ask(tab, "hard")
    # All at once: the curve is drawn again when the page gets another width.
    points, line, mark = tab.value(
        "[[...document.querySelectorAll('.curve circle')].map(one => [+one.getAttribute('cx'),"
        "+one.getAttribute('cy')]),"
        "document.querySelector('.curve .threshold').getAttribute('y1'),"
        "document.querySelector('.curve .escalation').getAttribute('x1')]"
    )
    scores = [*told.SCORES[:4], *told.DROPPED]
    known = [(token, score) for token, score in scores if score is not None]
    assert len(points) == len(known)
    # Two scores set the scale; the threshold and all others must lie on it.
    (first, last), (high, low) = (points[0][1], points[-1][1]), (known[0][1], known[-1][1])

    def height(nats: float) -> float:
        return float(first + (high - nats) / (high - low) * (last - first))

    assert [y for _, y in points] == pytest.approx([height(s) for _, s in known], abs=0.2)
    assert float(line) == pytest.approx(height(told.THRESHOLD), abs=0.2)
    assert float(mark) == pytest.approx(points[-1][0], abs=0.2)
    assert tab.value("document.querySelectorAll('.curve .below').length") == 1


@needs_browser
def test_the_dropped_tokens_are_shaded_and_an_unescalated_answer_has_no_mark(tab: Tab) -> None:
    ask(tab, "hard")
    assert tab.value("document.querySelectorAll('.curve .dropped').length") == 1
    tab.value("document.getElementById('fresh').click()")
    ask(tab, "easy")
    assert tab.value("document.querySelectorAll('.curve circle').length") == 3
    assert tab.value("document.querySelectorAll('.curve .escalation, .curve .dropped').length") == 0


@needs_browser
def test_the_waterfalls_bars_are_in_proportion(tab: Tab) -> None:
    ask(tab, "hard")
    ways = widths(tab, "comparison")
    part = told.HANDOFF_MS / told.PREDICTED_MS
    assert ways["converted cache"] / ways["reading again, predicted"] == pytest.approx(
        part, rel=0.02
    )
    stages = widths(tab, "stages")
    shown = {name: spent for name, spent in told.STAGES_MS.items() if name != "queue"}
    assert set(stages) == set(shown)
    for name, spent in shown.items():
        assert stages[name] / stages["map"] == pytest.approx(
            spent / told.STAGES_MS["map"], rel=0.05
        )


@needs_browser
def test_answering_again_reads_in_a_session_of_its_own_and_draws_the_measured_bar(
    tab: Tab, endpoint: FakeEndpoint
) -> None:
    ask(tab, "hard")
    tab.value("document.querySelector('.handoff button').click()")
    tab.wait("document.querySelector('.bars .measured')")
    ways = widths(tab, "comparison")
    part = told.HANDOFF_MS / told.MEASURED_MS
    assert ways["converted cache"] / ways["reading again, measured"] == pytest.approx(
        part, rel=0.02
    )
    first, again = endpoint.bodies
    assert again["messages"] == first["messages"]
    assert again["cascade"]["recompute"] is True
    assert again["cascade"]["escalate_after_tokens"] == len(told.SMALL_WORDS)
    assert again["cascade"]["session_id"] != first["cascade"]["session_id"]
    assert "It read 1,238 tokens again." in tab.value(
        "document.querySelector('.again').textContent"
    )


@needs_browser
def test_a_handoff_before_the_answer_is_shown_and_cannot_be_repeated(tab: Tab) -> None:
    ask(tab, "back")
    ways = widths(tab, "comparison")
    assert ways["converted cache"] / ways["reading again, predicted"] == pytest.approx(
        0.5, rel=0.02
    )
    assert tab.value("document.querySelectorAll('.handoff').length") == 1
    assert tab.value("document.querySelectorAll('.handoff button').length") == 0


@needs_browser
def test_a_second_turn_carries_the_first_in_the_same_session(
    tab: Tab, endpoint: FakeEndpoint
) -> None:
    ask(tab, "easy")
    tab.value("document.getElementById('state').textContent = ''")
    ask(tab, "hard")
    first, second = endpoint.bodies
    assert second["messages"] == [
        {"role": "user", "content": "easy"},
        {"role": "assistant", "content": "".join(told.SMALL_WORDS)},
        {"role": "user", "content": "hard"},
    ]
    assert first["cascade"] == second["cascade"]
    assert first["cascade"]["explain"] is True
    assert (first["logprobs"], first["top_logprobs"]) == (True, 2)
    facts = tab.value("document.querySelector('.turn:last-child .facts').innerText")
    words = re.sub(r"\s+", " ", facts)
    for known in (
        "Prompt 1,234 tokens",
        "Moved 70 MB read, 139 MB written",
        "Held already 202 tokens",
        "Converted 1,000 tokens",
        "Read again 36 tokens",
        "Turn 2",
    ):
        assert known in words


@needs_browser
def test_the_settings_become_the_requests_options(tab: Tab, endpoint: FakeEndpoint) -> None:
    choose(tab, "policy", "random")
    choose(tab, "target", "0.25")
    ask(tab, "easy")
    choose(tab, "route", "after")
    choose(tab, "after-tokens", "3")
    tab.value("document.getElementById('recompute').click()")
    tab.value("document.getElementById('state').textContent = ''")
    ask(tab, "easy")
    tab.value("document.getElementById('recompute').click()")
    choose(tab, "route", "large")
    tab.value("document.getElementById('state').textContent = ''")
    ask(tab, "easy")
    wishes = [body["cascade"] for body in endpoint.bodies]
    for wish in wishes:
        del wish["session_id"], wish["explain"]
    assert wishes == [
        {"policy": "random", "target_fraction": 0.25},
        {"escalate_after_tokens": 3, "recompute": True},
        {"force": "large"},
    ]


@needs_browser
def test_a_fixed_model_is_asked_without_routing_options(tab: Tab, endpoint: FakeEndpoint) -> None:
    choose(tab, "model", "huge-70b")
    ask(tab, "easy")
    assert "cascade" not in endpoint.bodies[0]
    assert tab.value(f"{TOKENS}[0].className") == "token large"
    assert tab.value("document.getElementById('routing').disabled") is True


@needs_browser
def test_the_running_panel_shows_the_endpoints_statistics(tab: Tab) -> None:
    tab.wait("document.querySelector('#stats .history')")
    words = re.sub(r"\s+", " ", tab.value("document.getElementById('stats').innerText"))
    for known in (
        "Policy margin",
        "Escalated 12",
        "Realised 30 %",
        "Target 25 %",
        "Mapped handoffs 10",
        "Read again 1",
        "Cancelled 1",
        "Prefill saved 12.3 s",
    ):
        assert known in words


@needs_browser
def test_a_refused_request_is_told_in_words_and_the_question_stays(
    tab: Tab, endpoint: FakeEndpoint
) -> None:
    write(tab, "refuse")
    tab.wait("document.querySelector('.failed')")
    words = tab.value("document.querySelector('.failed').textContent")
    assert words == "cascade.target_fraction: no calibration"
    assert tab.value("document.getElementById('prompt').value") == "refuse"
    tab.value("document.getElementById('prompt').value = ''")
    ask(tab, "easy")
    assert [message["content"] for message in endpoint.bodies[-1]["messages"]] == ["easy"]


@needs_browser
def test_an_answer_that_breaks_off_keeps_its_text_and_says_why(tab: Tab) -> None:
    write(tab, "break")
    tab.wait("document.querySelector('.failed')")
    assert tab.value(f"{TOKENS}.map(one => one.textContent).join('')") == "Well"
    assert "the engine ended" in tab.value("document.querySelector('.failed').textContent")


@needs_browser
def test_markup_in_an_answer_is_text(tab: Tab) -> None:
    ask(tab, "markup")
    assert tab.value("typeof window.hacked") == "undefined"
    assert tab.value("document.querySelectorAll('.turn script, .turn img').length") == 0
    shown = tab.value(f"{TOKENS}.map(one => one.textContent).join('')")
    assert shown == "".join(told.HOSTILE)
    assert tab.complaints == []


@needs_browser
def test_escape_stops_the_answer_and_the_endpoint_notices(tab: Tab, endpoint: FakeEndpoint) -> None:
    write(tab, "wait")
    tab.wait(f"{TOKENS}.length > 2")
    tab.press("Escape")
    wait_state(tab, "Stopped")
    assert endpoint.left.wait(20)
    assert tab.value("document.getElementById('send').hidden") is False


@needs_browser
def test_a_missing_key_is_asked_for_and_a_given_one_is_sent(
    connection: Any, endpoint: FakeEndpoint
) -> None:
    endpoint.wanted_key = "k-1"
    tab = Tab(connection)
    tab.open(endpoint.url)
    wait_state(tab, "Enter the key under Settings")
    choose(tab, "key", "k-1")
    wait_state(tab, "Ready")
    ask(tab, "easy")
    assert endpoint.keys[-1] == "Bearer k-1"
    assert tab.value("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    tab.close()


@needs_browser
@pytest.mark.parametrize("width", [380, 1400])
def test_nothing_is_wider_than_the_window(tab: Tab, width: int) -> None:
    ask(tab, "hard")
    tab.resize(width, 800)
    tab.wait(f"innerWidth === {width}")
    assert tab.value("document.documentElement.scrollWidth") <= width
