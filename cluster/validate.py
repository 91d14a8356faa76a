"""Checks of a Serve config file and of the pair of models that it names, without running them.

Reads configuration and tokenizer files only: no GPU, no weights in memory, no engine. It does not
know whether the cluster has the GPUs that the file asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.config import (
    IMPORT_PATH,
    CascadeConfig,
    ModelConfig,
    load_serve_config,
)
from cluster.errors import ConfigError, MapperError, ModelError, UserError
from cluster.model_files import Tokenizer, locate_model
from cluster.sources import resolve_mapper

Level = Literal["ok", "problem", "unchecked"]


@dataclass(frozen=True)
class Finding:
    """Result of one check. `key` is the configuration key that it is about."""

    level: Level
    key: str
    text: str


@dataclass(frozen=True)
class _Model:
    """What the files of one model say; `config` is its `config.json`."""

    folder: Path
    config: dict[str, Any]
    tokenizer: Tokenizer | None


def validate(path: Path) -> list[Finding]:
    """Every finding about the Serve config at `path`, in the order of the checks.

    Problems inside the file raise no error: they are findings, too.
    """
    try:
        document, config = load_serve_config(path)
    except ConfigError as error:
        return [Finding("problem", *_split(line)) for line in str(error).splitlines()]
    from cluster.validate_routing import check_routing

    findings = [Finding("ok", str(path), "every key and value of `args` is known and in range")]
    findings += _check_document(document)
    models = {}
    for key, model in (("small", config.small), ("large", config.large)):
        try:
            models[key] = _read(model)
        except ConfigError as error:
            findings.append(Finding("problem", f"{key}.source", str(error)))
            continue
        except ModelError as error:
            findings.append(Finding("unchecked", f"{key}.source", str(error)))
            continue
        findings += _check_model(key, model, models[key])
    if config.large.max_model_len_tokens < config.small.max_model_len_tokens:
        findings.append(
            Finding(
                "problem",
                "large.max_model_len_tokens",
                f"{config.large.max_model_len_tokens} is less than the small model's "
                f"{config.small.max_model_len_tokens}: the longest conversations could not be "
                "escalated; make it at least as large",
            )
        )
    if len(models) == 2:
        findings += _check_pair(config, models["small"], models["large"])
        findings += _check_places(config)
    findings += _check_mapper(config, models)
    findings += check_routing(config)
    return findings


def _split(line: str) -> tuple[str, str]:
    key, separator, text = line.partition(": ")
    return (key, text) if separator else ("config", line)


def _check_document(document: dict[str, Any]) -> Iterator[Finding]:
    """Ray Serve's own schema, which lets unknown keys pass, and the names of the deployments."""
    from pydantic import ValidationError
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    from deployments.app import DEPLOYMENTS

    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        messages: dict[str, list[str]] = {}
        for item in error.errors():
            message = item["msg"].removeprefix("Value error, ")
            messages.setdefault(_key(document, item["loc"]), []).append(message)
        for key, alternatives in messages.items():
            yield Finding("problem", key, ", or: ".join(alternatives))
        return
    parts: list[tuple[str, dict[str, Any], Any]] = [
        ("", document, ServeDeploySchema),
        ("http_options.", document.get("http_options") or {}, HTTPOptionsSchema),
    ]
    names = []
    for number, application in enumerate(document["applications"]):
        where = f"applications.{number}."
        parts.append((where, application, ServeApplicationSchema))
        for index, deployment in enumerate(application.get("deployments") or []):
            parts.append((f"{where}deployments.{index}.", deployment, DeploymentSchema))
            if application["import_path"] == IMPORT_PATH:
                names.append((f"{where}deployments.{index}.name", deployment["name"]))
    wrong = [
        Finding("problem", where + key, "Ray Serve knows no such key; correct its spelling")
        for where, part, schema in parts
        for key in part
        if key not in schema.model_fields
    ]
    wrong += [
        Finding("problem", key, f"{name!r} is no deployment; they are {', '.join(DEPLOYMENTS)}")
        for key, name in names
        if name not in DEPLOYMENTS
    ]
    yield from wrong
    if not wrong:
        yield Finding("ok", "applications", "the file is a Ray Serve config")


def _key(document: Any, location: tuple[int | str, ...]) -> str:
    """The key that a validation error is about, without pydantic's names of union members."""
    key: list[str] = []
    for part in location:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            if isinstance(document, dict):  # a missing key, not a member of a union
                key.append(str(part))
            break
        key.append(str(part))
    return ".".join(key) or "config"


def _read(model: ModelConfig) -> _Model:
    from mappers.geometry import read_config

    folder = locate_model(model.source)
    try:
        return _Model(folder, read_config(folder), Tokenizer.read(folder))
    except MapperError as error:
        raise ModelError(str(error)) from None


def _check_model(key: str, model: ModelConfig, files: _Model) -> Iterator[Finding]:
    from mappers.geometry import kv_geometry, rope_spec

    try:
        rope = rope_spec(files.config)
    except MapperError as error:
        yield Finding("problem", f"{key}.source", f"{error}; choose another model")
        return
    geometry = kv_geometry(files.config)
    yield Finding(
        "ok",
        f"{key}.source",
        f"{model.source}: {geometry.layers} layers, {geometry.kv_heads} KV heads of "
        f"{geometry.head_dim}, RoPE {rope.rope_type} theta {rope.rope_theta:,.0f}",
    )
    heads = int(files.config["num_attention_heads"])
    if heads % model.tensor_parallel_size or geometry.kv_heads % model.tensor_parallel_size:
        yield Finding(
            "problem",
            f"{key}.tensor_parallel_size",
            f"{model.tensor_parallel_size} does not divide the model's {geometry.kv_heads} KV "
            f"heads and {heads} heads; choose a common divisor",
        )
    limit = rope.max_position
    if rope.factor is not None and rope.original_max_position_embeddings is not None:
        limit = max(limit, int(rope.factor * rope.original_max_position_embeddings))
    if model.max_model_len_tokens > limit:
        yield Finding(
            "problem",
            f"{key}.max_model_len_tokens",
            f"{model.max_model_len_tokens} exceeds the model's {limit} positions; lower it",
        )


def _check_pair(config: CascadeConfig, small: _Model, large: _Model) -> Iterator[Finding]:
    from mappers.geometry import kv_geometry

    source, target = kv_geometry(small.config), kv_geometry(large.config)
    if config.mapper.small_to_large == "identity" and source != target:
        yield Finding(
            "problem",
            "mapper.small_to_large",
            f"`identity` needs one model twice, but the shapes are {source} and {target}; "
            "fit a mapper with `kvcascade fit`",
        )
    for name, ours, theirs in (
        ("KV heads", source.kv_heads, target.kv_heads),
        ("head_dim", source.head_dim, target.head_dim),
    ):
        note = "" if ours == theirs else "; they differ, so only a mapper of support `full` fits"
        yield Finding("ok", "small, large", f"{name}: {ours} and {theirs}{note}")
    if small.tokenizer is None or large.tokenizer is None:
        lacking = small if small.tokenizer is None else large
        yield Finding(
            "unchecked", "small, large", f"tokenizers: {lacking.folder} has no tokenizer.json"
        )
        return
    difference = small.tokenizer.difference(large.tokenizer)
    if difference is None:
        yield Finding("ok", "small, large", "both read and write the same tokens")
    else:
        yield Finding(
            "problem",
            "small, large",
            f"the tokenizers differ ({difference}); both models must share one vocabulary, "
            "choose them from one family",
        )


def _check_places(config: CascadeConfig) -> Iterator[Finding]:
    """What `auto` is, for both directions; other places are the configuration's own words."""
    from cluster.place import mapper_place

    settings = config.mapper
    for name, place, back in (
        ("place", settings.place, False),
        ("place_back", settings.place_back, True),
    ):
        if place != "auto" or (back and settings.large_to_small is None):
            continue
        key = f"mapper.{name}"
        try:
            choice = mapper_place(config, back=back)
        except ConfigError as error:
            yield Finding("problem", "mapper.links", str(error).removeprefix("args.mapper.links: "))
            continue
        where = "on its own nodes" if choice.at == "own" else f"beside the {choice.at} model"
        yield Finding("ok", key, f"`auto` puts it {where}: {choice.reason}")


def _check_mapper(config: CascadeConfig, models: dict[str, _Model]) -> Iterator[Finding]:
    from mappers.fingerprint import fingerprint
    from mappers.geometry import kv_geometry, rope_spec
    from mappers.manifest import read_manifest, require_equal

    key = "mapper.small_to_large"
    try:
        folder = resolve_mapper(config.mapper.small_to_large)
        if folder == "identity":
            return
        manifest = read_manifest(Path(folder))
    except UserError as error:
        yield Finding("unchecked", key, str(error))
        return
    for name, role, made_for in (
        ("small", "source", manifest.source),
        ("large", "target", manifest.target),
    ):
        if name not in models:
            continue
        files = models[name]
        try:
            if any(files.folder.glob("*.safetensors")):
                require_equal(role, made_for, fingerprint(files.folder))
                yield Finding("ok", key, f"made for this {name} model")
                continue
            partly = made_for.model_copy(
                update={
                    "rope": rope_spec(files.config),
                    **_shape(kv_geometry(files.config)),
                }
            )
            require_equal(role, made_for, partly)
        except MapperError as error:
            yield Finding("problem", key, str(error))
            continue
        yield Finding(
            "unchecked",
            key,
            f"made for a model shaped like {name}; its weights are not here, so they are compared "
            "when the engines start",
        )
    if manifest.score is not None and manifest.score.verdict == "refuse":
        reasons = "; ".join(manifest.score.reasons)
        if config.mapper.allow_refused:
            yield Finding("ok", key, f"allowed although it failed its own test ({reasons})")
            return
        yield Finding(
            "problem",
            key,
            f"the mapper failed its own test ({reasons}); fit another, or set "
            "`mapper.allow_refused: true` to serve it all the same",
        )


def _shape(geometry: Any) -> dict[str, int]:
    return {name: getattr(geometry, name) for name in ("layers", "kv_heads", "head_dim")}
