"""Batches of text as both models hold them, the source's KV perhaps kept on disk between.

When two models do not fit into memory together, the source reads everything first and leaves its KV
in files, as it caches them, and makes room for the target. Numbers are those of both at once.

Shapes: S sequences, B of them in a batch, T tokens, N = B*T, L layers, H KV heads, D head_dim, F
all elements of a token's keys or values in the source, O in the target.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mappers.attention import Attended, watched_attention
from mappers.capture import TokenSequences, cached_kv, load_model, position_free
from mappers.fitting.attention_weights import Relevance, relevance, softened
from mappers.geometry import KVGeometry
from mappers.rope import Rope


@dataclass(frozen=True, slots=True)
class Observed:
    """Position-free keys and values of one batch, [N, F] of the source and [N, O] of the target."""

    x: tuple[Tensor, Tensor]
    y: tuple[Tensor, Tensor]
    relevance: Relevance | None


class ModelPair:
    """Two HF models that are loaded when first asked for."""

    def __init__(
        self,
        folders: tuple[Path, Path],
        ropes: tuple[Rope, Rope],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.ropes = ropes
        self.device = device
        self._folders = folders
        self._dtype = dtype
        self._loaded: dict[int, Any] = {}

    @property
    def source(self) -> Any:
        """The source model."""
        return self._model(0)

    @property
    def target(self) -> Any:
        """The target model."""
        return self._model(1)

    def release_source(self) -> None:
        """Give the source's memory back until it is asked for again."""
        self._loaded.pop(0, None)
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def _model(self, at: int) -> Any:
        if at not in self._loaded:
            self._loaded[at] = load_model(self._folders[at], self._dtype, self.device)
        return self._loaded[at]


class Feed:
    """One set of sequences, batch by batch. Batches do not depend on who reads them.

    With `spool_dir` the source's KV come from files there, which `spool` must have made.
    `attention_power` softens relevance (`attention_weights.softened`).
    """

    def __init__(
        self,
        data: TokenSequences,
        batch_tokens: int,
        models: ModelPair,
        spool_dir: Path | None = None,
        *,
        attention_power: float = 1.0,
    ) -> None:
        self.data = data
        self._power = attention_power
        self.spool_dir = spool_dir
        self._models = models
        self.sequence_tokens = data.ids_ST.shape[1]
        self.batches = torch.split(data.ids_ST, max(1, batch_tokens // self.sequence_tokens))

    def spool(self, batches: range, advance: Callable[[int], None] = lambda tokens: None) -> None:
        """Run the source over batches that are not on disk yet. Files are whole or absent."""
        assert self.spool_dir is not None
        self.spool_dir.mkdir(parents=True, exist_ok=True)
        for at in batches:
            ids_BT = self.batches[at]
            path = self._path(at)
            if not path.is_file():
                k_LBTHD, v_LBTHD = cached_kv(self._models.source, ids_BT)
                partial = path.with_suffix(".partial")
                save_file({"k": k_LBTHD.contiguous(), "v": v_LBTHD.contiguous()}, partial)
                os.replace(partial, path)
            advance(ids_BT.numel())

    def read(self, at: int, *, weigh: bool = False) -> Observed:
        """One batch; with `weigh` also how much each of its tokens matters to the target."""
        ids_BT = self.batches[at]
        if self.spool_dir is None:
            kv_x = cached_kv(self._models.source, ids_BT)
        else:
            file = load_file(self._path(at), device=str(self._models.device))
            kv_x = file["k"], file["v"]
        seen: list[tuple[Tensor, Tensor]] = []

        def see(one: Attended) -> None:
            raw = relevance(one.q_BQTD, one.k_BHPD, one.v_BHPD, one.scale)
            keys, values = (softened(part, ids_BT.shape[1], self._power) for part in raw)
            seen.append((keys, values))

        if weigh:
            with watched_attention(self._models.target, see):
                kv_y = cached_kv(self._models.target, ids_BT)
        else:
            kv_y = cached_kv(self._models.target, ids_BT)
        ropes = self._models.ropes
        return Observed(
            x=_rows(position_free(kv_x, ropes[0])),
            y=_rows(position_free(kv_y, ropes[1])),
            relevance=_stacked(seen) if weigh else None,
        )

    def spool_bytes(self, source: KVGeometry, dtype: torch.dtype) -> int:
        """Disk that the source's KV of all batches takes."""
        return self.data.tokens * source.kv_bytes_per_token(dtype.itemsize)

    def _path(self, at: int) -> Path:
        assert self.spool_dir is not None
        return self.spool_dir / f"batch-{at:05}.safetensors"


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of a model's weight files, about what it takes in memory when it is 16-bit."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _rows(kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """[L, N, H, D] -> [N, L*H*D]."""
    k_LNHD, v_LNHD = kv
    return k_LNHD.transpose(0, 1).flatten(1), v_LNHD.transpose(0, 1).flatten(1)


def _stacked(seen: list[tuple[Tensor, Tensor]]) -> Relevance:
    keys, values = zip(*seen, strict=True)
    return torch.stack(keys), torch.stack(values)
