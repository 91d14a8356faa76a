"""How a conversation looks in a terminal: coloured tokens, a line of scores, a handoff's bars.

It prints what `cluster.chat_client` received and asks nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cluster.chat_client import Reply, Token
from cluster.demo_findings import duration
from cluster.demo_print import STYLES, waterfall
from router.api import CascadeInfo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_UNKNOWN = "·"
_SPARK_CHARACTERS = 60

# A model's text must not steer the terminal: no escape sequences, no other control characters.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


class View(Protocol):
    """What a conversation is shown with."""

    def begin(self) -> None:
        """A question was sent."""

    def end(self) -> None:
        """Nothing more comes, for whatever reason; may be said twice."""

    def tokens(self, tokens: Sequence[Token], reply: Reply) -> None:
        """New tokens arrived."""

    def finished(self, reply: Reply) -> None:
        """The answer is complete."""

    def stopped(self) -> None:
        """The user stopped the answer."""

    def failed(self, message: str) -> None:
        """The endpoint refused, or the answer broke off."""


class TerminalView:
    """Prints for people. `role` says which of the two models a name is."""

    def __init__(self, console: Console, role: Callable[[str | None], str]) -> None:
        self._console = console
        self._role = role
        self._last: str | None = None
        self._status = console.status("waiting for the first token")

    def begin(self) -> None:
        """Show that something happens."""
        self._last = None
        self._status.start()

    def end(self) -> None:
        """Show no longer that something happens."""
        self._status.stop()

    def tokens(self, tokens: Sequence[Token], reply: Reply) -> None:
        """Print them in their model's colour, with a mark where it changes."""
        for token in tokens:
            self._status.stop()
            if self._last is not None and token.model != self._last:
                self._console.print(" ‖ ", style="dim", end="")
            self._last = token.model
            style = STYLES.get(self._role(token.model), "")
            text = token.text.translate(_CONTROLS)
            self._console.print(text, style=style, end="", markup=False, soft_wrap=True)

    def finished(self, reply: Reply) -> None:
        """Print who wrote what and why, the scores, and what a handoff cost."""
        self._console.print("\n")
        if reply.cascade is None:
            self._console.print(f"[dim]{reply.tokens} tokens by {reply.model}[/]\n")
            return
        self._console.print(account(reply.cascade), style="dim", markup=False)
        if (drawn := sparkline(reply.scores, reply.threshold)) is not None:
            self._console.print(drawn)
        self._print_handoff(reply.cascade)
        self._console.print(facts(reply), style="dim", markup=False)
        self._console.print()

    def stopped(self) -> None:
        """Say so."""
        self._console.print("\n\nstopped; Ctrl-C again leaves\n", style="dim")

    def failed(self, message: str) -> None:
        """Print the message in red."""
        self._console.print(f"\n{message}\n", style="red", markup=False)

    def _print_handoff(self, cascade: CascadeInfo) -> None:
        handoff, borrowed = cascade.handoff, cascade.borrowed
        if borrowed is not None and borrowed.handoff_ms is not None:
            words = f"before the answer, {borrowed.path}: {borrowed.covered_tokens:,} tokens of "
            words += f"the other model's cache in {duration(borrowed.handoff_ms)}"
            self._console.print(words, style="dim")
        if handoff is None or handoff.handoff_ms is None:
            return
        if handoff.path == "recompute":
            why = (handoff.reason or "no reason given").replace("_", " ")
            words = f"the large model read again: {why}; {duration(handoff.handoff_ms)}"
            self._console.print(words, style="dim", markup=False)
            return
        self._console.print(waterfall(handoff))
        predicted_ms = handoff.predicted_ms.recompute
        if predicted_ms is not None:
            words = f"reading again would have taken about {duration(predicted_ms)}"
            self._console.print(words, style="dim")


class JsonView:
    """Prints one JSON object per line: `tokens`, then `answer`, `stopped` or `error`."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._scores = 0

    def begin(self) -> None:
        """A new answer has scores of its own."""
        self._scores = 0

    def end(self) -> None:
        """An event says so."""

    def tokens(self, tokens: Sequence[Token], reply: Reply) -> None:
        """The new tokens and scores, if there are any."""
        scores = reply.scores[self._scores :]
        self._scores = len(reply.scores)
        if tokens or scores:
            told = [vars(token) for token in tokens]
            self._event("tokens", tokens=told, scores=scores, threshold=reply.threshold)

    def finished(self, reply: Reply) -> None:
        """The whole answer, its `cascade` object and the client's own numbers."""
        cascade = None if reply.cascade is None else reply.cascade.model_dump(mode="json")
        self._event(
            "answer",
            text=reply.text,
            tokens=reply.tokens,
            prompt_tokens=reply.prompt_tokens,
            ttft_ms=reply.ttft_ms,
            finish_reason=reply.finish_reason,
            cascade=cascade,
        )

    def stopped(self) -> None:
        """That the user stopped it."""
        self._event("stopped")

    def failed(self, message: str) -> None:
        """The message."""
        self._event("error", message=message)

    def _event(self, name: str, **fields: Any) -> None:
        self._write(json.dumps({"event": name, **fields}, ensure_ascii=False))


def account(cascade: CascadeInfo) -> str:
    """One line: who wrote how many tokens, and why."""
    wrote = ", then ".join(f"{run.model} {run.tokens} tokens" for run in cascade.served_by)
    decision = cascade.decision
    if decision is None:
        return wrote or "no tokens"
    why = decision.reason.replace("_", " ")
    if decision.score is not None and decision.threshold is not None:
        sign = "below" if decision.score < decision.threshold else "not below"
        why += f", score {decision.score:.2f} {sign} {decision.threshold:.2f}"
    return f"{wrote or 'no tokens'}: {why}"


def facts(reply: Reply) -> str:
    """One line of numbers: tokens, time to the first one, what moved, the session's turn."""
    found = []
    if reply.prompt_tokens is not None:
        found.append(f"prompt {reply.prompt_tokens:,} tokens")
    if reply.ttft_ms is not None:
        found.append(f"first token after {duration(reply.ttft_ms)}")
    cascade = reply.cascade
    handoff = None if cascade is None else cascade.handoff
    if handoff is not None:
        moved = (handoff.bytes_read + handoff.bytes_written) / 1e6
        found.append(f"{moved:,.0f} MB moved")
        found.append(f"held {handoff.held_tokens:,}, converted {handoff.covered_tokens:,}")
        if handoff.reread_tokens is not None:
            found.append(f"reread {handoff.reread_tokens:,}")
    if cascade is not None and cascade.session is not None:
        found.append(f"turn {cascade.session.turn}")
    return "; ".join(found)


def sparkline(
    scores: Sequence[tuple[int, float | None]],
    threshold: float | None,
    width: int = _SPARK_CHARACTERS,
) -> Text | None:
    """Scores (nats) as at most `width` characters, those below `threshold` in red.

    Where several share a character it shows the lowest: a low score is doubt. None without any
    known score.
    """
    from rich.text import Text

    values = [score for _, score in scores]
    known = [score for score in values if score is not None]
    if not known:
        return None
    drawn = known if threshold is None else [*known, threshold]
    low = min(0.0, *drawn)
    high = max(*drawn, low + 1e-9)
    line = Text.assemble(("score ", "dim"))
    count = min(width, len(values))
    for index in range(count):
        first, last = index * len(values) // count, (index + 1) * len(values) // count
        here = [score for score in values[first:last] if score is not None]
        if not here:
            line.append(_UNKNOWN, style="dim")
            continue
        level = round((min(here) - low) / (high - low) * (len(_LEVELS) - 1))
        doubt = threshold is not None and min(here) < threshold
        line.append(_LEVELS[level], style="red" if doubt else "cyan")
    told = f" {min(known):.2f} to {max(known):.2f} nats"
    if threshold is not None:
        level = round((threshold - low) / (high - low) * (len(_LEVELS) - 1))
        told += f", threshold {threshold:.2f} {_LEVELS[level]}"
    return line.append(told, style="dim")
