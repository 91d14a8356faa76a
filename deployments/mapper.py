"""The Serve deployment that converts caches: a thin shell around `conversion.Converter`.

A replica owns one registered pool and one NIXL agent. It is an ordinary deployment, so replicas
come and go without the engines: a handoff is one streaming call, which keeps a replica alive until
it is done and whose exception is the notice of its death.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.config import parse_cascade_config
from cluster.errors import HandoffError
from cluster.scaling import BACKLOG_S
from deployments.messages import HandoffOrder, MapperAddress
from deployments.spans import Conversion
from router.ports import HandoffReport

log = logging.getLogger("kvcascade.mapper")

GREETING_RETRY_S = 1.0
GREETING_PERIOD_S = 15.0
GREETING_TIMEOUT_S = 30.0


class MapperServer:
    """One mapper replica of one direction: to the large model, or `back` to the small one."""

    async def __init__(
        self, config: dict[str, Any], small: Any, large: Any, back: bool = False
    ) -> None:
        # UCX reads its variables when the library loads, so they are set before anything else.
        cascade = parse_cascade_config(config)
        os.environ.update(cascade.transport.ucx_env)
        import ray
        import torch

        from cluster.sources import model_folder, resolve_mapper
        from cluster.telemetry import MapperMetrics, make_tracer, make_tracer_provider
        from deployments.conversion import Converter
        from deployments.layout import DTYPES
        from mappers.fingerprint import fingerprint
        from mappers.store import load_mapper, mapper_id

        torch.set_num_threads(cascade.mapper.threads)
        value, models = cascade.mapper.small_to_large, (cascade.small, cascade.large)
        if back:
            assert cascade.mapper.large_to_small is not None, "the builder makes no such deployment"
            value, models = cascade.mapper.large_to_small, (cascade.large, cascade.small)
        folder = resolve_mapper(value, back=back)
        source, target = await asyncio.gather(
            *(
                asyncio.to_thread(lambda s=model.source: fingerprint(model_folder(s)))
                for model in models
            )
        )
        dtype = DTYPES[cascade.small.dtype]
        mapper = await asyncio.to_thread(
            load_mapper,
            folder,
            source,
            target,
            cascade.mapper.device,
            compute_dtype=dtype,
            dtype=dtype,
            allow_refused=cascade.mapper.allow_refused,
        )
        self._converter = Converter(
            mapper,
            mapper_id(folder),
            cascade.mapper,
            cascade.handoff,
            dtype=cascade.small.dtype,
            block_sizes_tokens=(models[0].block_size_tokens, models[1].block_size_tokens),
            host=ray.util.get_node_ip_address(),
        )
        await self._converter.rehearse()
        self._direction = "large_to_small" if back else "small_to_large"
        self._metrics = MapperMetrics()
        self._greeting = asyncio.create_task(self._greet(small, large))
        part = "mapper_back" if back else "mapper"
        self._traces = make_tracer_provider(cascade.telemetry, part)
        self._tracer = make_tracer(self._traces)

    async def _greet(self, *engines: Any) -> None:
        """Shake hands with every replica of both engines, now and when new ones have come.

        So no user waits for a first handshake. An engine that does not answer is asked again.
        """
        while True:
            complete = True
            for handle in engines:
                try:
                    responses = handle.broadcast("layout")
                    layouts = await responses.results_async(timeout_s=GREETING_TIMEOUT_S)
                    complete &= bool(layouts)
                    for layout in layouts:
                        await self._converter.greet(layout)
                except (RayError, RayServeException, TimeoutError, HandoffError) as error:
                    log.info("not greeted yet: %s", error)
                    complete = False
            await asyncio.sleep(GREETING_PERIOD_S if complete else GREETING_RETRY_S)

    async def convert(self, order: HandoffOrder) -> AsyncIterator[MapperAddress | HandoffReport]:
        """See `Converter.convert`."""
        try:
            with Conversion(self._tracer, self._direction, order) as span:
                async for item in self._converter.convert(order):
                    self._show_work()
                    if isinstance(item, HandoffReport):
                        span.done(item)
                    yield item
        finally:
            self._show_work()

    def __del__(self) -> None:
        """Serve calls it when the replica ends."""
        if traces := getattr(self, "_traces", None):
            traces.shutdown()

    async def check_health(self) -> None:
        """Called by Serve every ten seconds; renews the gauges."""
        self._show_work()

    def _show_work(self) -> None:
        self._metrics.set_work(
            self._direction,
            running=self._converter.running,
            pool_bytes=self._converter.pool_in_use_bytes,
        )

    async def describe(self) -> dict[str, Any]:
        """What this replica is doing."""
        import ray

        return {
            "address": self._converter.address.address,
            "mapper_id": self._converter.address.mapper_id,
            "running": self._converter.running,
            "pool_in_use_bytes": self._converter.pool_in_use_bytes,
            "pid": os.getpid(),
            "node_id": ray.get_runtime_context().get_node_id(),
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what `cluster.scaling.ByBacklog` reads, and the bytes in flight."""
        return {
            BACKLOG_S: self._converter.backlog_s,
            "pool_in_use_bytes": float(self._converter.pool_in_use_bytes),
        }
