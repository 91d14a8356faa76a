"""Ten turns of one conversation in which the models take turns: what each handoff still moves.

`python bench/conversation.py` serves the quickstart cascade (or asks the one at --url). On every
second turn the large model takes over after some tokens. The same turns are asked again in a
session of their own with `recompute: true`, where the large model reads everything itself.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.prompts import story, words
from bench.routing_metrics import f1
from bench.routing_serve import served
from cluster.cli import QUICKSTART_CONFIG
from cluster.config import load_serve_config
from cluster.demo_client import Answer, ask, connect

TURNS = 10
ESCALATE_AFTER_TOKENS = 8
_ESCALATES = {"escalate_after_tokens": ESCALATE_AFTER_TOKENS, "recompute": False}
MAX_TOKENS = 32
Message = dict[str, str]
Chat = Callable[[list[Message], dict[str, Any]], Answer]
"""(messages, `cascade` options) to an answer."""

_OPENING = (
    "Here are my notes on the valley where I grew up. The river comes down from the northern hills "
    "and turns twice before it reaches the mill. In spring it carries so much water that the lower "
    "fields are closed until May. The mill was built by two brothers; one of them kept a diary in "
    "which he wrote down every flood, every harvest and the price of flour. Behind the mill a path "
    "climbs to the chapel, and from there one sees the lake, the railway and, on clear days, the "
    "islands. The railway came late. My grandmother remembered the first train: the whole school "
    "stood at the gate and waved, and the teacher gave them the afternoon off. Later the station "
    "became a bakery, then a library, and today it is a small museum with a collection of lamps. "
    "What follows is from the old newspaper of the valley."
)
STORIES = 10
_QUESTIONS = (
    "What is this text about?",
    "Who built the mill?",
    "What do we know about the river in spring?",
    "What can one see from the chapel?",
    "Tell me about the first train.",
    "What became of the station?",
    "Why might the brother have kept a diary?",
    "Which season would you choose for a visit?",
    "Write one sentence that praises the valley.",
    "How would you end this story?",
)


@dataclass(frozen=True, kw_only=True)
class TurnRow:
    """One turn. What has no value on a turn without a handoff is None.

    `held_tokens` the large model had from earlier turns, `covered_tokens` came as mapped KV and
    `reread_tokens` it read itself. `native_ms` and `likeness` are of the same turn by reading
    everything: the time to the large model's first token, and F1 of words of the two answers.
    """

    turn: int
    ended_by: str
    prompt_tokens: int
    path: str | None = None
    reason: str | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None
    held_tokens: int | None = None
    covered_tokens: int | None = None
    reread_tokens: int | None = None
    handoff_ms: float | None = None
    native_ms: float | None = None
    likeness: float | None = None
    drift_handoffs: int | None = None


def opening() -> str:
    """What the conversation is about: about 900 tokens."""
    return " ".join([_OPENING, *(story(number)[0] for number in range(STORIES))])


def warm_up(chat: Chat) -> None:
    """One handoff in another session, because a deployment's first one shakes hands."""
    session = f"bench-{uuid.uuid4().hex}"
    how = {
        "escalate_after_tokens": ESCALATE_AFTER_TOKENS,
        "session_id": session,
        "recompute": False,
    }
    chat([{"role": "user", "content": f"[{session}] {_OPENING}"}], how)


def converse(chat: Chat, turns: int, progress: Callable[[range], Any] = iter) -> list[TurnRow]:
    """Hold the conversation and replay its handoffs; one row per turn.

    The first turn and every second one after it escalate; the small model alone answers the
    others. The replay of a turn has the same messages before it, also the earlier answers.
    """
    session = f"bench-{uuid.uuid4().hex}"
    messages: list[Message] = []
    rows = []
    for number in progress(range(1, turns + 1)):
        question = _QUESTIONS[(number - 1) % len(_QUESTIONS)]
        # The session makes the text new, so that no prefix cache knows it from another run.
        content = f"[{session}] {opening()} {question}" if number == 1 else question
        messages.append({"role": "user", "content": content})
        escalates = number % 2 == 1
        how: dict[str, Any] = (
            {"escalate_after_tokens": ESCALATE_AFTER_TOKENS, "recompute": False}
            if escalates
            else {"force": "small"}
        )
        answer = chat(messages, how | {"session_id": session})
        native = None
        if escalates:
            alone = how | {"recompute": True, "session_id": f"{session}-native-{number}"}
            native = chat(messages, alone)
        rows.append(row_of(number, answer, native))
        messages.append({"role": "assistant", "content": answer.text})
    return rows


def row_of(number: int, answer: Answer, native: Answer | None) -> TurnRow:
    """The row of one turn and its replay."""
    info = answer.cascade
    found: dict[str, Any] = {}
    if (handoff := info.handoff) is not None:
        found = {
            name: getattr(handoff, name)
            for name in TurnRow.__dataclass_fields__
            if hasattr(handoff, name)
        }
    if native is not None:
        again = native.cascade.handoff
        found["native_ms"] = None if again is None else again.handoff_ms
        found["likeness"] = f1(words(answer.text), words(native.text))
    if info.session is not None:
        found["drift_handoffs"] = info.session.drift_handoffs
    return TurnRow(
        turn=number,
        ended_by=info.served_by[-1].model if info.served_by else "-",
        prompt_tokens=answer.prompt_tokens,
        **found,
    )


def table(rows: Sequence[TurnRow]) -> Table:
    """All turns, one line each."""
    shown = Table(title="One conversation; the large model takes over on every second turn")
    heads = ("turn", "ended by", "path", "prompt", "held", "covered", "reread", "read MB")
    for name in (*heads, "written MB", "ms", "native ms", "likeness", "drift"):
        shown.add_column(name, justify="left" if name in ("ended by", "path") else "right")
    for row in rows:
        shown.add_row(
            str(row.turn),
            row.ended_by,
            "-" if row.path is None else f"{row.path} {row.reason or ''}".strip(),
            f"{row.prompt_tokens:,}",
            *(_text(one) for one in (row.held_tokens, row.covered_tokens, row.reread_tokens)),
            *(_text(one, 1e6, 2) for one in (row.bytes_read, row.bytes_written)),
            _text(row.handoff_ms),
            _text(row.native_ms),
            _text(row.likeness, 1, 2),
            _text(row.drift_handoffs),
        )
    return shown


def _text(value: float | None, unit: float = 1, digits: int = 0) -> str:
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def main(
    url: Annotated[
        str | None, typer.Option(help="An endpoint that runs. Unset: serve the quickstart here.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Length of the conversation.", min=1)] = TURNS,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
) -> None:
    """Show what each handoff of a conversation moves, and how its answer differs."""
    console = Console(highlight=False, width=140)
    if url is None:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            config = Path(folder) / "quickstart.yaml"
            config.write_text(QUICKSTART_CONFIG.read_text())
            with served(config) as ours:
                rows = _measure(ours, turns)
    else:
        rows = _measure(url, turns)
    console.print(table(rows))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


def _measure(url: str, turns: int) -> list[TurnRow]:
    client, name = connect(url), load_serve_config(QUICKSTART_CONFIG)[1].cascade_name

    def chat(messages: list[Message], cascade: dict[str, Any]) -> Answer:
        return ask(client, name, messages, max_tokens=MAX_TOKENS, cascade=cascade)

    warm_up(chat)
    stderr = Console(stderr=True)
    return converse(chat, turns, lambda numbers: track(numbers, "turns", console=stderr))


if __name__ == "__main__":
    typer.run(main)
