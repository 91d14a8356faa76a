"""The configuration: one tree, the `args:` of the Serve application, for laptop and cluster alike.

Every default of the system stands here and in its parts, `mapper_config.py` and
`routing_config.py`. Unknown keys are refused. This module knows nothing of Ray, vLLM or torch, so
a configuration can be checked anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from cluster.config_base import Fraction as Fraction
from cluster.config_base import Node
from cluster.config_base import PlacementConfig as PlacementConfig
from cluster.errors import ConfigError
from cluster.mapper_config import MapperConfig as MapperConfig
from cluster.mapper_config import ScalingConfig as ScalingConfig
from cluster.routing_config import OnEscalate as OnEscalate
from cluster.routing_config import PolicyName as PolicyName
from cluster.routing_config import RoutingConfig as RoutingConfig

T = TypeVar("T", bound=BaseModel)

IMPORT_PATH = "deployments.app:build_cascade_app"
"""The `import_path` by which Ray Serve finds the application."""

QUICKSTART = "quickstart:"
"""Prefix of a model source that `kvcascade models` prepares: `quickstart:small`, `...:large`."""


class ModelConfig(Node):
    """One of the two models and the vLLM engine that hosts it."""

    name: str = Field(description="The model's name in the API.", min_length=1)
    source: str = Field(
        description="A folder, a Hugging Face repository, or `quickstart:small|large`."
    )
    accelerator: Literal["cpu", "gpu"] = Field("gpu", description="What the engine computes on.")
    accelerator_type: str | None = Field(None, description="Ray's name of the GPU, as `H200`.")
    tensor_parallel_size: PositiveInt = Field(
        1,
        description="Workers that share the model: GPUs, or groups of cores of a CPU engine.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Weights and KV cache. Both models must agree."
    )
    max_model_len_tokens: PositiveInt = Field(8_192, description="Longest prompt plus answer.")
    block_size_tokens: PositiveInt = Field(32, description="Tokens in one KV block.")
    kv_pool_tokens: PositiveInt | None = Field(
        None, description="Size of the KV pool. Unset: vLLM takes what the GPU has left."
    )
    max_num_seqs: PositiveInt = Field(64, description="Requests that decode together.")
    max_num_batched_tokens: PositiveInt = Field(
        2_048, description="Tokens in one engine step; long prefills take a part of it."
    )
    enable_prefix_caching: bool = Field(True, description="vLLM's exact prefix cache.")
    cpu_threads_bind: str | None = Field(
        None,
        description="Cores of a CPU engine, as `0-3`, shared out among its workers, or each "
        "worker's own as `0-1|2-3`. Unset: a NUMA node for each worker, or all cores shared out.",
    )
    tool_call_parser: str | None = Field(None, description="vLLM's tool parser, as `hermes`.")
    reasoning_parser: str | None = Field(None, description="vLLM's reasoning parser, as `qwen3`.")
    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further vLLM engine arguments. Those set by other keys are refused here.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment of the engine's processes."
    )
    max_ongoing_requests: PositiveInt = Field(256, description="Requests Ray sends one replica.")
    max_chunks_per_s: PositiveInt = Field(
        1_000,
        description="Messages to routers that one replica sends at most, over all its streams. "
        "With more streams than that allows, tokens leave several at a time.",
    )
    placement: PlacementConfig = Field(default_factory=PlacementConfig)

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        owned = {
            "model": "source",
            "max_model_len": "max_model_len_tokens",
            "block_size": "block_size_tokens",
            "num_gpu_blocks_override": "kv_pool_tokens",
            "kv_transfer_config": "handoff",
            "tensor_parallel_size": "tensor_parallel_size",
            "dtype": "dtype",
            "max_num_seqs": "max_num_seqs",
            "max_num_batched_tokens": "max_num_batched_tokens",
            "enable_prefix_caching": "enable_prefix_caching",
        }
        for key in self.engine_kwargs:
            if key in owned:
                raise ValueError(f"engine_kwargs.{key}: set `{owned[key]}` instead")
        cache_dtype = self.engine_kwargs.get("kv_cache_dtype", "auto")
        if cache_dtype not in ("auto", self.dtype):
            raise ValueError(
                f"engine_kwargs.kv_cache_dtype {cache_dtype}: mappers read and write the KV cache "
                "in the model's dtype; remove it or set `auto`"
            )
        for key in ("hf_overrides", "config_format"):
            if key in self.engine_kwargs:
                raise ValueError(
                    f"engine_kwargs.{key}: the engine would read another RoPE than the mapper was "
                    "fitted for; change the model's config.json instead"
                )
        if self.kv_pool_tokens is not None and self.kv_pool_tokens < self.max_model_len_tokens:
            raise ValueError(
                f"kv_pool_tokens {self.kv_pool_tokens} is smaller than max_model_len_tokens "
                f"{self.max_model_len_tokens}: one full request would never fit"
            )
        if self.accelerator == "cpu" and self.block_size_tokens % 32:
            raise ValueError("block_size_tokens: vLLM's CPU attention needs a multiple of 32")
        return self


class HandoffConfig(Node):
    """Deadlines and limits of the handoff protocol."""

    lease_s: PositiveFloat = Field(
        10.0, description="How long a source keeps blocks for a handoff that does not come."
    )
    deadline_s: PositiveFloat = Field(
        30.0, description="After this the mapper gives up and never writes again."
    )
    quarantine_s: PositiveFloat = Field(
        5.0,
        description="How long after `deadline_s` a target holds blocks of a silent mapper.",
    )
    max_pinned_fraction: Fraction = Field(
        0.5, description="Part of the source's KV pool that tickets may hold."
    )
    native_suffix_tokens: PositiveInt = Field(
        1, description="Last tokens that the target always reads itself."
    )
    min_handoff_tokens: PositiveInt = Field(
        64, description="Shorter conversations are read again: cheaper than a handoff."
    )


class SessionsConfig(Node):
    """What is kept of conversations between their turns, in every router."""

    ttl_s: PositiveFloat = Field(3_600.0, description="Forget a conversation after this silence.")
    max_tokens: PositiveInt = Field(
        16_000_000, description="Token ids kept over all conversations, 4 bytes each."
    )
    max_mapped_handoffs: PositiveInt = Field(
        10, description="Mapped handoffs on top of each other before a model reads all itself."
    )
    max_mapped_fraction: Fraction | None = Field(
        None,
        description="The same by the mapped part of a conversation, once two handoffs brought it.",
    )
    shared: bool = Field(
        False, description="Keep them in a deployment of their own too, for several routers."
    )
    placement: PlacementConfig = Field(default_factory=PlacementConfig)


class UpgradeConfig(Node):
    """How `serve deploy` of a changed configuration replaces what runs."""

    drain_s: PositiveFloat | None = Field(
        None,
        description="How long a replaced replica may go on with its answers before it is killed. "
        "Unset: `router.request_timeout_s`.",
    )
    start_first: bool = Field(
        True,
        description="A new replica starts before an old one takes no more requests, which needs "
        "room for one more of each deployment. `false`: the old one goes first, requests wait.",
    )


class TransportConfig(Node):
    """NIXL. Only UCX is supported; its own variables (`UCX_TLS`, ...) go into `ucx_env`."""

    progress_delay_us: PositiveInt = Field(
        1_000, description="Sleep of an engine's NIXL progress thread; smaller costs CPU."
    )
    ucx_env: dict[str, str] = Field(
        default_factory=dict, description="UCX variables for engines and mappers."
    )

    @model_validator(mode="after")
    def _check(self) -> TransportConfig:
        for key in self.ucx_env:
            if not key.startswith("UCX_"):
                raise ValueError(f"ucx_env.{key}: only variables named UCX_* belong here")
        return self


class TelemetryConfig(Node):
    """Traces. Metrics always go out through Ray's Prometheus endpoint."""

    otlp_endpoint: str | None = Field(
        None, description="OTLP/HTTP collector, as `http://collector:4318`. Unset: no export."
    )
    service_name: str = Field("kvcascade", description="`service.name` of every span.")


class RouterConfig(Node):
    """The OpenAI endpoint."""

    api_keys_file: str | None = Field(
        None,
        description="File of `tenant:key` or `key` lines; clients send a key as Bearer token. "
        "Unset, with `api_keys_env`: no keys are asked for.",
    )
    api_keys_env: str | None = Field(
        None, description="Environment variable of the router that holds such lines, or commas."
    )
    max_requests: PositiveInt = Field(
        256, description="Requests one router works on; more are refused with 429."
    )
    max_body_bytes: PositiveInt = Field(
        16 << 20, description="Longest request body; longer ones are refused with 413."
    )
    max_ongoing_requests: PositiveInt = Field(
        512, description="The same for Ray Serve, which lets more wait unseen; health checks too."
    )
    request_timeout_s: PositiveFloat = Field(600.0, description="Longest whole answer.")
    placement: PlacementConfig = Field(default_factory=PlacementConfig)

    @model_validator(mode="after")
    def _check(self) -> RouterConfig:
        if self.max_requests >= self.max_ongoing_requests:
            raise ValueError(
                f"max_requests {self.max_requests}: keep it below max_ongoing_requests "
                f"{self.max_ongoing_requests}, or Serve lets requests wait instead of refusing them"
            )
        return self


class CascadeConfig(Node):
    """The whole cascade: the `args:` of the application in a Serve config file."""

    cascade_name: str = Field("cascade", description="Name of the routed model in the API.")
    small: ModelConfig
    large: ModelConfig
    mapper: MapperConfig
    handoff: HandoffConfig = Field(default_factory=HandoffConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    sessions: SessionsConfig = Field(default_factory=SessionsConfig)
    upgrade: UpgradeConfig = Field(default_factory=UpgradeConfig)
    transport: TransportConfig = Field(default_factory=TransportConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)

    @model_validator(mode="after")
    def _check(self) -> CascadeConfig:
        names = [self.cascade_name, self.small.name, self.large.name]
        if len(set(names)) != 3:
            raise ValueError(f"names {names}: cascade, small and large need different names")
        if self.small.dtype != self.large.dtype:
            raise ValueError(
                f"small.dtype {self.small.dtype} differs from large.dtype {self.large.dtype}"
            )
        return self


class RouterUserConfig(Node):
    """The `user_config` of the router's deployment: what may change while it serves."""

    routing: RoutingConfig | None = Field(
        None, description="Takes the place of `args.routing`, as a whole. Unset: that counts."
    )


def parse_cascade_config(args: Any, *, where: str = "args") -> CascadeConfig:
    """Check `args` and return the tree; raises ConfigError with one line per wrong key."""
    return _parse(CascadeConfig, args, where)


def parse_router_config(
    user_config: Any, *, where: str = "deployments.router.user_config"
) -> RouterUserConfig:
    """Check the router's `user_config`, None if there is none; raises as `parse_cascade_config`."""
    return _parse(RouterUserConfig, {} if user_config is None else user_config, where)


def _parse(tree: type[T], content: Any, where: str) -> T:
    try:
        return tree.model_validate(content)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"]) or "(top level)"
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = "unknown key; remove it or correct its spelling"
            elif item["type"] == "missing":
                message = "missing; add it"
            lines.append(f"{where}.{key}: {message}")
        raise ConfigError("\n".join(lines)) from None


def load_serve_config(path: Path) -> tuple[dict[str, Any], CascadeConfig]:
    """Read a Serve config file: (the whole document, the cascade's `args`, with the routing of the
    router's `user_config` if it has one).

    Raises ConfigError when the file is missing, is not YAML, or has no application with
    `import_path: deployments.app:build_cascade_app`.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the path of a Serve config")
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list):
        raise ConfigError(f"{path}: `applications:` is missing; this is no Serve config")
    for application in applications:
        if isinstance(application, dict) and application.get("import_path") == IMPORT_PATH:
            config = parse_cascade_config(application.get("args") or {}, where="args")
            overrides = application.get("deployments") or []
            _check_overrides(path, config, overrides)
            return document, _with_router_config(config, overrides)
    raise ConfigError(f"{path}: no application has `import_path: {IMPORT_PATH}`")


def _with_router_config(config: CascadeConfig, overrides: list[dict[str, Any]]) -> CascadeConfig:
    """As the router follows it."""
    for entry in overrides:
        if entry.get("name") == "router":
            routing = parse_router_config(entry.get("user_config")).routing
            return config if routing is None else config.model_copy(update={"routing": routing})
    return config


def _check_overrides(path: Path, config: CascadeConfig, overrides: list[dict[str, Any]]) -> None:
    """Serve lets `deployments:` win over the builder, also where both say how many mappers."""
    scaled = config.mapper.scaling.max_replicas is not None
    for entry in overrides:
        mapper = entry.get("name") in ("mapper", "mapper_back")
        if scaled and mapper and ("num_replicas" in entry or "autoscaling_config" in entry):
            raise ConfigError(
                f"{path}: deployments.{entry['name']} sets replicas and so does "
                "args.mapper.scaling: drop one of them"
            )
