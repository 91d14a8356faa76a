"""One simulated handoff at work: chunks are read, mapped and written, overlapped.

As `deployments/pipeline.py` does it: each step takes one chunk after another, a chunk goes to the
next step when it is done, and two buffers lie between neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import simpy
from simpy.events import Event

from cluster.simulate_share import FairShare, Flow, Port
from cluster.simulate_spec import Resource

_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A step's work by chunk, what it passes through, and which resource that is.

    `ahead` says how many chunks it may take before the target has blocks; None: all.
    """

    amounts: Sequence[float]
    ports: tuple[Port, ...]
    resource: Resource
    ahead: int | None = None


class Pipeline:
    """Runs the steps over the chunks, of which every step has an amount.

    `read` happens when the first step is through with all chunks, `done` when the last one is.
    """

    def __init__(
        self,
        env: simpy.Environment,
        share: FairShare,
        steps: Sequence[Step],
        allocated: Event,
    ) -> None:
        self._share = share
        self._steps = steps
        self._chunks = len(steps[0].amounts)
        self._allocated = allocated
        self._through = [0] * len(steps)
        self._flows: list[Flow | None] = [None] * len(steps)
        self._cancelled = False
        self.read = env.event()
        self.done = env.event()
        if not allocated.triggered:
            assert allocated.callbacks is not None
            allocated.callbacks.append(lambda _: self._advance())
        self._advance()

    def cancel(self) -> None:
        """Stop; what has been moved has been moved."""
        self._cancelled = True
        for flow in self._flows:
            if flow is not None:
                self._share.cancel(flow)

    @property
    def waits_for(self) -> Resource:
        """What would end it sooner: the target, or the resource of the step with most left."""
        running = [number for number, flow in enumerate(self._flows) if flow is not None]
        if not running:
            return "large"
        return self._steps[max(running, key=self._left_s)].resource

    def _left_s(self, number: int) -> float:
        """Time that a running step still needs at its present rate."""
        flow = self._flows[number]
        assert flow is not None
        later = sum(self._steps[number].amounts[self._through[number] + 1 :])
        return (flow.left + later) / flow.rate

    def _advance(self) -> None:
        """Start every step that can go on."""
        if self._cancelled:
            return
        for number, step in enumerate(self._steps):
            if self._flows[number] is None and self._may_begin(number):
                flow = self._share.start(step.amounts[self._through[number]], *step.ports)
                self._flows[number] = flow
                assert flow.done.callbacks is not None
                flow.done.callbacks.append(self._when_through(number))

    def _may_begin(self, number: int) -> bool:
        chunk, last = self._through[number], len(self._steps) - 1
        if chunk == self._chunks or (number and self._through[number - 1] <= chunk):
            return False
        if number < last and chunk - self._through[number + 1] >= _BUFFERS:
            return False
        ahead = self._steps[number].ahead
        return self._allocated.triggered or ahead is None or chunk < ahead

    def _when_through(self, number: int) -> Callable[[Event], None]:
        def through(_: Event) -> None:
            self._flows[number] = None
            self._through[number] += 1
            if self._through[number] == self._chunks:
                if number == 0:
                    self.read.succeed()
                if number == len(self._steps) - 1:
                    self.done.succeed()
            self._advance()

        return through
