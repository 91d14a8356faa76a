"""What the engines were left with of each conversation, so that its next turn starts there.

A `Conversation` is the token ids that the models really read and wrote, and for each model how
many of them its engine has KV of. That is a belief: engines evict without telling, and find out by
themselves what they still have. The store is bounded in tokens and in time. It knows no text, no
HTTP and no engines.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from router.policy import Role


@dataclass(frozen=True, kw_only=True)
class SessionKey:
    """Which conversation a request belongs to.

    `key` is unique over tenants. `answers` is how many assistant messages the request brings.
    """

    key: str
    session_id: str
    answers: int
    explicit: bool

    @property
    def begins(self) -> bool:
        """Whether this can only be a first turn: an opening without an answer, and no id."""
        return self.answers == 0 and not self.explicit


def session_key(
    tenant: str | None, session_id: str | None, opening: Sequence[str], answers: int
) -> SessionKey:
    """The key of a conversation: its id, or a hash of its opening when it has none.

    `opening` is whatever of the request stays the same over all turns (first messages, tools).
    """
    explicit = session_id is not None
    if session_id is None:
        session_id = f"opening-{_digest('opening', *opening)[:16]}"
    key = _digest(tenant or "", "id" if explicit else "opening", session_id)
    return SessionKey(key=key, session_id=session_id, answers=answers, explicit=explicit)


def tenant_salt(tenant: str | None) -> str | None:
    """Separates the prefix caches of tenants; None where there are none."""
    return None if tenant is None else _digest("tenant", tenant)


def _digest(*parts: str) -> str:
    """SHA-256 over parts that cannot run into each other."""
    joined = b"".join(len(part).to_bytes(8, "big") + part.encode() for part in parts)
    return hashlib.sha256(joined).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one engine holds of a conversation.

    Leading `tokens` of it, in the prefix cache named by `salt`; `mapped_tokens` of them came by
    `handoffs` mapped handoffs, the others were read by the model itself.
    """

    salt: str
    tokens: int = 0
    mapped_tokens: int = 0
    handoffs: int = 0

    @classmethod
    def nothing(cls) -> Held:
        """A cache of its own, empty. Random, so that no other conversation can ever name it."""
        return cls(salt=uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation after its last answer. `token_ids` are 32-bit integers."""

    key: str
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    turns: int = 0
    last_model: Role | None = None
    held: Mapping[Role, Held] = field(default_factory=dict)


class Sessions(Protocol):
    """Where conversations are kept between their turns."""

    async def get(self, key: SessionKey) -> Conversation | None:
        """The conversation as its last answer left it; None when it is not known."""

    def put(self, conversation: Conversation) -> None:
        """Keep it. Must not block."""


class LocalSessions:
    """`Sessions` in this process: the least recently used leave first.

    Holds at most `max_tokens` token ids (4 bytes each) and nothing longer than `ttl_s` after its
    last answer.
    """

    def __init__(
        self, *, max_tokens: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_tokens = max_tokens
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, Conversation]] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tokens(self) -> int:
        """Token ids kept now."""
        return self._tokens

    async def get(self, key: SessionKey) -> Conversation | None:
        """See `Sessions`."""
        return self.find(key.key)

    def find(self, key: str) -> Conversation | None:
        """The conversation under `key`, if it is not too old."""
        self._expire()
        found = self._kept.get(key)
        return None if found is None else found[1]

    def put(self, conversation: Conversation) -> None:
        """See `Sessions`."""
        self._drop(conversation.key)
        self._kept[conversation.key] = (self._clock(), conversation)
        self._tokens += len(conversation.token_ids)
        self._expire()

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._kept:
            key, (put_s, _) = next(iter(self._kept.items()))
            if put_s > oldest_s and self._tokens <= self._max_tokens:
                return
            self._drop(key)

    def _drop(self, key: str) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._tokens -= len(found[1].token_ids)


@dataclass(frozen=True, kw_only=True)
class DriftLimits:
    """When mapped KV is too far from the model's own: the conversation is then read again.

    `handoffs` mapped handoffs on top of each other, or `fraction` of mapped tokens when more than
    one handoff brought them; None is no limit.
    """

    handoffs: int | None = None
    fraction: float | None = None

    def reached(self, held: Held) -> bool:
        """Whether the next handoff has to be replaced by a native prefill."""
        if self.handoffs is not None and held.handoffs >= self.handoffs:
            return True
        if self.fraction is None or held.handoffs < 2 or not held.tokens:
            return False
        return held.mapped_tokens / held.tokens > self.fraction


class ConversationTurn:
    """One answer's view of its conversation: what was there before it, what it leaves behind.

    `prompt_token_ids` is the whole conversation as this turn renders it. What it shares with the
    conversation's token ids from the first token on is what earlier KV can be used for.
    """

    def __init__(
        self,
        key: SessionKey,
        before: Conversation | None,
        prompt_token_ids: tuple[int, ...],
        limits: DriftLimits,
    ) -> None:
        if before is None or key.begins:
            before = Conversation(key=key.key)
        self.session_id = key.session_id
        self.affinity = key.key[:16]
        self.number = before.turns + 1
        self.last_model = before.last_model
        self._before = before
        self._limits = limits
        self._prompt = prompt_token_ids
        shared_tokens = common_prefix_tokens(before.token_ids, prompt_token_ids)
        self._held: dict[Role, Held] = {}
        for role, held in before.held.items():
            if tokens := min(held.tokens, shared_tokens):
                mapped_tokens = min(held.mapped_tokens, tokens)
                self._held[role] = replace(held, tokens=tokens, mapped_tokens=mapped_tokens)

    def held(self, role: Role) -> Held:
        """What a model's engine has of this turn's prompt."""
        return self._held.setdefault(role, Held.nothing())

    def unread_tokens(self, role: Role) -> int:
        """Tokens of the prompt that a model has no KV of."""
        return len(self._prompt) - self.held(role).tokens

    def drifted(self, role: Role) -> bool:
        """Whether this model has to read the conversation itself now."""
        return self._limits.reached(self.held(role))

    def read(self, role: Role, salt: str, tokens: int, *, mapped_tokens: int = 0) -> None:
        """An engine now has `tokens` of the conversation under `salt`, `mapped_tokens` of them by
        a handoff just now. Another salt than before is a cache that began empty."""
        held = self.held(role)
        if held.salt != salt:
            held = Held(salt=salt)
        self._held[role] = Held(
            salt=salt,
            tokens=tokens,
            mapped_tokens=held.mapped_tokens + mapped_tokens,
            handoffs=held.handoffs + (mapped_tokens > 0),
        )

    def after(self, answer_token_ids: Sequence[int], last_model: Role | None) -> Conversation:
        """The conversation with this answer."""
        return Conversation(
            key=self._before.key,
            token_ids=array("i", (*self._prompt, *answer_token_ids)),
            turns=self.number,
            last_model=last_model,
            held=dict(self._held),
        )


def common_prefix_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading token ids are the same."""
    left, right = array("q", a), array("q", b)
    same, above = 0, min(len(left), len(right)) + 1
    while same + 1 < above:
        middle = (same + above) // 2
        # Slices compare in C: a scan of a long conversation in Python would take milliseconds.
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            above = middle
    return same
