"""vLLM's view of the handoff: a KV connector whose two halves do the work.

vLLM builds this class twice, once beside its scheduler and once in every worker
(`KVConnectorBase_V1`, vLLM 0.29). The scheduler half (`connector_scheduler.py`) pins, promises,
announces and releases; the worker half (`connector_worker.py`) registers memory and tells when
blocks arrived. Nothing here raises into vLLM: an exception in either half ends the engine.

Engine configuration: `kv_transfer_config.kv_connector_extra_config` carries `ConnectorSettings`;
a request carries `SamplingParams.extra_args["kv_transfer_params"]` with `keep` (source) or
`handoff` (target), set by the engine deployment alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from deployments.connector_scheduler import ConnectorSettings, SchedulerHalf
from deployments.connector_worker import WorkerHalf
from deployments.messages import WorkerLayout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler half tells every worker with one engine step.

    `released` are requests whose pinned blocks may be freed; `loading` maps a request to its
    handoff; `failed` maps a request to the blocks that will never be filled (empty for a request
    that was aborted: its blocks are freed, nothing is recomputed).
    """

    released: list[str] = field(default_factory=list)
    loading: dict[str, str] = field(default_factory=dict)
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """A worker's layout on its way to the scheduler half."""

    layout: WorkerLayout


class CascadeConnector(KVConnectorBase_V1, SupportsHMA):
    """Delegates every hook of vLLM to the half that this process needs."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        settings = ConnectorSettings(**transfer.kv_connector_extra_config)
        block_size_tokens = vllm_config.cache_config.block_size
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                settings,
                block_size_tokens=block_size_tokens,
                num_blocks=kv_cache_config.num_blocks,
            )
        else:
            self._worker = WorkerHalf(
                settings,
                block_size_tokens=block_size_tokens,
                num_blocks=kv_cache_config.num_blocks,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Blocks of one layer side by side, heads outside tokens: what `BlockCodec` reads."""
        return "LBHNC"

    # Scheduler half.

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn where the workers keep their KV, in rank order."""
        assert self._scheduler is not None
        layouts = []
        for rank in sorted(metadata):
            handshake = metadata[rank]
            assert isinstance(handshake, WorkerHandshake)
            layouts.append(handshake.layout)
        self._scheduler.set_layouts(tuple(layouts))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """vLLM's pool, so that a census can be taken."""
        assert self._scheduler is not None
        self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens a handoff will bring, beyond those the engine already has."""
        assert self._scheduler is not None
        tokens = self._scheduler.loadable_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated: announce them to the mapper."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Everything that happened since the last step, for the workers."""
        assert self._scheduler is not None
        return StepMetadata(*self._scheduler.step())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The workers reported: forget what is finished."""
        assert self._scheduler is not None
        self._scheduler.reported(connector_output.finished_recving or ())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request that may be handed over."""
        assert self._scheduler is not None
        return self._scheduler.finished(request, block_ids[0] if block_ids else []), None

    # Worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the KV pool with NIXL, once."""
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This worker's layout, collected by vLLM for the scheduler half."""
        assert self._worker is not None
        return WorkerHandshake(layout=self._worker.layout)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed, and requests whose blocks arrived."""
        assert self._worker is not None
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        received = self._worker.finished(meta.loading, meta.failed)
        return set(meta.released) or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads that ended without their data."""
        assert self._worker is not None
        return self._worker.take_errors()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to start: the mapper writes on its own."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before a request runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save: the mapper reads the pool itself."""

    def wait_for_save(self) -> None:
        """Nothing was saved."""

    def take_events(self) -> Iterable[Any]:
        """No cache events."""
        return ()

    def shutdown(self) -> None:
        """Stop the control thread; pins are dropped with the process."""
        if self._scheduler is not None:
            self._scheduler.close()
