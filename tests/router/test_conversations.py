"""What is kept of a conversation, and what it saves the next turn."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from router.api import CascadeInfo, CascadeOptions
from router.conversations import (
    Conversation,
    ConversationTurn,
    DriftLimits,
    Held,
    LocalSessions,
    SessionKey,
    common_prefix_tokens,
    session_key,
    tenant_salt,
)
from router.job import Job, Site
from router.policies import make_policy
from router.policy import FixedPolicy
from router.ports import TokenStep
from router.splice import Cascade
from tests.fakes import FakeHandoffPort, ListRecorder, ScriptedEngine, steps
from tests.router_bench import ROUTING

KEY = session_key(None, "talk", (), 0)


# The key.


def test_tenants_ids_and_openings_never_share_a_conversation() -> None:
    keys = [
        session_key(None, "a", ("x",), 0),
        session_key("t", "a", ("x",), 0),
        session_key("ta", None, ("x",), 0),
        session_key("t", None, ("ax",), 0),
        session_key("t", None, ("a", "x"), 0),
        session_key("t", f"opening-{'0' * 16}", (), 0),
    ]
    assert len({one.key for one in keys}) == len(keys)


def test_an_opening_gives_the_same_conversation_on_every_turn() -> None:
    first, later = (session_key(None, None, ("hello",), answers) for answers in (0, 3))
    assert first.key == later.key and not later.explicit and later.answers == 3


def test_without_tenants_the_exact_prefix_cache_is_everybodys() -> None:
    assert tenant_salt(None) is None
    assert tenant_salt("a") != tenant_salt("b")


# The common prefix.


def test_the_common_prefix_is_that_of_a_plain_scan() -> None:
    draw = random.Random(4)
    for _ in range(300):
        a = [draw.randrange(2) for _ in range(draw.randrange(40))]
        b = a[: draw.randrange(41)] + [draw.randrange(2) for _ in range(draw.randrange(10))]
        plain = 0
        while plain < min(len(a), len(b)) and a[plain] == b[plain]:
            plain += 1
        assert common_prefix_tokens(a, tuple(b)) == plain


# The store.


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def talk(key: str, tokens: int, turns: int = 1) -> Conversation:
    turn = ConversationTurn(replace(KEY, key=key), None, tuple(range(tokens)), DriftLimits())
    return replace(turn.after((), "small"), turns=turns)


def test_the_store_forgets_the_least_recently_answered_first_and_the_old() -> None:
    clock = Clock()
    store = LocalSessions(max_tokens=100, ttl_s=60.0, clock=clock)
    for key in ("a", "b", "c"):
        store.put(talk(key, 40))
    assert store.find("a") is None and store.tokens == 80
    clock.now = 30.0
    store.put(talk("b", 50))
    assert store.tokens == 90 and len(store) == 2
    clock.now = 61.0
    assert store.find("c") is None and store.find("b") is not None
    clock.now = 91.0
    assert store.find("b") is None and store.tokens == 0


def test_a_conversation_longer_than_the_store_is_not_kept() -> None:
    store = LocalSessions(max_tokens=10, ttl_s=60.0)
    store.put(talk("a", 11))
    assert len(store) == 0 and store.tokens == 0


# One turn's view.


def test_a_turn_uses_only_what_its_prompt_shares_with_the_last_one() -> None:
    first = ConversationTurn(KEY, None, (1, 2, 3, 4), DriftLimits())
    first.read("small", "s", 6)
    first.read("large", "l", 4, mapped_tokens=4)
    after = first.after((5, 6, 7), "large")
    second = ConversationTurn(KEY, after, (1, 2, 3, 4, 5, 9, 9, 9), DriftLimits())
    assert (second.number, second.last_model) == (2, "large")
    assert second.held("small").tokens == 5 and second.unread_tokens("small") == 3
    assert second.held("large") == Held(salt="l", tokens=4, mapped_tokens=4, handoffs=1)
    third = ConversationTurn(KEY, after, (8, 8), DriftLimits())
    assert third.held("large").tokens == 0 and third.held("large").salt != "l"


def test_a_conversation_known_by_its_opening_alone_begins_anew_without_answers() -> None:
    turn = ConversationTurn(KEY, None, (1, 2, 3), DriftLimits())
    turn.read("large", "l", 3)
    before = turn.after((4,), "large")
    derived = session_key(None, None, ("x",), 0)
    assert ConversationTurn(derived, before, (1, 2, 3), DriftLimits()).number == 1
    later = replace(derived, answers=1)
    assert ConversationTurn(later, before, (1, 2, 3), DriftLimits()).held("large").tokens == 3
    assert ConversationTurn(KEY, before, (1, 2, 3), DriftLimits()).number == 2


@pytest.mark.parametrize(
    ("held", "due"),
    [
        (Held(salt="a", tokens=100, mapped_tokens=100, handoffs=1), False),
        (Held(salt="a", tokens=100, mapped_tokens=51, handoffs=2), True),
        (Held(salt="a", tokens=100, mapped_tokens=50, handoffs=2), False),
        (Held(salt="a", tokens=100, mapped_tokens=0, handoffs=3), True),
    ],
)
def test_drift_is_counted_in_handoffs_and_in_mapped_tokens(held: Held, due: bool) -> None:
    assert DriftLimits(handoffs=3, fraction=0.5).reached(held) is due


# Whole conversations over scripted engines.

SMALL_SAYS = list(range(1, 9))
LARGE_SAYS = list(range(501, 509))


@dataclass
class Talk:
    """Turns of one conversation; every model answers with 8 tokens of its own."""

    back: bool = False
    limits: DriftLimits = field(default_factory=DriftLimits)
    small: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(steps(SMALL_SAYS)))
    large: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(steps(LARGE_SAYS)))
    port: FakeHandoffPort = field(default_factory=FakeHandoffPort)
    port_back: FakeHandoffPort = field(default_factory=FakeHandoffPort)
    sessions: LocalSessions = field(
        default_factory=lambda: LocalSessions(max_tokens=10_000, ttl_s=60.0)
    )
    ids: list[int] = field(default_factory=list)
    key: SessionKey = KEY

    def __post_init__(self) -> None:
        self.site = Site(
            small=self.small,
            large=self.large,
            handoffs=self.port,
            handoffs_back=self.port_back if self.back else None,
            names={"small": "s", "large": "l"},
            small_context_tokens=4_096,
            min_handoff_tokens=16,
            hold_back_tokens=0,
            recorder=ListRecorder(),
            sessions=self.sessions,
            drift_limits=self.limits,
        )

    async def say(self, user_tokens: int, **options: Any) -> CascadeInfo:
        """One turn with a new message of so many tokens."""
        self.ids += range(2000, 2000 + user_tokens)
        wanted = CascadeOptions(**options)
        turn = ConversationTurn(
            self.key, await self.sessions.get(self.key), tuple(self.ids), self.limits
        )
        job = Job(
            prompt_token_ids=tuple(self.ids),
            max_tokens=8,
            sampling=lambda *part: part,
            turn=turn,
            salt="tenant",
        )
        cascade = Cascade(self.site, make_policy(ROUTING, wanted), wanted, job)
        async for piece in cascade.pieces():
            self.ids += [one.token_id for one in piece.chunk.steps]
        info = await cascade.info()
        await self.site.background.drain()
        for engine in (self.small, self.large):
            assert engine.open == 0
        return info


async def test_only_what_the_large_model_lacks_is_handed_over() -> None:
    talk = Talk()
    first = await talk.say(100, escalate_after_tokens=2)
    second = await talk.say(30, escalate_after_tokens=2)
    assert talk.port.held_tokens == [0, 107]  # 100 + 2 + 6, of which the last has no KV
    assert len(talk.port.calls[1][1]) == 100 + 8 + 30 + 2
    salts = [request.cache_salt for request in talk.large.requests]
    assert salts[0] == salts[1] != "tenant"
    assert first.session is not None and second.session is not None
    assert (first.session.turn, second.session.turn) == (1, 2)
    assert second.session.drift_handoffs == 1


async def test_a_short_rest_is_read_in_the_conversations_own_cache() -> None:
    talk = Talk()
    await talk.say(100, escalate_after_tokens=2)
    info = await talk.say(5, escalate_after_tokens=2)
    assert info.handoff is not None
    assert (info.handoff.path, info.handoff.reason) == ("recompute", "short")
    first, second = talk.large.requests
    assert second.kv_transfer_params is None and second.cache_salt == first.cache_salt


async def test_what_a_model_read_itself_counts_for_the_next_handoff() -> None:
    talk = Talk()
    await talk.say(100, force="large")
    info = await talk.say(40, escalate_after_tokens=2)
    assert talk.port.held_tokens == [107]
    assert info.handoff is not None and info.handoff.path == "mapped"
    assert talk.large.requests[0].cache_salt == talk.large.requests[1].cache_salt


async def test_a_failed_handoff_starts_a_new_cache_and_the_conversation_follows_it() -> None:
    from cluster.errors import TransportError

    talk = Talk()
    talk.port.begin_error = TransportError("mapper_gone", "killed")
    await talk.say(100, escalate_after_tokens=2)
    talk.port.begin_error = None
    await talk.say(40, escalate_after_tokens=2)
    again, next_turn = talk.large.requests
    assert again.cache_salt == next_turn.cache_salt
    assert talk.port.held_tokens == [0, 107]


async def test_after_enough_mapped_handoffs_the_large_model_reads_everything_itself() -> None:
    talk = Talk(limits=DriftLimits(handoffs=2))
    reasons = []
    for _ in range(4):
        info = await talk.say(40, escalate_after_tokens=2)
        assert info.handoff is not None
        reasons.append(info.handoff.reason)
    assert reasons == [None, None, "drift", None]
    salts = [request.cache_salt for request in talk.large.requests]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert talk.port.held_tokens == [0, 47, 3 * 48 - 1]


async def test_reading_anew_on_demand_is_the_conversations_new_native_cache() -> None:
    talk = Talk()
    await talk.say(40, escalate_after_tokens=2)
    await talk.say(40, escalate_after_tokens=2, recompute=True)
    info = await talk.say(40, escalate_after_tokens=2)
    assert info.session is not None and info.session.drift_handoffs == 0
    mapped, native, after = talk.large.requests
    assert mapped.cache_salt != native.cache_salt == after.cache_salt


async def test_the_small_model_borrows_what_the_large_one_wrote() -> None:
    talk = Talk(back=True)
    talk.large.script = steps(list(range(501, 531)))
    talk.ids = []
    await talk.say(100, force="large")
    await talk.say(20)
    ask = talk.large.requests[-1]
    assert (ask.max_tokens, ask.keep, len(ask.prompt_token_ids)) == (1, "always", 107)
    assert talk.port_back.calls == [(ask.request_id, tuple(talk.ids[:-8]))]
    (request,) = talk.small.requests
    assert request.kv_transfer_params is not None and request.cache_salt not in (None, "tenant")
    assert request.keep == "on_abort"


async def test_an_escalation_after_a_borrowed_start_takes_the_ticket_of_the_real_request() -> None:
    talk = Talk(back=True)
    await talk.say(100, force="large")
    info = await talk.say(40, escalate_after_tokens=2)
    assert talk.port.calls[-1][0] == talk.small.requests[-1].request_id
    assert info.borrowed is not None and info.borrowed.path == "mapped"
    assert info.handoff is not None and info.handoff.path == "mapped"


async def test_who_names_a_model_gets_its_own_reading() -> None:
    talk = Talk(back=True)
    await talk.say(100, force="large")
    await talk.say(40, force="small")
    assert talk.port_back.calls == []


async def test_without_a_way_back_the_small_model_uses_the_tenants_exact_cache() -> None:
    talk = Talk()
    await talk.say(100, force="large")
    await talk.say(40)
    assert [request.cache_salt for request in talk.small.requests] == ["tenant"]


async def test_a_source_that_fails_leaves_the_small_model_to_read() -> None:
    talk = Talk(back=True)
    await talk.say(100, force="large")
    talk.large.fail_after = 0
    info = await talk.say(40)
    assert info.borrowed is None
    assert [segment.model for segment in info.served_by] == ["s"]


async def test_concurrent_conversations_do_not_share_a_cache() -> None:
    talks = [Talk(key=replace(KEY, key=str(n))) for n in range(4)]
    await asyncio.gather(*(talk.say(100, escalate_after_tokens=2) for talk in talks))
    salts = {talk.large.requests[0].cache_salt for talk in talks}
    assert len(salts) == 4


async def test_the_cheaper_way_is_taken_once_both_are_known() -> None:
    talk = Talk()
    forecast = talk.site.forecasts["large"]
    for tokens in (100, 200, 400):
        forecast.observe_mapped(tokens, 1.0 + tokens * 0.001)
        forecast.observe_recompute(tokens, tokens * 0.01)
    short = await talk.say(60, escalate_after_tokens=2)
    long = await talk.say(300, escalate_after_tokens=2)
    assert short.handoff is not None and long.handoff is not None
    assert (short.handoff.path, short.handoff.reason) == ("recompute", "cheaper")
    assert long.handoff.path == "mapped"
    forced = await Talk().say(60, escalate_after_tokens=2, recompute=False)
    assert forced.handoff is not None and forced.handoff.path == "mapped"
    assert short.handoff.predicted_ms.mapped == pytest.approx(1062.0)
    assert short.handoff.predicted_ms.recompute == pytest.approx(620.0)


# Restart.


async def test_restart_lets_one_model_write_everything() -> None:
    doubtful = [TokenStep(token_id=s.token_id, logprobs=((0, 0.0, 1), (1, -0.1, 2)))
                for s in steps(SMALL_SAYS)]  # fmt: skip
    whole = Talk(small=ScriptedEngine(doubtful))
    whole.site = replace(whole.site, hold_back_tokens=4)
    info = await whole.say(100, on_escalate="restart")
    assert [segment.model for segment in info.served_by] == ["l"]
    mixed = Talk(small=ScriptedEngine(steps(SMALL_SAYS[:4]) + doubtful[4:]))
    info = await mixed.say(100, on_escalate="restart")
    assert [segment.model for segment in info.served_by] == ["s"]
    info = await mixed.say(100)
    assert [segment.model for segment in info.served_by] == ["s", "l"]


async def test_an_explained_answer_tells_every_score_once() -> None:
    talk = Talk()
    wanted = CascadeOptions(explain=True)
    job = Job(prompt_token_ids=tuple(range(50)), max_tokens=8, sampling=lambda *part: part)
    cascade = Cascade(talk.site, make_policy(ROUTING, wanted), wanted, job)
    seen: list[tuple[int, float | None]] = []
    async for _ in cascade.pieces():
        progress = cascade.progress()
        seen += progress.scores
        assert sum(segment.tokens for segment in progress.served_by) == cascade.sent_tokens
    assert [number for number, _ in seen] == list(range(1, 8))
    assert seen[0][1] is None and seen[1][1] == pytest.approx(8.0)
    assert progress.threshold == 1.0


async def test_a_named_model_has_no_conversation() -> None:
    talk = Talk()
    job = Job(prompt_token_ids=(1, 2, 3), max_tokens=8, sampling=lambda *part: part, salt="t")
    cascade = Cascade(talk.site, FixedPolicy("large", "named"), CascadeOptions(), job)
    async for _ in cascade.pieces():
        pass
    assert talk.large.requests[0].cache_salt == "t" and len(talk.sessions) == 0
    assert (await cascade.info()).session is None
