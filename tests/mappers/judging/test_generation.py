"""Planted facts and greedy continuations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from mappers.capture import cache_to_kv, load_model, pack
from mappers.judging.generation import generation_task, greedy, recall_items
from tests.mappers.oracle import oracle, with_wrong_head_order
from tests.mappers.tiny import sentences, write_model


def test_items_are_the_same_for_a_seed_and_hold_their_answer_once() -> None:
    items = recall_items(5, facts=4, seed=7)
    assert items == recall_items(5, facts=4, seed=7) != recall_items(5, facts=4, seed=8)
    for item in items:
        thing = item.question.removesuffix(" is").split()[-1]
        assert f"The code of the {thing} is {item.answer}.\n" in item.context
        assert item.context.count("The code of") == 4 and item.context.count(item.answer) == 1


def test_greedy_goes_on_with_the_likeliest_token(tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "m", layers=2, seed=3), torch.float32, "cpu")
    ids_T = torch.tensor([1, 5, 9])
    cache = model(input_ids=ids_T[None, :1], use_cache=True).cache
    said = greedy(model, ids_T[1:], cache, 5)
    expected = model.generate(
        ids_T[None], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert said == expected[0, 3:].tolist()
    assert cache_to_kv(cache)[0].shape[2] == 3 + 4


class _Said:
    """A tokenizer that decodes whatever the model says as the next of the given answers."""

    bos_token_id = 1

    def __init__(self, answers: Iterator[str]) -> None:
        self._answers = answers

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 60 for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return f" {next(self._answers)}. The code"


def test_rows_count_answers_and_continuations_compare_with_native(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", layers=3, seed=3)
    model = load_model(folder, torch.float32, "cpu")
    windows = pack(sentences(4, seed=3), folder, 32, 64)
    settings = {"items": 2, "facts": 2, "continuations": 2, "continuation_tokens": 6}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    steps: list[int] = []
    report = generation_task(
        *(model, model, oracle(folder), tokenizer, windows),
        **settings,
        prefix_tokens=16,
        advance=steps.append,
    )
    assert steps == [1] * 4
    assert [row.name for row in report.rows] == [
        "native",
        "mapped",
        "another text's cache",
        "no prefix",
        "source alone",
    ]
    assert [row.asked for row in report.rows] == [2] * 5
    # A random model recalls nothing; its exact cache goes on exactly as it would itself.
    assert report.row("native").correct == 0 and report.floor_normalised is None
    assert (report.common_tokens, report.token_agreement) == (6, 1.0)
    assert report.examples[0].native == report.examples[0].mapped
    wrong = generation_task(
        *(model, model, with_wrong_head_order(folder), tokenizer, windows),
        **settings,
        prefix_tokens=16,
    )
    assert wrong.common_tokens < 6


def test_an_answer_is_right_when_it_begins_with_the_code(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", layers=1, seed=3)
    model = load_model(folder, torch.float32, "cpu")
    answers = iter(item.answer for item in recall_items(2, 2) for _ in range(5))
    tokenizer = _Said(answers)
    report = generation_task(
        *(model, model, oracle(folder), tokenizer, pack(sentences(2, 3), folder, 32, 32)),
        items=2,
        facts=2,
        continuations=1,
        continuation_tokens=2,
        prefix_tokens=16,
    )
    assert [row.correct for row in report.rows] == [2] * 5
    assert report.row("mapped").accuracy == 1.0
