"""Samples the chats and documents that ship with the quickstart pair from its large model.

`python -m cluster.quickstart.sample_text` writes a gzipped JSONL file. Many conversations are
sampled at once, all at the same position: a conversation is fed its own forced tokens (the
questions) or what was sampled before. It does not know what the text is used for.

Shapes: L layers, N conversations, T positions, H KV heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from torch import Tensor

from cluster.quickstart import llama
from cluster.quickstart.prompts import document_request, follow_up, question
from cluster.quickstart.text import SYSTEM, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELDOUT_EVERY = 10


@dataclass
class Talk:
    """One conversation while it is sampled: its messages and the tokens still to be fed."""

    messages: Messages
    forced: list[int]
    answer: list[int] = field(default_factory=list)


def sample(
    layers: Sequence[llama.Layer],
    embed: Tensor,
    norm_E: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    first_questions: Sequence[str],
    rng: random.Random,
    *,
    positions: int,
    temperature: float,
) -> list[Messages]:
    """Conversations of about `positions` tokens, one for each first question, sampled together.

    When an answer ends, a follow-up question continues its conversation. An answer that is cut
    off by the end is kept only when nothing else was said.
    """
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def turn(talk: Talk, content: str) -> None:
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n" if not talk.messages else "\n"
        talk.messages.append({"role": "user", "content": content})
        talk.forced = tokenizer(head + text).input_ids

    talks = [Talk([], []) for _ in first_questions]
    for talk, content in zip(talks, first_questions, strict=True):
        turn(talk, content)
    k_LNHTD, v_LNHTD = torch.zeros(
        2, len(layers), len(talks), llama.KV_HEADS, positions, llama.HEAD_DIM, dtype=torch.bfloat16
    )
    tokens = torch.tensor([talk.forced.pop(0) for talk in talks])
    for at in range(positions):
        state_NE = llama.decode(embed, layers, tokens, k_LNHTD, v_LNHTD, at)
        logits_NV = (llama.norm(state_NE, norm_E) @ embed.T).float() / temperature
        # The largest of p / exponential noise is a sample of p.
        noise_NV = torch.rand_like(logits_NV).log_().neg_()
        drawn = (F.softmax(logits_NV, -1) / noise_NV).argmax(-1).tolist()
        for row, talk in enumerate(talks):
            if talk.forced:
                tokens[row] = talk.forced.pop(0)
                continue
            tokens[row] = drawn[row]
            if drawn[row] != end:
                talk.answer.append(drawn[row])
                continue
            _close(talk, tokenizer)
            turn(talk, follow_up(rng))
    return [_finished(talk, tokenizer) for talk in talks]


def _close(talk: Talk, tokenizer: PreTrainedTokenizerBase) -> None:
    content = str(tokenizer.decode(talk.answer)).strip()
    talk.messages.append({"role": "assistant", "content": content})
    talk.answer = []


def _finished(talk: Talk, tokenizer: PreTrainedTokenizerBase) -> Messages:
    if len(talk.messages) == 1:
        _close(talk, tokenizer)
    elif len(talk.messages) % 2:
        talk.messages.pop()
    return talk.messages


def save(talks: list[Messages], out: Path) -> None:
    """Gzipped JSON lines `{"split", "messages"}`; every tenth conversation is held out."""
    rows = [
        {"split": "train" if at % HELDOUT_EVERY else "heldout", "messages": talk}
        for at, talk in enumerate(talks)
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    partial = out.with_name(out.name + ".partial")
    # A fixed time stamp keeps the file the same for the same text.
    partial.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    partial.replace(out)


def main(
    model: Annotated[Path, typer.Option(help="The large model's folder.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    chats: Annotated[int, typer.Option(help="Conversations.")] = 512,
    documents: Annotated[int, typer.Option(help="Conversations that begin with an article.")] = 64,
    positions: Annotated[int, typer.Option(help="Tokens of a conversation.")] = 640,
    together: Annotated[int, typer.Option(help="Conversations sampled at once.")] = 96,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Same seed, same questions.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    adapter: Annotated[
        Path | None, typer.Option(help="Sample from the small model with this adapter instead.")
    ] = None,
) -> None:
    """Sample conversations from the large (or small) model into a gzipped JSONL file."""
    from rich.progress import track
    from transformers import AutoTokenizer

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    embed, layers, norm_E = llama.load_large(model)
    if adapter is not None:
        factors = {name: weight.float() for name, weight in load_file(adapter).items()}
        layers, norm_E = llama.small_layers(layers, factors), factors["norm.weight"].bfloat16()
    firsts = [question(rng) for _ in range(chats)] + [
        document_request(rng) for _ in range(documents)
    ]
    rng.shuffle(firsts)
    talks: list[Messages] = []
    for at in track(range(0, len(firsts), together), description="sampling"):
        some = firsts[at : at + together]
        with torch.no_grad():
            talks += sample(
                layers,
                embed,
                norm_E,
                tokenizer,
                some,
                rng,
                positions=positions,
                temperature=temperature,
            )
        save(talks, out)


if __name__ == "__main__":
    typer.run(main)
