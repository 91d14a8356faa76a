"""One request is one trace, from its client through every process that works on it."""

from __future__ import annotations

import os
import time

import pytest

from tests.collector import Collector, Received
from tests.real.conftest import RealCascade
from tests.real.test_cascade import client, complete, conversation

pytestmark = pytest.mark.real

SECONDS_UNTIL_EXPORTED = 60.0
CLIENTS_SPAN = "00f067aa0ba902b7"


def new_trace() -> tuple[str, dict[str, str]]:
    """A trace id and the headers of a client that has begun it."""
    trace_id = os.urandom(16).hex()
    return trace_id, {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-01"}


def by_name(spans: list[Received]) -> dict[str, Received]:
    names = [span.name for span in spans]
    assert len(set(names)) == len(names), names
    return {span.name: span for span in spans}


async def test_an_escalated_request_is_one_trace_over_router_small_mapper_and_large(
    cascade: RealCascade, collector: Collector
) -> None:
    trace_id, headers = new_trace()
    began_ns = time.time_ns()
    answer = await complete(
        cascade,
        conversation(600, 700),
        route={"escalate_after_tokens": 5},
        max_tokens=20,
        extra_headers=headers,
    )
    spans = by_name(
        collector.wait(trace_id, lambda found: len(found) >= 6, timeout_s=SECONDS_UNTIL_EXPORTED)
    )
    root, handoff = spans["chat cascade"], spans["handoff"]
    assert {(name, span.part, span.parent_id) for name, span in spans.items()} == {
        ("chat cascade", "router", CLIENTS_SPAN),
        ("text_completion small", "small", root.span_id),
        ("handoff", "router", root.span_id),
        ("handoff.ticket", "router", handoff.span_id),
        ("convert small_to_large", "mapper", handoff.span_id),
        ("text_completion large", "large", root.span_id),
    }
    assert not any(span.failed for span in spans.values())
    # Nothing of this request went into another trace.
    assert {span.trace_id for span in collector.spans if span.start_ns >= began_ns} == {trace_id}

    small, large = spans["text_completion small"], spans["text_completion large"]
    told, parts = answer.cascade["handoff"], answer.cascade["served_by"]
    assert told["path"] == "mapped"
    assert small.attributes["gen_ai.usage.output_tokens"] == parts[0]["tokens"] == 5
    assert small.attributes["gen_ai.response.finish_reasons"] == ("length",)
    prompt_tokens = answer.usage.prompt_tokens
    assert large.attributes["gen_ai.usage.input_tokens"] == prompt_tokens + 5
    assert large.attributes["gen_ai.usage.cache_read.input_tokens"] == told["covered_tokens"]
    assert large.attributes["gen_ai.usage.output_tokens"] == parts[1]["tokens"]
    convert = spans["convert small_to_large"].attributes
    assert convert["kvcascade.handoff.bytes_written"] == told["bytes_written"]
    assert convert["kvcascade.handoff.temperature"] == told["temperature"]
    for stage in ("queue", "read", "map", "write", "wait_target"):
        told_s = told["stages_ms"][stage] / 1000
        assert convert[f"kvcascade.handoff.{stage}_s"] == pytest.approx(told_s, abs=1e-5)
    # All run on one machine here, so one clock serves them all.
    assert root.start_ns <= small.start_ns <= handoff.start_ns
    assert handoff.start_ns <= spans["convert small_to_large"].start_ns < handoff.end_ns
    assert large.start_ns < handoff.end_ns <= root.end_ns


async def test_a_client_that_leaves_cancels_the_engines_span_and_fails_nothing_there(
    cascade: RealCascade, collector: Collector
) -> None:
    trace_id, headers = new_trace()
    async with client(cascade) as openai:
        stream = await openai.chat.completions.create(
            model="large",
            messages=conversation(200, 701),
            max_tokens=400,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers=headers,
        )
        await anext(aiter(stream))
        await stream.close()
    spans = by_name(
        collector.wait(trace_id, lambda found: len(found) >= 2, timeout_s=SECONDS_UNTIL_EXPORTED)
    )
    engine, root = spans["text_completion large"], spans["chat large"]
    assert engine.parent_id == root.span_id
    assert engine.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert 1 <= engine.attributes["gen_ai.usage.output_tokens"] < 400
    assert not engine.failed
    assert root.failed
