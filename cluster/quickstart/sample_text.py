"""Samples the chats and documents that ship with the quickstart pair from its large model.

`python -m cluster.quickstart.sample_text` rewrites `text/sampled.jsonl.gz`. It runs vLLM on the
folder it is given and does not know what the text is used for.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.quickstart.prompts import document_request, follow_up, question

if TYPE_CHECKING:
    from vllm import LLM

Messages = list[dict[str, str]]

CONTEXT_TOKENS = 2048
HELDOUT_EVERY = 10

_ANSWER_TOKENS = 320
_DOCUMENT_TOKENS = 1100
_TURNS = (1, 1, 1, 2, 2, 3)


def sample(
    llm: LLM, chats: int, documents: int, rng: random.Random, *, temperature: float
) -> list[Messages]:
    """Conversations of one to three turns and single long documents, all answered by `llm`."""
    talks: list[Messages] = [[_user(question(rng))] for _ in range(chats)]
    turns = [rng.choice(_TURNS) for _ in talks]
    for turn in range(max(turns)):
        going = [talk for talk, n in zip(talks, turns, strict=True) if n > turn]
        if turn:
            for talk in going:
                talk.append(_user(follow_up(rng)))
        _answer(llm, going, _ANSWER_TOKENS, temperature)
    papers: list[Messages] = [[_user(document_request(rng))] for _ in range(documents)]
    _answer(llm, papers, _DOCUMENT_TOKENS, temperature)
    both = talks + papers
    rng.shuffle(both)
    return both


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _answer(llm: LLM, talks: list[Messages], max_tokens: int, temperature: float) -> None:
    from vllm import SamplingParams

    if not talks:
        return
    # No nucleus cut and no seed per request: on a CPU either takes longer than the model.
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    for talk, out in zip(talks, llm.chat(talks, params), strict=True):  # type: ignore[arg-type]
        talk.append({"role": "assistant", "content": out.outputs[0].text.strip()})


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
    model: Annotated[Path, typer.Option(help="Model folder to sample from.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    chats: Annotated[int, typer.Option(help="Conversations of one to three turns.")] = 900,
    documents: Annotated[int, typer.Option(help="Texts of up to about 1,100 tokens.")] = 120,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Same seed, same questions.")] = 0,
) -> None:
    """Sample conversations and documents from a model folder into a gzipped JSONL file."""
    from vllm import LLM

    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        seed=seed,
    )
    save(sample(llm, chats, documents, random.Random(seed), temperature=temperature), out)


if __name__ == "__main__":
    typer.run(main)
