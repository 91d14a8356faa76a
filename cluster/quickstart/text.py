"""The text the mapper is fitted and scored on, and long conversations for demonstrations.

Conversations sampled from the large model ship with the package; the language reference that is
part of every CPython (`pydoc_data.topics`) is added as prose. Both are split once into calibration
and held-out text. Imports no torch, and knows tokenizers only as something that counts.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]

SAMPLED_FILE = Path(__file__).with_name("sampled.jsonl.gz")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

_HELDOUT_TOPIC_EVERY = 8
# About 2,000 tokens, so that no single topic fills the calibration.
_PASSAGE_CHARS = 8000
_QUESTIONS = (
    "Thank you. What is the most important point of all this?",
    "Which of these things should I look at first, and why?",
    "What would you add to what you have told me so far?",
    "Please give me a short summary of our conversation.",
    "What is one thing here that people often get wrong?",
)


def calibration_texts() -> list[str]:
    """Conversations in ChatML and passages of prose to fit a mapper on; over 150,000 tokens."""
    return _texts(heldout=False)


def heldout_texts() -> list[str]:
    """Text of the same kinds, over 20,000 tokens, that shares nothing with the calibration."""
    return _texts(heldout=True)


def long_conversation_messages(
    target_tokens: int, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Messages:
    """Held-out conversation of at most `target_tokens` tokens (about 30 fewer at worst).

    Counted with the chat template and the generation prompt; it ends with a user's question. The
    system message names the seed, so that two seeds share no cached prefix. Raises ValueError
    when `target_tokens` is under 128.
    """
    if target_tokens < 128:
        raise ValueError(f"A conversation of {target_tokens} tokens is too short: ask for 128.")
    rng = random.Random(seed)
    head: dict[str, str] = {
        "role": "system",
        "content": f"Conversation {rng.randrange(10**6)}. {SYSTEM}.",
    }
    tail = {"role": "user", "content": rng.choice(_QUESTIONS)}
    said: Messages = []

    def excess_tokens() -> int:
        text = tokenizer.apply_chat_template(
            [head, *said, tail], tokenize=False, add_generation_prompt=True
        )
        return len(tokenizer(text).input_ids) - target_tokens

    for exchange in _exchanges(rng):
        said += exchange
        excess = excess_tokens()
        if excess < 0:
            continue
        words = tokenizer(said[-1]["content"]).input_ids
        if excess < len(words):
            kept = str(tokenizer.decode(words[: len(words) - excess]))
            said[-1] = {"role": "assistant", "content": kept}
        # A cut between two tokens of one character can read back as more tokens than were kept.
        if excess_tokens() > 0:
            said = said[:-2]
        break
    return [head, *said, tail]


def _exchanges(rng: random.Random) -> Iterator[Messages]:
    """Questions with answers from held-out text, shuffled, without an end."""
    chats = [talk[at : at + 2] for talk in _sampled(heldout=True) for at in range(0, len(talk), 2)]
    manual = [
        [
            {"role": "user", "content": f"What does the Python manual say about {topic}?"},
            {"role": "assistant", "content": passage},
        ]
        for topic, passage in passages(heldout=True)
    ]
    everything = chats + manual
    while True:
        yield from rng.sample(everything, len(everything))


def _texts(*, heldout: bool) -> list[str]:
    chats = [_chatml(talk) for talk in _sampled(heldout=heldout)]
    return chats + [passage for _, passage in passages(heldout=heldout)]


def _sampled(*, heldout: bool) -> list[Messages]:
    split = "heldout" if heldout else "train"
    with gzip.open(SAMPLED_FILE, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [row["messages"] for row in rows if row["split"] == split]


def _chatml(talk: Messages) -> str:
    turns = [{"role": "system", "content": SYSTEM}, *talk]
    return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)


def passages(*, heldout: bool) -> list[tuple[str, str]]:
    """Pairs of topic and passage; a topic belongs to one split as a whole."""
    from pydoc_data.topics import topics

    found = []
    for at, topic in enumerate(sorted(topics)):
        if (at % _HELDOUT_TOPIC_EVERY == 0) == heldout:
            found += [(topic, passage) for passage in _cut(topics[topic])]
    return found


def _cut(text: str) -> list[str]:
    """Pieces of about _PASSAGE_CHARS characters that end with a paragraph."""
    pieces = [""]
    for paragraph in text.strip().split("\n\n"):
        if len(pieces[-1]) > _PASSAGE_CHARS:
            pieces.append("")
        pieces[-1] += paragraph + "\n\n"
    return [piece.strip() for piece in pieces]
