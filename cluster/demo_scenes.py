"""What a demonstration asks, in order, and what it says about the answers.

It needs an endpoint and nothing else; it deploys nothing and judges nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from textwrap import shorten
from typing import TYPE_CHECKING

from cluster.demo_client import Answer, Piece, ask
from cluster.demo_findings import PATHS, Findings, Run, rows_of
from cluster.demo_print import STYLES, AnswerWriter, comparison_table, waterfall

if TYPE_CHECKING:
    from openai import OpenAI
    from rich.console import Console

REPETITIONS = {500: 5, 2_000: 5, 6_000: 3}
"""Runs of each path at about so many tokens. The long conversation that is shown counts as the
first repetition of its length."""

LONG_TOKENS = 6_000
SWITCH_AFTER_TOKENS = 16
SHOWN_LARGE_TOKENS = 48
EASY_QUESTIONS = (
    "What is the capital of France?",
    "What do bees make?",
    "How many days are in a week?",
)
"""Asked in turn until the small model answers one without help."""

Conversations = Callable[[int, int], list[dict[str, str]]]
"""(about so many tokens, repetition) to messages; no two share their first words."""


class Scenes:
    """The requests of the demonstration, in order."""

    def __init__(
        self,
        client: OpenAI,
        model: str,
        talks: Conversations,
        found: Findings,
        console: Console,
    ) -> None:
        self._client = client
        self._model = model
        self._talks = talks
        self._found = found
        self._console = console

    def play(self) -> None:
        """Ask everything; raises EngineError when an answer does not come."""
        self._easy_question()
        self._first_handoff()
        self._long_conversation()
        self._comparison()

    def _easy_question(self) -> None:
        self._headline("1. An easy question")
        for question in EASY_QUESTIONS:
            self._user(question)
            messages = [{"role": "user", "content": question}]
            answer = ask(self._client, self._model, messages, max_tokens=40)
            self._found.easy.append((question, answer))
            # Who wrote what is known at the end only: the policy decides where to change.
            escalated = answer.cascade.handoff is not None
            writer = AnswerWriter(self._console, answer.small_tokens if escalated else None)
            for piece in answer.pieces:
                writer(piece)
            self._console.print(f"\n[dim]{account_of(answer)}[/]")
            if not escalated:
                return
            self._console.print("The small model was in doubt there. One more:")

    def _first_handoff(self) -> None:
        self._headline("2. The first handoff of this deployment")
        # The large engine's own first step is slow; it must not count as the handshake's cost.
        self._escalate(500, 0, "recompute")
        run = self._escalate(500, 0, "mapped")
        self._found.first = run
        if run.handoff is not None and run.handoff_ms is not None:
            cold = run.handoff.temperature == "cold"
            hands = "NIXL handshakes included" if cold else "hands were shaken before it"
            self._console.print(
                f"{run.answer.prompt_tokens} tokens, {run.handoff.temperature}: "
                f"[bold]{run.handoff_ms:.0f} ms[/], {hands}. It is not in the table below."
            )

    def _long_conversation(self) -> None:
        self._headline(f"3. A conversation of {LONG_TOKENS:,} tokens changes models half-way")
        self._console.print(
            f"[{STYLES['small']}]The small model[/] writes {SWITCH_AFTER_TOKENS} tokens, then "
            f"[{STYLES['large']}]the large model[/] goes on from the small one's KV cache, "
            "converted on the way."
        )
        mapped = self._shown("mapped")
        if mapped.problem is None and mapped.handoff is not None:
            handoff = mapped.handoff
            self._console.print(
                f"\nWhere the {mapped.handoff_ms:.0f} ms went. The length of a bar is measured; "
                "the stages overlap (one chunk is read while another is mapped and a third is "
                "written), so they add up to more than the total:"
            )
            self._console.print(waterfall(handoff))
            self._console.print(
                f"[dim]{handoff.covered_tokens:,} tokens came as mapped KV "
                f"({handoff.bytes_read / 1e6:.0f} MB read, {handoff.bytes_written / 1e6:.0f} MB "
                f"written), {handoff.reread_tokens} were read by the large model itself.[/]"
            )
        self._headline("4. The same escalation without the cache: the large model reads it all")
        self._console.print(
            "The small model has the conversation in its own prefix cache now, and may choose "
            "other words by a rounding; the large one reads everything."
        )
        again = self._shown("recompute")
        if mapped.handoff_ms and again.handoff_ms:
            self._console.print(
                f"\nTime to the first large token: [bold]{mapped.handoff_ms / 1000:.2f} s[/] with "
                f"mapped KV, [bold]{again.handoff_ms / 1000:.2f} s[/] by re-prefill."
            )

    def _shown(self, wanted: str) -> Run:
        """One streamed escalation of the long conversation, printed as it arrives."""
        self._user(self._talks(LONG_TOKENS, 1)[-1]["content"])
        run = self._escalate(
            LONG_TOKENS,
            1,
            wanted,
            large_tokens=SHOWN_LARGE_TOKENS,
            on_piece=AnswerWriter(self._console, SWITCH_AFTER_TOKENS),
        )
        self._found.runs.append(run)
        self._console.print(
            f"\n[dim]conversation: {run.answer.prompt_tokens:,} tokens; {account_of(run.answer)}[/]"
        )
        return run

    def _comparison(self) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._headline("5. Mapped KV against re-prefill")
        plan = [
            (tokens, repetition)
            for tokens, repetitions in REPETITIONS.items()
            for repetition in range(1, repetitions + 1)
            if (tokens, repetition) != (LONG_TOKENS, 1)
        ]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeElapsedColumn(), console=self._console, transient=True
        ) as progress:
            task = progress.add_task("measuring", total=2 * len(plan))
            for tokens, repetition in plan:
                paths = list(PATHS) if repetition % 2 else list(reversed(PATHS))
                for wanted in paths:
                    progress.update(task, description=f"{tokens:,} tokens, {PATHS[wanted]}")
                    self._found.runs.append(self._escalate(tokens, repetition, wanted))
                    progress.advance(task)
        self._console.print(comparison_table(rows_of(self._found.runs)))
        self._console.print(
            "[dim]Medians on the router's clock, network included; the same engines, one request "
            "at a time. Every repetition is another conversation, new from its first words, and "
            "its two runs take turns in going first. The large engine finds no prefix in its "
            "cache: each run has a salt of its own. The small model's own reading lies before the "
            "interval, so its cache may serve the second run of a conversation.[/]"
        )

    def _escalate(
        self,
        tokens: int,
        repetition: int,
        wanted: str,
        *,
        large_tokens: int = 2,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Run:
        answer = ask(
            self._client,
            self._model,
            self._talks(tokens, repetition),
            max_tokens=SWITCH_AFTER_TOKENS + large_tokens,
            min_tokens=SWITCH_AFTER_TOKENS + 1,
            cascade={
                "escalate_after_tokens": SWITCH_AFTER_TOKENS,
                "recompute": wanted == "recompute",
                # Else the second run of a conversation would find what the first one left.
                "session_id": uuid.uuid4().hex,
            },
            on_piece=on_piece,
        )
        return Run(tokens=tokens, repetition=repetition, wanted=wanted, answer=answer)

    def _user(self, text: str) -> None:
        self._console.print("[bold]user[/]   ", end="")
        self._console.print(shorten(text, 160), markup=False)
        self._console.print("[bold]answer[/] ", end="")

    def _headline(self, text: str) -> None:
        self._console.print()
        self._console.rule(f"[bold]{text}[/]", align="left")


def account_of(answer: Answer) -> str:
    """Who served an answer, and by which decision, as one line."""
    cascade = answer.cascade
    served = ", ".join(f"{part.tokens} by {part.model}" for part in cascade.served_by)
    line = f"tokens: {served}"
    if (decision := cascade.decision) is not None:
        line += f"; decision: {decision.action} ({decision.reason}"
        if decision.score is not None and decision.threshold is not None:
            line += f", margin {decision.score:.2f} against {decision.threshold:.2f}"
        line += ")"
    if (handoff := cascade.handoff) is not None:
        line += f"; by {PATHS[handoff.path]}"
    return line
