"""Prompts to a scripted endpoint, and the calibration of its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import CascadeConfig
from cluster.errors import ConfigError
from cluster.prompt_run import Run, read_prompts, run_prompts
from router.samples import calibrate, collect
from router.scores import ScoreSpec
from tests.router.logs import DEPENDS

CONFIG = CascadeConfig.model_validate(
    {
        "cascade_name": "c",
        "small": {"name": "s", "source": "x"},
        "large": {"name": "l", "source": "y"},
        "mapper": {"small_to_large": "identity"},
    }
)


def token(*logprobs: float) -> dict[str, Any]:
    """The first one is the sampled token's."""
    return {"logprob": logprobs[0], "top_logprobs": [{"logprob": one} for one in logprobs]}


class Endpoint(httpx.AsyncBaseTransport):
    """Answers "N" with tokens whose margins are N, and "bad" with an error."""

    def __init__(self, names: tuple[str, ...] = ("c", "s", "l")) -> None:
        self.names = names
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in self.names]})
        body = json.loads(request.content)
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        if text == "bad":
            return httpx.Response(400, json={"error": {"message": "too long"}})
        margin = float(text)
        likeliest = token(-0.5, -0.5 - margin, -20.0)
        another = token(-40.0, -1.0, -1.0 - margin)
        content = [likeliest, another, token(0.0)]
        score = -margin if body["cascade"] == {"policy": "prompt"} else None
        return httpx.Response(
            200,
            json={
                "choices": [{"logprobs": {"content": content}}],
                "cascade": {"decision": {"score": score}},
            },
        )


def run(prompts: list[str], endpoint: Endpoint, **changes: Any) -> Run:
    asked = [[{"role": "user", "content": text}] for text in prompts]
    settings: dict[str, Any] = {
        "url": "http://there:1/",
        "reads_prompt": False,
        "max_tokens": 9,
        "concurrency": 2,
        "transport": endpoint,
    }
    return run_prompts(asked, CONFIG, DEPENDS, **settings | changes)


def test_the_margins_are_of_the_two_likeliest_tokens_and_the_last_one_is_left_out() -> None:
    endpoint, count = Endpoint(), [0]

    def answered() -> None:
        count[0] += 1

    (record,) = run(["2.5"], endpoint, on_answer=answered).records
    # The second token was not the likeliest: its own log-probability of -4 plays no part.
    assert record.margins == (2.5, 2.5)
    assert (record.complete, record.depends, record.small_tokens) == (True, DEPENDS, 3)
    assert endpoint.bodies == [
        {
            "model": "c",
            "messages": [{"role": "user", "content": "2.5"}],
            "max_tokens": 9,
            "cascade": {"policy": "small"},
            "logprobs": True,
            "top_logprobs": 3,
        }
    ]
    assert count == [1]


def test_answers_become_a_calibration() -> None:
    spec = ScoreSpec(name="margin", window_tokens=1, last_token=4)
    records = run([str(number) for number in range(1, 10)], Endpoint()).records
    assert calibrate(collect(records, spec), spec, 0.3, DEPENDS).threshold().value == 3.0


def test_for_the_prompt_policy_the_endpoints_own_score_is_taken() -> None:
    endpoint = Endpoint()
    records = run([str(n) for n in range(1, 10)], endpoint, reads_prompt=True).records
    spec = ScoreSpec(name="prompt", window_tokens=64)
    assert calibrate(collect(records, spec), spec, 0.3, DEPENDS).threshold().value == -7.0
    assert endpoint.bodies[0]["max_tokens"] == 1


def test_a_prompt_without_an_answer_is_told_and_the_others_count() -> None:
    made = run(["1", "bad", "2"], Endpoint())
    assert len(made.records) == 2
    assert made.failures == ("400: too long",)
    with pytest.raises(ConfigError, match="answered none of 1 prompts: 400: too long"):
        run(["bad"], Endpoint())


def test_an_endpoint_of_another_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="give the endpoint's own file with --config"):
        run(["1"], Endpoint(names=("c", "s", "other")))


def test_no_endpoint_is_said_plainly() -> None:
    with pytest.raises(ConfigError, match="no endpoint answers at http://127.0.0.1:9"):
        run(["1"], Endpoint(), url="http://127.0.0.1:9", transport=None)


def test_the_api_key_goes_with_every_request() -> None:
    endpoint = Endpoint()
    run(["1"], endpoint, api_key="k")
    assert [one["authorization"] for one in endpoint.headers] == ["Bearer k"] * 2


def test_a_line_is_a_prompt_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path.write_text('{"prompt": "hello"}\n\n' + json.dumps({"messages": messages}) + "\n")
    assert read_prompts(path) == [[{"role": "user", "content": "hello"}], messages]
    for line, message in (("{}", ":1: write"), ("[1]", ":1: write"), ("no", ":1: not JSON")):
        path.write_text(line)
        with pytest.raises(ConfigError, match=message):
            read_prompts(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(path)
