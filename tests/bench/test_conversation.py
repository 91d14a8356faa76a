"""The conversation bench with a scripted endpoint."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from bench.conversation import Message, converse, table
from cluster.demo_client import Answer, Piece
from router.api import CascadeInfo


class Script:
    """The large model holds what it had at its last handoff; reading again it holds nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []

    def __call__(self, messages: list[Message], cascade: dict[str, Any]) -> Answer:
        self.asked.append(([dict(one) for one in messages], dict(cascade)))
        prompt = 100 * len(messages)
        info: dict[str, Any] = {"served_by": [{"model": "small", "tokens": 8}]}
        text = "a b"
        if "escalate_after_tokens" in cascade:
            native = cascade.get("recompute", False)
            held = 0 if native else max(0, prompt - 400)
            info["served_by"].append({"model": "large", "tokens": 4})
            info["handoff"] = {
                "path": "recompute" if native else "mapped",
                "handoff_ms": 900.0 if native else 200.0,
                "bytes_read": 0 if native else (prompt - held) * 1_000,
                "held_tokens": held,
                "covered_tokens": 0 if native else prompt - held,
                "reread_tokens": prompt if native else 1,
            }
            info["session"] = {"id": "x", "turn": 1, "drift_handoffs": 2}
            text = "a c" if native else "a b"
        pieces = [Piece(text=text, tokens=12, at_ms=1.0)]
        return Answer(pieces=pieces, prompt_tokens=prompt, cascade=CascadeInfo.model_validate(info))


def test_the_models_take_turns_in_one_session_and_handoffs_are_replayed_alone() -> None:
    script = Script()
    rows = converse(script, 4)
    assert [row.ended_by for row in rows] == ["large", "small", "large", "small"]
    assert [len(messages) for messages, _ in script.asked] == [1, 1, 3, 5, 5, 7]
    own = {how["session_id"] for _, how in script.asked if not how.get("recompute")}
    replays = [how for _, how in script.asked if how.get("recompute")]
    assert len(own) == 1 and len({how["session_id"] for how in replays} | own) == 3
    # A replay sees the conversation as it was, with the answer that was given before it.
    assert script.asked[3][0] == script.asked[4][0]
    assert script.asked[3][0][1] == {"role": "assistant", "content": "a b"}


def test_rows_show_what_the_handoff_moved_and_how_the_answer_differs() -> None:
    rows = converse(Script(), 3)
    assert (rows[0].held_tokens, rows[0].covered_tokens, rows[0].bytes_read) == (0, 100, 100_000)
    assert (rows[2].held_tokens, rows[2].covered_tokens) == (100, 400)
    assert (rows[2].handoff_ms, rows[2].native_ms, rows[2].drift_handoffs) == (200.0, 900.0, 2)
    assert rows[2].likeness == pytest.approx(0.5)
    assert rows[1].path is None and rows[1].likeness is None


def test_the_table_has_a_line_for_each_turn() -> None:
    console = Console(width=140, record=True)
    console.print(table(converse(Script(), 3)))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│ ")]
    assert len(lines) == 3 and "0.40" in lines[2] and "mapped" in lines[2] and " - " in lines[1]
