"""What an answer is made of: the site it is made at, the job, the pieces that come out.

Plain data that the splice, the takeover and the front end share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.config import OnEscalate
from router.background import Background
from router.conversations import ConversationTurn, DriftLimits, Sessions
from router.forecast import Forecast
from router.policy import Role
from router.ports import EngineChunk, EnginePort, HandoffPort
from router.record import AnswerLog
from router.shadow import Shadow
from router.stats import NullRecorder, Recorder

SamplingFor = Callable[[int, int], Any]
"""(tokens already sent, max_tokens of this part) to the engine's sampling parameters."""


def _forecasts() -> dict[Role, Forecast]:
    return {"small": Forecast(), "large": Forecast()}


@dataclass(frozen=True, kw_only=True)
class Site:
    """The two engines and what moves KV between them: the same for every request.

    `handoffs` brings KV to the large model, `handoffs_back` to the small one, if at all. `names`
    are the models' names in the API. What is shorter than `min_handoff_tokens` is read instead of
    handed over, and so is whatever `forecasts`, by target, expect to be read sooner. A small model
    holds `small_context_tokens` of prompt and answer; `hold_back_tokens` of its tokens wait before
    they are sent, and `on_escalate` says what becomes of them. `sessions` keeps conversations
    between their turns, and `drift_limits` say when one has to be read natively. `log` gets each
    answer's decisions, after `shadow` judged it, if it does.
    """

    small: EnginePort
    large: EnginePort
    handoffs: HandoffPort
    handoffs_back: HandoffPort | None = None
    names: Mapping[Role, str]
    small_context_tokens: int
    min_handoff_tokens: int
    hold_back_tokens: int
    recorder: Recorder = field(default_factory=NullRecorder)
    log: AnswerLog | None = None
    shadow: Shadow | None = None
    forecasts: Mapping[Role, Forecast] = field(default_factory=_forecasts)
    on_escalate: OnEscalate = "continue"
    sessions: Sessions | None = None
    drift_limits: DriftLimits = field(default_factory=DriftLimits)
    background: Background = field(default_factory=Background)

    def engine(self, role: Role) -> EnginePort:
        """The engine of a model."""
        return self.small if role == "small" else self.large

    def handoffs_to(self, role: Role) -> HandoffPort | None:
        """What brings KV to a model; None when nothing does."""
        return self.handoffs if role == "large" else self.handoffs_back


def always(sent_token_ids: tuple[int, ...]) -> bool:
    """The large model may take over anywhere."""
    return True


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to write.

    `may_switch` is asked with the tokens already sent whether an escalation may cut there (never
    in a tool call or a split character). It is not asked when the request itself set the place.
    `turn` is the answer's place in a conversation, if it has one, and `remember` whether the next
    turn begins after this answer (of several choices only one can be). `salt` names the prefix
    cache for KV that is nobody's own, None for the cache of all.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingFor
    may_switch: Callable[[tuple[int, ...]], bool] = always
    turn: ConversationTurn | None = None
    remember: bool = True
    salt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of one model, in the order of the answer; the last piece has a finish reason."""

    model: Role
    chunk: EngineChunk
