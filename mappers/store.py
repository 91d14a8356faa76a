"""Mapper folders: written whole or not at all, and loaded only for the models they were made for.

A folder holds `manifest.json` and `mapper.safetensors` (bf16 weights, fp32 biases).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cluster.errors import MapperError
from mappers.fingerprint import ModelFingerprint
from mappers.manifest import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    MapperManifest,
    read_manifest,
    require_equal,
)
from mappers.mapper import IdentityMapper, LinearMapper, LinearWeights, Mapper
from mappers.mlp import MlpMapper, MlpWeights, mlp_from_tensors, mlp_tensors

IDENTITY = "identity"


def load_mapper(
    folder: Path | str,
    source: ModelFingerprint,
    target: ModelFingerprint,
    device: torch.device | str = "cpu",
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    allow_refused: bool = False,
) -> Mapper:
    """The mapper in `folder`, or the identity for the word "identity", for two running models.

    Raises MapperMismatch naming the field in which a model differs from the one the mapper was made
    for (or, for identity, in which the two models differ); MapperError when files are missing or
    damaged, or the mapper was judged `refuse` and `allow_refused` is false.
    """
    if str(folder) == IDENTITY:
        require_equal("target", source, target)
        return IdentityMapper(source.geometry, dtype)
    folder = Path(folder)
    manifest = read_manifest(folder)
    manifest.check(source, target)
    if manifest.score is not None and manifest.score.verdict == "refuse" and not allow_refused:
        raise MapperError(f"{folder} was judged unfit: {'; '.join(manifest.score.reasons)}")
    if weights_sha256(folder) != manifest.weights_sha256:
        raise MapperError(
            f"{folder / WEIGHTS_FILE} does not match its manifest: copy the folder again or refit"
        )
    if manifest.networks is None:
        return LinearMapper.load(folder, device=device, compute_dtype=compute_dtype, dtype=dtype)
    weights = mlp_from_tensors(load_file(folder / WEIGHTS_FILE), manifest.source_layers)
    return MlpMapper(
        manifest.source,
        manifest.target,
        weights,
        device=device,
        compute_dtype=compute_dtype,
        dtype=dtype,
    )


def mapper_id(folder: Path | str) -> str:
    """16 hex digits that change with anything in the manifest or the weights; for cache salts."""
    if str(folder) == IDENTITY:
        return IDENTITY
    read_manifest(Path(folder))
    return hashlib.sha256((Path(folder) / MANIFEST_FILE).read_bytes()).hexdigest()[:16]


def weights_sha256(folder: Path) -> str:
    """SHA-256 of a folder's weight file; MapperError when it is missing."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise MapperError(f"{path} is missing: refit with `kvcascade fit`")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_weights(folder: Path, weights: LinearWeights | MlpWeights) -> str:
    """Write the weight file into an existing folder; gives its SHA-256."""
    if isinstance(weights, MlpWeights):
        tensors = mlp_tensors(weights)
    else:
        tensors = {
            "k_weight_LGFO": weights.k_weight_LGFO.to(torch.bfloat16),
            "k_bias_LGO": weights.k_bias_LGO.float(),
            "v_weight_LGFO": weights.v_weight_LGFO.to(torch.bfloat16),
            "v_bias_LGO": weights.v_bias_LGO.float(),
        }
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS_FILE)
    # safetensors writes files that only their owner can read; a mapper is served by others.
    (folder / WEIGHTS_FILE).chmod(0o644)
    return weights_sha256(folder)


def write_manifest(folder: Path, manifest: MapperManifest) -> None:
    """Write or replace a folder's manifest in one step."""
    partial = folder / f".{MANIFEST_FILE}.partial"
    partial.write_text(manifest.model_dump_json(indent=2) + "\n")
    os.replace(partial, folder / MANIFEST_FILE)


def save_mapper(
    folder: Path, weights: LinearWeights | MlpWeights, manifest: MapperManifest
) -> MapperManifest:
    """Write a mapper folder atomically, replacing an earlier mapper there.

    `manifest.weights_sha256` is filled in; the manifest as written is returned. MapperError when
    `folder` holds something that is not a mapper.
    """
    require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        manifest = manifest.model_copy(update={"weights_sha256": write_weights(partial, weights)})
        write_manifest(partial, manifest)
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def require_replaceable(folder: Path) -> None:
    """MapperError unless `folder` is absent, empty or a mapper folder."""
    if not folder.exists():
        return
    if not folder.is_dir() or {path.name for path in folder.iterdir()} - {
        MANIFEST_FILE,
        WEIGHTS_FILE,
    }:
        raise MapperError(f"{folder} exists and is not a mapper folder; choose another output")
