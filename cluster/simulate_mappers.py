"""Simulated mapper replicas: the places that they have for handoffs, and who gets the next one.

Knows nothing of what a handoff does with its place.
"""

from __future__ import annotations

from collections import deque

import simpy

from cluster.simulate_share import Level, Port, Window


class Ends:
    """The two directions of one replica's link, in bytes per second."""

    def __init__(self, link_gbps: float) -> None:
        self.out = Port(link_gbps * 1e9 / 8)
        self.into = Port(link_gbps * 1e9 / 8)


class Mapper:
    """A mapper replica: its link, a GPU that its handoffs share evenly, and, where copies within
    its node take time, what these share.
    """

    def __init__(self, link_gbps: float, window: Window, local_gbps: float | None = None) -> None:
        self.ends = Ends(link_gbps)
        self.gpu = Port(1.0)
        self.local = None if local_gbps is None else Port(local_gbps * 1e9 / 8)
        self.handoffs = Level(window)


class Mappers:
    """Grants places on the mapper with the fewest handoffs, first come, first served."""

    def __init__(self, env: simpy.Environment, mappers: list[Mapper], places: int) -> None:
        self._env = env
        self.mappers = mappers
        self._places = places
        self._queue: deque[simpy.Event] = deque()

    def take(self) -> simpy.Event:
        """An event whose value is the mapper; give it back with `give`."""
        asked = self._env.event()
        self._queue.append(asked)
        self._grant()
        return asked

    def give(self, mapper: Mapper) -> None:
        mapper.handoffs.add(-1, self._env.now)
        self._grant()

    def withdraw(self, asked: simpy.Event) -> None:
        """No longer wanted: leave the queue, or give back what was granted."""
        if asked.triggered:
            mapper: Mapper | None = asked.value
            assert mapper is not None
            self.give(mapper)
        else:
            self._queue.remove(asked)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def _grant(self) -> None:
        while self._queue:
            mapper = min(self.mappers, key=lambda one: one.handoffs.value)
            if mapper.handoffs.value >= self._places:
                return
            mapper.handoffs.add(1, self._env.now)
            self._queue.popleft().succeed(mapper)
