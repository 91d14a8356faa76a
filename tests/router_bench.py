"""One answer over scripted engines, as the tests of the splice and the takeover write it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.config import RoutingConfig
from router.api import CascadeInfo, CascadeOptions
from router.policies import make_policy
from router.ports import EngineRequest, TokenStep
from router.splice import Cascade, Job, Site
from tests.fakes import FakeHandoffPort, ListRecorder, ScriptedEngine, steps

PROMPT = tuple(range(1000, 1100))
SMALL = list(range(1, 21))
LARGE = list(range(501, 521))
ROUTING = RoutingConfig(margin_window_tokens=2, margin_threshold=1.0)


def go_on(request: EngineRequest) -> list[TokenStep]:
    """The large model writes LARGE, but only what the conversation does not hold already."""
    return steps(LARGE[len(request.prompt_token_ids) - len(PROMPT) :])


@dataclass
class Bench:
    """A site with scripted engines; `run` writes one answer."""

    small: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(steps(SMALL)))
    large: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(go_on))
    port: FakeHandoffPort = field(default_factory=FakeHandoffPort)
    recorder: ListRecorder = field(default_factory=ListRecorder)
    hold_back: int = 0
    small_context: int = 4_096
    min_handoff: int = 8

    def site(self) -> Site:
        return Site(
            small=self.small,
            large=self.large,
            handoffs=self.port,
            names={"small": "s", "large": "l"},
            small_context_tokens=self.small_context,
            min_handoff_tokens=self.min_handoff,
            hold_back_tokens=self.hold_back,
            recorder=self.recorder,
        )

    def cascade(self, site: Site, *, max_tokens: int = 20, **options: Any) -> Cascade:
        wanted = CascadeOptions(**options)
        job = Job(prompt_token_ids=PROMPT, max_tokens=max_tokens, sampling=lambda *part: part)
        return Cascade(site, make_policy(ROUTING, wanted), wanted, job)

    async def run(self, **options: Any) -> tuple[list[int], str | None, CascadeInfo]:
        site = self.site()
        cascade = self.cascade(site, **options)
        tokens: list[int] = []
        reason = None
        async for piece in cascade.pieces():
            assert reason is None, "a piece came after the last one"
            tokens += [one.token_id for one in piece.chunk.steps]
            reason = piece.chunk.finish_reason
        info = await cascade.info()
        await site.background.drain()
        assert (self.small.open, self.large.open, self.port.open) == (0, 0, set())
        return tokens, reason, info
