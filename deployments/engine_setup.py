"""How a vLLM engine is configured and started under Ray Serve LLM.

Two things differ from Ray's own: the engine builds no OpenAI front (the router has it), and a CPU
engine of one worker runs it inside the engine core process (vLLM's `uni` executor), because the
multi-process executor spins a core while any request waits and costs one more import of vLLM.
With tensor parallelism a CPU engine has that executor (`cpu_environment.py`); a GPU engine always
has Ray's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

from cluster.config import CascadeConfig, ModelConfig
from cluster.sources import kv_bytes_per_token
from deployments.cpu_environment import cpu_variables, environment, executor


class NoNodeInit(CallbackBase):
    """The model is a local folder or vLLM fetches it: no extra task per node is needed."""

    async def on_before_node_init(self) -> None:
        """Skip Ray's download task, which imports vLLM once more."""
        self.ctx.run_init_node = False


def llm_config(
    cascade: CascadeConfig, model: ModelConfig, *, source: str, host: str, ticket_address: str
) -> LLMConfig:
    """Ray Serve LLM's configuration of one engine of the cascade."""
    handoff = cascade.handoff
    engine_kwargs: dict[str, Any] = {
        "dtype": model.dtype,
        "max_model_len": model.max_model_len_tokens,
        "block_size": model.block_size_tokens,
        "max_num_seqs": model.max_num_seqs,
        "max_num_batched_tokens": model.max_num_batched_tokens,
        # A prefill that fills every step would keep the scheduler from looking at handoffs.
        "long_prefill_token_threshold": max(1, model.max_num_batched_tokens * 3 // 4),
        "enable_prefix_caching": model.enable_prefix_caching,
        "tensor_parallel_size": model.tensor_parallel_size,
        "kv_transfer_config": {
            "kv_connector": "CascadeConnector",
            "kv_connector_module_path": "deployments.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "engine": model.name,
                "host": host,
                "ticket_address": ticket_address,
                "lease_s": handoff.lease_s,
                "deadline_s": handoff.deadline_s,
                "quarantine_s": handoff.quarantine_s,
                "max_pinned_fraction": handoff.max_pinned_fraction,
                "native_suffix_tokens": handoff.native_suffix_tokens,
                "progress_delay_us": cascade.transport.progress_delay_us,
            },
        },
        **model.engine_kwargs,
    }
    if model.kv_pool_tokens is not None:
        # One more block: vLLM keeps the first one for itself.
        blocks = -(-model.kv_pool_tokens // model.block_size_tokens) + 1
        per_token = kv_bytes_per_token(source, model.dtype) // model.tensor_parallel_size
        engine_kwargs["kv_cache_memory_bytes"] = blocks * model.block_size_tokens * per_token
    accelerator = {"accelerator_type": model.accelerator_type} if model.accelerator_type else {}
    return LLMConfig(
        model_loading_config={"model_id": model.name, "model_source": source},
        engine_kwargs=engine_kwargs,
        accelerator_config={"kind": model.accelerator},
        callback_config={"callback_class": NoNodeInit} if model.accelerator == "cpu" else {},
        runtime_env={"env_vars": {**cascade.transport.ucx_env, **model.env}},
        experimental_configs={"kvcascade_cpu_threads_bind": model.cpu_threads_bind},
        **accelerator,
    )


class CascadeVLLMEngine(VLLMEngine):
    """Ray's vLLM engine without an OpenAI front. `client` is vLLM's AsyncLLM, after `start`."""

    client: Any

    async def start(self) -> None:
        """Start the engine core; raises what vLLM raises when it cannot."""
        callback = self.llm_config.get_or_create_callback()
        assert callback is not None and callback.ctx is not None
        await callback.run_callback("on_before_node_init")
        if callback.ctx.run_init_node:
            from ray.llm._internal.serve.utils.node_initialization_utils import initialize_node

            await initialize_node(self.llm_config)
        await callback.run_callback("on_after_node_init")
        engine_args, _, vllm_config = self._prepare_engine_config(callback.ctx)
        with self._cpu_environment(vllm_config):
            self.client = self._start_async_llm_engine(
                engine_args, vllm_config, cast(Any, callback.ctx.placement_group)
            )
        self._engine_client = cast(Any, self.client)
        self._running = True

    def _cpu_environment(self, vllm_config: Any) -> AbstractContextManager[None]:
        """Threads and executor of a CPU engine, in the environment its core process inherits."""
        accelerator = self.llm_config.accelerator_config
        if accelerator is None or accelerator.kind != "cpu":
            return nullcontext()
        parallel = vllm_config.parallel_config
        parallel.distributed_executor_backend = executor(parallel.world_size)
        bind = self.llm_config.experimental_configs.get("kvcascade_cpu_threads_bind")
        return environment(cpu_variables(parallel.world_size, bind))
