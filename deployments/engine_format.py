"""vLLM's request and output types on one side, ours on the other. It knows no open requests."""

from __future__ import annotations

import copy

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from cluster.errors import EngineError
from router.ports import EngineChunk, TokenStep

MIN_LOGPROBS = 2
"""What every engine request asks for: the margin needs the two most likely tokens."""


def engine_sampling(params: SamplingParams, sent: int, max_tokens: int) -> SamplingParams:
    """`params` for one engine's part of an answer of which `sent` tokens are written already.

    Engines see no text: stop strings stay with the front end. `min_tokens` counts over the whole
    answer. Penalties on earlier output count the sent tokens as prompt.
    """
    part = copy.copy(params)
    part.n = 1
    part.max_tokens = max_tokens
    part.min_tokens = min(max(0, params.min_tokens - sent), max_tokens)
    part.logprobs = max(MIN_LOGPROBS, params.logprobs or 0)
    part.detokenize = False
    part.stop = []
    part.output_text_buffer_length = 0
    part.include_stop_str_in_output = False
    part.output_kind = RequestOutputKind.DELTA
    part.stream_interval = None
    return part


def core_output(request: EngineCoreRequest, chunk: EngineChunk) -> EngineCoreOutput:
    """Tokens of the splice as vLLM's output processor takes them from an engine."""
    params = request.sampling_params
    assert params is not None
    reason = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, None: None}
    stats = None
    if chunk.cached_tokens is not None:
        stats = PrefillStats(num_cached_tokens=chunk.cached_tokens)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[step.token_id for step in chunk.steps],
        new_logprobs=_logprobs(chunk.steps, params.logprobs),
        finish_reason=reason[chunk.finish_reason],
        stop_reason=chunk.stop_token_id,
        prefill_stats=stats,
    )


def _logprobs(steps: tuple[TokenStep, ...], wanted: int | None) -> LogprobsLists | None:
    """vLLM's arrays: the sampled token, then the `wanted` most likely ones, per step."""
    if wanted is None or not steps:
        return None
    token_ids, logprobs, ranks = [], [], []
    for step in steps:
        best = sorted(step.logprobs, key=lambda entry: entry[2])[:wanted]
        if len(best) < wanted or not step.logprobs:
            raise EngineError("the engine gave fewer log-probabilities than the request asked for")
        row = [step.logprobs[0], *best]
        token_ids.append([entry[0] for entry in row])
        logprobs.append([entry[1] for entry in row])
        ranks.append(row[0][2])
    return LogprobsLists(np.array(token_ids), np.array(logprobs), np.array(ranks))
