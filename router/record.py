"""The decision log: one record per answer, with what a replay or a calibration needs.

A record holds numbers and a hash of the prompt, no text and no tokens. Who writes it to a file is
not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.errors import ConfigError
from router.calibration import Dependencies
from router.policy import Decision, Policy, PolicyWrapper, RequestView, Role
from router.ports import FinishReason, TokenStep
from router.signals import margin

MAX_TURNS = 16
"""Turns that a record keeps; a policy that wavers more is cut off there."""

MAX_PROMPT_LOGPROBS = 256
"""Of a prompt's log-probabilities so many of the last are kept, as no score looks further back."""


class Turn(BaseModel):
    """A decision that differs from the one before it, after so many of the small model's tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at_token: int
    action: Literal["stay", "escalate", "large"]
    reason: str
    score: float | None = None
    threshold: float | None = None
    calibration_id: str | None = None


class AnswerRecord(BaseModel):
    """One line of the log.

    `decision` is the one that settled who answers, `turns` are all that were asked for on the way
    (an escalation may have to wait). `margins` are those of the tokens that the policy saw, None
    without log-probabilities. `complete` says that they reach to the small model's own end, and
    `forbidden` after how many tokens an escalation was asked for where the answer could not be cut.
    `prompt_logprobs` (nats) are there when the policy read the prompt. `unread_tokens` are those
    of the prompt that a model had no KV of, `last_model` ended the conversation's last answer.
    `failed` is for whoever judges answers: whether the small model's answer was wrong. `agreement`
    is the share of its tokens that the large model finds likeliest (`router/shadow.py`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    unix_s: float
    request_hash: str
    policy: str
    decision: Turn
    turns: tuple[Turn, ...]
    complete: bool
    small_tokens: int
    large_tokens: int
    margins: tuple[float | None, ...] | None = None
    forbidden: tuple[int, ...] = ()
    prompt_logprobs: tuple[float, ...] | None = None
    prompt_tokens: int | None = None
    last_model: Role | None = None
    unread_tokens: Mapping[Role, int] | None = None
    depends: Dependencies | None = None
    failed: bool | None = None
    agreement: float | None = None

    @property
    def view(self) -> RequestView:
        """The request as a policy saw it; as the first of a conversation when that is not known."""
        return RequestView(
            request_hash=self.request_hash,
            prompt_tokens=self.prompt_tokens or 0,
            last_model=self.last_model,
            unread_tokens=self.unread_tokens or {"small": 0, "large": 0},
        )

    @property
    def escalated(self) -> bool:
        """Whether the large model took part."""
        return self.decision.action != "stay"


AnswerLog = Callable[[AnswerRecord], None]
"""Takes a record; called from the event loop, so it must neither block nor raise."""


class Watch(PolicyWrapper):
    """A policy that decides as `inner` does and remembers what it saw. Serves one answer."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self._unix_s = time.time()
        self._view: RequestView | None = None
        self._prompt: tuple[float, ...] | None = None
        self._forbidden: list[int] = []
        self._margins: list[float | None] = []
        self._turns: list[Turn] = []
        self._complete = False

    def on_request(self, view: RequestView) -> Decision:
        """As `inner`."""
        self._view = view
        return self._note(super().on_request(view))

    def on_prompt(self, logprobs: tuple[float, ...]) -> Decision:
        """As `inner`."""
        self._prompt = logprobs[-MAX_PROMPT_LOGPROBS:]
        return self._note(super().on_prompt(logprobs))

    def on_token(self, step: TokenStep) -> Decision:
        """As `inner`."""
        self._margins.append(margin(step))
        return self._note(super().on_token(step))

    def on_complete(self, finish_reason: FinishReason) -> Decision:
        """As `inner`."""
        self._complete = self.small_tokens is None
        return self._note(super().on_complete(finish_reason))

    def note_forbidden(self) -> None:
        """The escalation that was just asked for may not cut the answer here."""
        self._forbidden.append(len(self._margins))

    def record(self, settled: Decision, *, small_tokens: int, large_tokens: int) -> AnswerRecord:
        """The answer's line; `settled` is what happened in the end."""
        view = self._view
        assert view is not None
        return AnswerRecord(
            unix_s=self._unix_s,
            request_hash=view.request_hash,
            policy=self.name,
            decision=self._turn(settled),
            turns=tuple(self._turns),
            complete=self._complete,
            small_tokens=small_tokens,
            large_tokens=large_tokens,
            margins=tuple(self._margins),
            forbidden=tuple(self._forbidden),
            prompt_logprobs=self._prompt,
            prompt_tokens=view.prompt_tokens,
            last_model=view.last_model,
            unread_tokens=view.unread_tokens,
        )

    def _note(self, decision: Decision) -> Decision:
        last = self._turns[-1] if self._turns else None
        if len(self._turns) < MAX_TURNS and (
            last is None or (last.action, last.reason) != (decision.action, decision.reason)
        ):
            self._turns.append(self._turn(decision))
        return decision

    def _turn(self, decision: Decision) -> Turn:
        return Turn(at_token=len(self._margins), **vars(decision))


def read_log(path: Path) -> list[AnswerRecord]:
    """All lines of a decision log; ConfigError naming the line that is none."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such log; `routing.log_file` writes one")
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append(AnswerRecord.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "line"
            raise ConfigError(f"{path}:{number}: {where}: {first['msg']}") from None
    if not records:
        raise ConfigError(f"{path} is empty: send requests first")
    return records
