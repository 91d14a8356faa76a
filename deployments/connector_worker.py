"""The connector's worker half: registers KV memory once and tells which loads are complete.

It never copies KV. Mappers read and write the registered pool from outside; the last WRITE of a
handoff carries a NIXL notification, which is all that a worker waits for.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from cluster.transport import make_agent
from deployments.layout import DTYPES, measure_permutation, permutation_bytes
from deployments.messages import WorkerLayout, handoff_of_notification

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deployments.connector_scheduler import ConnectorSettings

log = logging.getLogger("kvcascade.connector")


@contextmanager
def _any_core() -> Iterator[None]:
    """Let threads that are made here run on every core, not only on the worker's compute cores."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


class WorkerHalf:
    """One worker's agent, layout and bookkeeping of loads."""

    def __init__(
        self, settings: ConnectorSettings, *, block_size_tokens: int, num_blocks: int
    ) -> None:
        self._settings = settings
        self._block_size_tokens = block_size_tokens
        self._num_blocks = num_blocks
        self._done: set[str] = set()
        self._reported: set[str] = set()
        self._errors: set[int] = set()
        self._agent: Any = None
        self._layout: WorkerLayout | None = None

    @property
    def layout(self) -> WorkerLayout:
        """Known after `register`."""
        assert self._layout is not None, "vLLM registers KV caches before it asks for metadata"
        return self._layout

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the one allocation behind all layers and describe it.

        `kv_caches` maps a layer's name to its view `[B, H, N, 2·D]`. Raises ValueError for caches
        that cannot be handed over (several groups, quantised, another layout): that is a
        configuration fault and ends the engine at start-up with its reason.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.model_executor.models.utils import extract_layer_index
        from vllm.platforms import current_platform

        names = sorted(kv_caches, key=extract_layer_index)
        caches = [kv_caches[name] for name in names]
        first = caches[0]
        dtype_name = str(first.dtype).removeprefix("torch.")
        storages = {cache.untyped_storage().data_ptr() for cache in caches}
        if dtype_name not in DTYPES:
            raise ValueError(f"KV cache dtype {dtype_name} cannot be handed over: use {[*DTYPES]}")
        if len(storages) != 1 or len({cache.shape for cache in caches}) != 1 or first.dim() != 4:
            raise ValueError("hybrid or multi-group KV caches cannot be handed over")
        blocks, heads, block_tokens, width = first.shape
        if not first[0].is_contiguous() or block_tokens != self._block_size_tokens:
            raise ValueError(
                f"KV layout {tuple(first.shape)} with strides {first.stride()} is not LBHNC "
                f"in blocks of {self._block_size_tokens} tokens"
            )
        permutation = None
        if current_platform.is_cpu():
            permutation = permutation_bytes(
                measure_permutation(
                    current_platform.pack_kv_cache, first.dtype, block_tokens, width // 2
                )
            )
        rank = get_tensor_model_parallel_rank()
        storage = first.untyped_storage()
        memory: Literal["DRAM", "VRAM"] = "DRAM" if first.device.type == "cpu" else "VRAM"
        device_id = first.device.index or 0
        name = f"{self._settings.engine}-{rank}-{uuid.uuid4().hex}"
        with _any_core():
            self._agent = make_agent(
                name, progress_thread=True, progress_delay_us=self._settings.progress_delay_us
            )
            self._agent.register_memory(
                [(storage.data_ptr(), storage.nbytes(), device_id, "")], memory
            )
        self._layout = WorkerLayout(
            rank=rank,
            agent_name=name,
            agent_metadata=self._agent.get_agent_metadata(),
            memory=memory,
            device_id=device_id,
            dtype=cast(Literal["bfloat16", "float16", "float32"], dtype_name),
            layer_addresses=tuple(cache.data_ptr() for cache in caches),
            num_blocks=blocks,
            block_stride_bytes=first.stride(0) * first.element_size(),
            block_size_tokens=block_tokens,
            kv_heads=heads,
            head_dim=width // 2,
            permutation=permutation,
        )

    def finished(
        self, loading: Mapping[str, str], failed: Mapping[str, tuple[int, ...]]
    ) -> set[str]:
        """Loads that ended with this step, each reported once; failed ones also as load errors.

        `loading` maps request to handoff, `failed` request to blocks that stay unfilled.
        """
        if not loading:
            self._reported.clear()
            self._done.clear()
            return set()
        for messages in self._agent.get_new_notifs().values():
            for message in messages:
                handoff_id = handoff_of_notification(message)
                if handoff_id is not None:
                    self._done.add(handoff_id)
        self._reported &= loading.keys()
        ended = set()
        for request_id, handoff_id in loading.items():
            if request_id in self._reported:
                continue
            if handoff_id in self._done:
                self._done.discard(handoff_id)
            elif request_id in failed:
                self._errors.update(failed[request_id])
            else:
                continue
            ended.add(request_id)
        self._reported |= ended
        return ended

    def take_errors(self) -> set[int]:
        """Blocks of failed loads since the last call."""
        errors, self._errors = self._errors, set()
        return errors
