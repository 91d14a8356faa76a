"""Ray Serve LLM's own prefill/decode application, with a watch on each transfer.

`build_peer_app` is `ray.serve.llm.build_pd_openai_app` with one class changed: its decode server
also notes when the prefill's answer came and when the first token left, and tells what vLLM's NIXL
connector has counted. It decides and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from ray.llm._internal.serve.serving_patterns.prefill_decode import builder
from ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server import PDDecodeServer
from ray.serve import Application

_COUNTERS = {
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "transfers": "vllm:nixl_xfer_time_seconds_count",
    "transfer_s": "vllm:nixl_xfer_time_seconds_sum",
    "post_s": "vllm:nixl_post_time_seconds_sum",
    "descriptors": "vllm:nixl_num_descriptors_sum",
}
"""vLLM's histograms (`nixl/stats.py`); their sums are exact."""


class WatchedDecodeServer(PDDecodeServer):
    """Ray's decode server for one request at a time: it keeps the times of the last one only."""

    _asked = _prefilled = _first = 0.0

    async def chat(self, request: Any, raw_request_info: Any = None) -> Any:
        """As the base class; the first chunk is timed."""
        self._asked = time.perf_counter()
        return self._timed(await super().chat(request, raw_request_info))

    def _decode_reuse_ids(self, prefill_chunk: Any) -> Any:
        # The orchestrator calls it between the prefill's answer and the local decode.
        self._prefilled = time.perf_counter()
        return super()._decode_reuse_ids(prefill_chunk)

    async def _timed(self, chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
        first = True
        async for chunk in chunks:
            if first:
                self._first, first = time.perf_counter(), False
            yield chunk

    async def watched(self) -> dict[str, float]:
        """Seconds of the last request, and what NIXL has moved since the start."""
        from prometheus_client import REGISTRY

        totals = dict.fromkeys(_COUNTERS, 0.0)
        names = {sample: key for key, sample in _COUNTERS.items()}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if sample.name in names:
                    totals[names[sample.name]] += sample.value
        return {
            "prefill_s": self._prefilled - self._asked,
            "first_token_s": self._first - self._prefilled,
            **totals,
        }


def build_peer_app(args: dict[str, Any]) -> Application:
    """Ray's application for `PDServingArgs`, with the class above in the decode server's place."""
    builder.PDDecodeServer = WatchedDecodeServer
    return builder.build_pd_openai_app(args)
