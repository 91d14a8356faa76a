"""Identity of a model on disk: what must agree before a mapper fitted for it may be used.

Reads files only; needs neither torch nor transformers, and takes seconds for a 64 GB checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from cluster.errors import MapperError
from mappers.geometry import KVGeometry, RopeSpec, kv_geometry, read_config, rope_spec

# Bytes hashed per tensor: all of a small one, else this many windows spread evenly over it.
_WINDOW_BYTES = 4096
_WINDOWS = 8


class ModelFingerprint(BaseModel):
    """Everything a mapper assumes of one of its two models.

    `weights_sha256` covers name, dtype, shape and up to 32 KiB of every tensor, in name order, so
    it does not depend on how a checkpoint is cut into files. It tells a fine-tune, a quantisation
    or another revision apart; it is no defence against someone forging one. `template_sha256` is
    None when the model has no chat template.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_type: str
    weights_sha256: str
    tokenizer_sha256: str
    template_sha256: str | None
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    max_position: int
    rope: RopeSpec

    @property
    def geometry(self) -> KVGeometry:
        """The shape of this model's KV cache."""
        return KVGeometry(self.layers, self.kv_heads, self.head_dim)


def fingerprint(model_dir: Path) -> ModelFingerprint:
    """Fingerprint of an HF model folder: config.json, tokenizer.json, chat template, safetensors.

    Raises MapperError when a file is missing or the architecture is unsupported.
    """
    config = read_config(model_dir)
    geometry = kv_geometry(config)
    rope = rope_spec(config)
    tokenizer = model_dir / "tokenizer.json"
    if not tokenizer.is_file():
        raise MapperError(f"{tokenizer} is missing: both models need their fast tokenizer")
    return ModelFingerprint(
        model_type=str(config["model_type"]),
        weights_sha256=_weights_sha256(model_dir),
        tokenizer_sha256=hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        template_sha256=_template_sha256(model_dir),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=int(config["hidden_size"]),
        max_position=rope.max_position,
        rope=rope,
    )


def _template_sha256(model_dir: Path) -> str | None:
    template = model_dir / "chat_template.jinja"
    if template.is_file():
        return hashlib.sha256(template.read_bytes()).hexdigest()
    settings = model_dir / "tokenizer_config.json"
    if not settings.is_file():
        return None
    inline = json.loads(settings.read_text()).get("chat_template")
    if inline is None:
        return None
    text = inline if isinstance(inline, str) else json.dumps(inline, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _weights_sha256(model_dir: Path) -> str:
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in _weight_files(model_dir):
        header, data_start = _read_header(path)
        for name, entry in header.items():
            tensors[name] = (path, data_start, entry)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        path, data_start, entry = tensors[name]
        begin, end = entry["data_offsets"]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        with path.open("rb") as file:
            for offset, size in _windows(end - begin):
                file.seek(data_start + begin + offset)
                digest.update(file.read(size))
    return digest.hexdigest()


def _weight_files(model_dir: Path) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [model_dir / name for name in names]
    else:
        files = [model_dir / "model.safetensors"]
    for path in files:
        if not path.is_file():
            raise MapperError(f"{path} is missing: mappers need the model as safetensors")
    return files


def _read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Tensor entries of a safetensors file and the offset at which its data begins."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = cast(dict[str, dict[str, Any]], json.loads(file.read(size)))
    header.pop("__metadata__", None)
    return header, 8 + size


def _windows(tensor_bytes: int) -> list[tuple[int, int]]:
    """(offset, size) of the parts of a tensor that are hashed, first and last bytes included."""
    if tensor_bytes <= _WINDOW_BYTES * _WINDOWS:
        return [(0, tensor_bytes)]
    last = tensor_bytes - _WINDOW_BYTES
    return [(last * i // (_WINDOWS - 1), _WINDOW_BYTES) for i in range(_WINDOWS)]
