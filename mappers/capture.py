"""Running HF models over text and taking their KV caches out as plain tensors.

Knows transformers' model and cache classes; knows nothing of fitting.

Shapes: S sequences, B sequences in a batch, T tokens, L layers, H KV heads, D head_dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from cluster.errors import MapperError
from mappers.rope import Rope


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """Equally long token sequences packed from texts."""

    ids_ST: Tensor
    texts: int

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return self.ids_ST.numel()

    @property
    def sha256(self) -> str:
        """Hash of the exact token ids and their cut into sequences."""
        ids = self.ids_ST.to(torch.int64).contiguous()
        return hashlib.sha256(repr(tuple(ids.shape)).encode() + ids.numpy().tobytes()).hexdigest()


def pack(
    texts: Iterable[str], model_dir: Path, sequence_tokens: int, max_tokens: int
) -> TokenSequences:
    """Tokenise texts with a model's tokenizer and pack them end to end into full sequences.

    Texts are separated by the end-of-text token. Every sequence begins with the tokenizer's
    beginning-of-text token where it has one, as served prompts do, so that the first position,
    which attention treats unlike any other, is calibrated on what it will hold. Stops at
    `max_tokens`; MapperError when the texts do not fill one sequence.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    body = sequence_tokens - len(begin)
    wanted = max(1, max_tokens // sequence_tokens)
    stream: list[int] = []
    used = 0
    for text in texts:
        if len(stream) >= wanted * body:
            break
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
        used += 1
    whole = min(wanted, len(stream) // body)
    if whole == 0:
        raise MapperError(
            f"{used} texts hold {len(stream)} tokens, fewer than one sequence of "
            f"{sequence_tokens}; give more text or shorter sequences"
        )
    rows = [begin + stream[i * body : (i + 1) * body] for i in range(whole)]
    return TokenSequences(torch.tensor(rows), used)


def windows(
    texts: Iterable[str], model_dir: Path, window_tokens: int, max_tokens: int
) -> TokenSequences:
    """Cut texts into windows that never cross from one text into another.

    What follows a prefix then depends on it, which `pack` does not promise. Each window begins with
    the beginning-of-text token, where the tokenizer has one and the text does not start with it;
    texts shorter than a window are passed over. Stops at `max_tokens`; MapperError when no text
    fills a window.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    wanted = max(1, max_tokens // window_tokens)
    rows: list[list[int]] = []
    used = 0
    for text in texts:
        if len(rows) >= wanted:
            break
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        before = len(rows)
        while len(rows) < wanted:
            window = (ids if ids[: len(begin)] == begin else begin + ids)[:window_tokens]
            if len(window) < window_tokens:
                break
            rows.append(window)
            ids = ids[window_tokens:]
        used += len(rows) > before
    if not rows:
        raise MapperError(
            f"no held-out text fills a window of {window_tokens} tokens; give longer texts or "
            f"shorter sequences"
        )
    return TokenSequences(torch.tensor(rows), used)


def load_model(model_dir: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    """An HF causal language model in eval mode. transformers types its models loosely.

    bf16 is about 2.7 times as fast as fp32 on CPUs with AMX or AVX512_BF16.
    """
    model = cast(Any, AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype))
    return model.eval().to(device)


@torch.inference_mode()
def cached_kv(model: Any, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Run a model, without its head, over sequences that start at position 0.

    Gives keys (with RoPE) and values as it caches them, both [L, B, T, H, D].
    """
    output = model.base_model(input_ids=ids_BT.to(model.device), use_cache=True)
    return cache_to_kv(output.cache)


@torch.inference_mode()
def position_free(kv: tuple[Tensor, Tensor], rope: Rope) -> tuple[Tensor, Tensor]:
    """Position-free keys (fp32) and values (their dtype), both [L, B*T, H, D], of `cached_kv`'s."""
    k_LBTHD, v_LBTHD = kv
    k_LBTHD = rope.strip(k_LBTHD, rope.positions(0, k_LBTHD.shape[2]))
    return k_LBTHD.flatten(1, 2), v_LBTHD.flatten(1, 2)


def position_free_kv(model: Any, rope: Rope, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`position_free` of what a model caches for sequences that start at position 0."""
    return position_free(cached_kv(model, ids_BT), rope)


def cache_to_kv(cache: DynamicCache) -> tuple[Tensor, Tensor]:
    """Keys as cached (with RoPE) and values of an HF cache, both [L, B, T, H, D]."""
    layers = cast(list[DynamicLayer], cache.layers)
    k_LBHTD = torch.stack([cast(Tensor, layer.keys) for layer in layers])
    v_LBHTD = torch.stack([cast(Tensor, layer.values) for layer in layers])
    return k_LBHTD.transpose(2, 3), v_LBHTD.transpose(2, 3)


def kv_to_cache(k_LBTHD: Tensor, v_LBTHD: Tensor) -> DynamicCache:
    """An HF cache that holds the given keys (with RoPE) and values; inverse of `cache_to_kv`."""
    cache = DynamicCache()
    pairs = zip(k_LBTHD.transpose(2, 3), v_LBTHD.transpose(2, 3), strict=True)
    for layer, (k_BHTD, v_BHTD) in enumerate(pairs):
        cache.update(k_BHTD.contiguous(), v_BHTD.contiguous(), layer)
    return cache
