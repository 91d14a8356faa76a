"""Builds the Serve application: router, small engine, large engine, mapper.

Every deployment is named by import path and gets plain data, so building imports neither vLLM nor
torch. The names below are those of `deployments:` in a Serve config; `num_replicas` there scales
one deployment and leaves the others running.
"""

from __future__ import annotations

from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.config import CascadeConfig, ModelConfig, PlacementConfig, parse_cascade_config
from cluster.place import mapper_place, placement_at
from cluster.scaling import autoscaling

DEPLOYMENTS = ("router", "small", "large", "mapper", "mapper_back", "sessions")
"""Every deployment of the application; the last two only where the config asks for them."""


ENGINE_ROUTER = "deployments.session_router.SessionRouter"
"""All calls about one conversation reach the same replica: only that one has its blocks."""


def build_cascade_app(args: dict[str, Any]) -> Application:
    """The application for a config's `args`; raises ConfigError with one line per fault."""
    cascade = parse_cascade_config(args)
    config = cascade.model_dump(mode="json")
    small = _engine(cascade.small, cascade).bind(config, "small")
    large = _engine(cascade.large, cascade).bind(config, "large")
    engines = {"small": small, "large": large}
    handles = {**engines, "mapper": _mapper("mapper", cascade).bind(config, **engines)}
    if cascade.mapper.large_to_small is not None:
        back = _mapper("mapper_back", cascade)
        handles["mapper_back"] = back.bind(config, back=True, **engines)
    if cascade.sessions.shared:
        handles["sessions"] = _by_path(
            "deployments.sessions.SessionServer",
            name="sessions",
            max_ongoing_requests=cascade.router.max_ongoing_requests,
            ray_actor_options=_actor_options(cascade.sessions.placement),
            **_replacing(cascade),
        ).bind(config)
    router = _by_path(
        "deployments.router.Router",
        name="router",
        max_ongoing_requests=cascade.router.max_ongoing_requests,
        ray_actor_options=_actor_options(cascade.router.placement),
        health_check_timeout_s=60,
        **_replacing(cascade),
    )
    return router.bind(config, **handles)


def _mapper(name: str, cascade: CascadeConfig) -> serve.Deployment:
    settings = cascade.mapper
    place = mapper_place(cascade, back=name == "mapper_back")
    actor_options = _actor_options(placement_at(cascade, place.at))
    if settings.num_gpus:
        actor_options["num_gpus"] = settings.num_gpus
    options: dict[str, Any] = {}
    if scaling := autoscaling(settings.scaling):
        options["autoscaling_config"] = scaling
    return _by_path(
        "deployments.mapper.MapperServer",
        name=name,
        max_ongoing_requests=settings.max_concurrent_handoffs + settings.max_queued_handoffs,
        ray_actor_options=actor_options,
        health_check_timeout_s=60,
        **_replacing(cascade),
        **options,
    )


def _replacing(cascade: CascadeConfig) -> dict[str, Any]:
    """What Serve does with a replica of an older version (Ray 2.60, `DeploymentConfig`).

    One replica more is the least that its surge can be, and Serve rounds up.
    """
    drain_s = cascade.upgrade.drain_s or cascade.router.request_timeout_s
    return {
        "graceful_shutdown_timeout_s": max(drain_s, cascade.handoff.deadline_s),
        "max_surge_percent": 1 if cascade.upgrade.start_first else 0,
    }


def _by_path(path: str, **options: Any) -> serve.Deployment:
    """A deployment of the class at an import path, which only its replicas import."""
    deployment: serve.Deployment = serve.deployment(**options)(cast(Any, path))
    return deployment


def _engine(model: ModelConfig, cascade: CascadeConfig) -> serve.Deployment:
    role = "small" if model is cascade.small else "large"
    placement = model.placement
    # With a placement group, labels select its bundles' nodes and not the actor's.
    actor_options = _actor_options(placement.model_copy(update={"label_selector": {}}))
    env = {**cascade.transport.ucx_env, **model.env}
    if env:
        actor_options["runtime_env"] = {"env_vars": env}
    first = {"CPU": placement.num_cpus, **placement.resources}
    bundles = [first]
    if model.accelerator == "gpu":
        gpu = {"GPU": 1.0}
        if model.accelerator_type:
            gpu[f"accelerator_type:{model.accelerator_type}"] = 0.001
        bundles = [first | gpu, *(gpu.copy() for _ in range(model.tensor_parallel_size - 1))]
    options: dict[str, Any] = {}
    if placement.label_selector:
        labels = [dict(placement.label_selector)] * len(bundles)
        options["placement_group_bundle_label_selector"] = labels
    return _by_path(
        "deployments.engine.Engine",
        name=role,
        max_ongoing_requests=model.max_ongoing_requests,
        ray_actor_options=actor_options,
        placement_group_bundles=bundles,
        placement_group_strategy="PACK",
        request_router_config=RequestRouterConfig(
            request_router_class=cast(Any, ENGINE_ROUTER),
            request_router_kwargs={"num_fallback_replicas": 2},
        ),
        health_check_timeout_s=120,
        **_replacing(cascade),
        **options,
    )


def _actor_options(placement: PlacementConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": placement.num_cpus}
    if placement.resources:
        options["resources"] = dict(placement.resources)
    if placement.label_selector:
        options["label_selector"] = dict(placement.label_selector)
    return options
