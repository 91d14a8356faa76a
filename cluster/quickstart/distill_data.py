"""Rows of tokens to distil on, and what the large model said about them.

A folder of texts becomes rows of mixed length. The large model's hidden states at every second
position are kept on disk, because a training run passes over the rows several times. It does not
know of the small model or the loss.

Shapes: T tokens of a row, P = T / 2 positions, S taken layers, E hidden.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 2048
# Long rows keep long contexts working; most are short because short ones vary more.
ROW_TOKENS = (256, 256, 256, 256, 512, 512, 1024, 1024, 2048)

Row = tuple[int, ...]


def read_texts(
    folder: Path, split: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[list[int]]]:
    """Token lists of each `*.jsonl.gz` (rows as `sample_text` writes them, or `{"text"}`)."""
    found: dict[str, list[list[int]]] = {}
    for file in sorted(folder.glob("*.jsonl.gz")):
        lists = found.setdefault(file.name.partition(".")[0], [])
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                if row["split"] != split:
                    continue
                text = row.get("text")
                if text is None:
                    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
                lists.append(tokenizer(text, verbose=False).input_ids)
    return found


def make_rows(lists: list[list[int]], rng: random.Random) -> list[Row]:
    """Rows with lengths from ROW_TOKENS. Most begin where a text begins, none is padded."""
    lists = rng.sample(lists, len(lists))
    rows: list[Row] = []
    current: list[int] = []
    rest: list[int] = []
    want = rng.choice(ROW_TOKENS)
    for tokens in lists:
        current += tokens
        while len(current) >= want:
            rows.append(tuple(current[:want]))
            left, current, want = current[want:], [], rng.choice(ROW_TOKENS)
            # The rest of a cut text must not open the next row when it can go elsewhere.
            if len(left) >= want:
                current = left
            else:
                rest += left
    while len(rest) >= 512:
        rows.append(tuple(rest[:512]))
        rest = rest[512:]
    return rows


def batches(rows: list[Row], rng: random.Random) -> Iterator[list[Row]]:
    """Shuffled batches of BATCH_TOKENS tokens, rows of one length each; a remainder is left out."""
    by_length: dict[int, list[Row]] = {}
    for row in rng.sample(rows, len(rows)):
        by_length.setdefault(len(row), []).append(row)
    grouped = [
        same[at : at + BATCH_TOKENS // length]
        for length, same in by_length.items()
        for at in range(0, len(same), BATCH_TOKENS // length)
    ]
    full = [group for group in grouped if sum(map(len, group)) == BATCH_TOKENS]
    yield from rng.sample(full, len(full))


class TeacherCache:
    """Hidden states of the large model at every second position of a row, computed once per row."""

    def __init__(
        self,
        file: Path,
        states: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        limit_bytes: int,
    ) -> None:
        """`states` maps tokens [N, T] to bf16 [N, T, S, E]; `shape` is (S, E).

        Past `limit_bytes` nothing more is kept.
        """
        self._states = states
        self._shape = shape
        self._offsets: dict[Row, int] = {}
        self._limit = limit_bytes // 2
        self._used = 0
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            out.truncate(limit_bytes)
        self._kept = torch.from_file(str(file), shared=True, size=self._limit, dtype=torch.bfloat16)

    def __call__(self, rows: list[Row]) -> Tensor:
        """States [N * P, S, E] of the rows' odd positions, in the rows' order."""
        missing = [row for row in rows if row not in self._offsets]
        fresh: dict[Row, Tensor] = {}
        if missing:
            with torch.no_grad():
                # Always a whole batch: the compiled forward pass is made for one shape.
                filled = missing + missing[:1] * (len(rows) - len(missing))
                computed = self._states(torch.tensor(filled))[: len(missing), 1::2].contiguous()
            for row, state_PSE in zip(missing, computed, strict=True):
                fresh[row] = state_PSE
                if self._used + state_PSE.numel() <= self._limit:
                    self._kept[self._used : self._used + state_PSE.numel()] = state_PSE.flatten()
                    self._offsets[row] = self._used
                    self._used += state_PSE.numel()
        return torch.cat([fresh[row] if row in fresh else self._read(row) for row in rows])

    def _read(self, row: Row) -> Tensor:
        at = self._offsets[row]
        count = len(row) // 2 * self._shape[0] * self._shape[1]
        return self._kept[at : at + count].view(-1, *self._shape)
