"""What counts as a whole answer, and that the changed files are good ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from bench.upgrade import CHANGES
from bench.upgrade_runs import Heard, Wish, hear
from cluster.cli import QUICKSTART_CONFIG
from cluster.config import load_serve_config, parse_cascade_config


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_a_config_that_differs_in_what_it_says(change: str) -> None:
    document, before = load_serve_config(QUICKSTART_CONFIG)
    changed = CHANGES[change](document)
    (application,) = changed["applications"]
    after = parse_cascade_config(application["args"])
    differing = {
        name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)
    }
    expected = {"mappers": set(), "engines": {"small", "large"}, "live-routing": set()}
    assert differing == expected.get(change, {change})
    replicas = {"mappers": 2}.get(change, 1)
    mapper, *others = application["deployments"]
    assert mapper == {"name": "mapper", "num_replicas": replicas}
    live = {"name": "router", "user_config": {"routing": {"margin_threshold": 0.5}}}
    assert others == ([live] if change == "live-routing" else [])
    # The file that runs stays as it is.
    assert document == load_serve_config(QUICKSTART_CONFIG)[0]


def event(tokens: int, finish: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish}
    usage = {"completion_tokens": tokens}
    return "data: " + json.dumps({"choices": [choice], "usage": usage, **more})


async def heard_of(*lines: str, status: int = 200) -> Heard:
    """What is heard of four wished tokens when the endpoint sends these lines."""
    body = "".join(f"{line}\n\n" for line in lines)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=body))
    async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
        return await hear(client, Wish("cascade", 4, escalate_after_tokens=2), seed=1)


async def test_an_answer_is_whole_with_all_its_tokens_its_end_and_the_end_of_the_stream() -> None:
    last = event(4, "length", cascade={"handoff": {"path": "mapped", "reason": None}})
    heard = await heard_of(event(2), last, "data: [DONE]")
    assert (heard.fault, heard.tokens, heard.path) == (None, 4, "mapped")
    assert heard.kind == "escalating"


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([event(2)], "2 of 4 tokens, finish None, end seen: False"),
        ([event(4, "length")], "4 of 4 tokens, finish length, end seen: False"),
        ([event(3, "length"), "data: [DONE]"], "3 of 4 tokens"),
        ([event(4, "stop"), "data: [DONE]"], "finish stop"),
        ([event(2), 'data: {"error": {"message": "gone"}}'], "after 2 tokens: {'message': 'gone'}"),
    ],
)
async def test_an_answer_that_breaks_off_is_none(lines: list[str], fault: str) -> None:
    heard = await heard_of(*lines)
    assert heard.fault is not None and fault in heard.fault


async def test_a_refusal_is_told_with_its_status() -> None:
    heard = await heard_of('{"error": "busy"}', status=503)
    assert heard.fault is not None and heard.fault.startswith("status 503: ")
