"""Capacity that simulated work shares fairly: links with their ports, and GPUs that map.

A flow is an amount of work (bytes, or GPU seconds) that passes one or more ports at once. Rates
are max-min fair: the most contended port divides what it has evenly among its flows, the next one
what is left. Knows nothing of requests.
"""

from __future__ import annotations

import simpy
from simpy.events import Event


class Window:
    """The part of simulated time that is measured; both ends in seconds."""

    def __init__(self, start_s: float, end_s: float) -> None:
        self.start_s = start_s
        self.end_s = end_s

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Seconds of the interval that lie in the window."""
        return max(0.0, min(end_s, self.end_s) - max(start_s, self.start_s))

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Level:
    """A number over time, with its time integral in the window and over all time."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self.value = 0
        self._since_s = 0.0
        self.integral = 0.0
        self.measured = 0.0

    def add(self, change: int, now_s: float) -> None:
        self.integral += self.value * (now_s - self._since_s)
        self.measured += self.value * self._window.overlap_s(self._since_s, now_s)
        self._since_s = now_s
        self.value += change


class Port:
    """A capacity in work per second. `carried` is all work that passed, `measured` the window's."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.flows: dict[Flow, None] = {}
        self.carried = 0.0
        self.measured = 0.0


class Flow:
    """Work under way; `done` happens when all of it has passed."""

    def __init__(self, amount: float, ports: tuple[Port, ...], now_s: float, done: Event) -> None:
        self.left = amount
        self.ports = ports
        self.rate = 0.0
        self.since_s = now_s
        self.done = done
        self.version = 0


class FairShare:
    """Moves flows through ports. Only flows that share a port with a change are looked at."""

    def __init__(self, env: simpy.Environment, window: Window) -> None:
        self._env = env
        self._window = window

    def start(self, amount: float, *ports: Port) -> Flow:
        """Begin to move `amount`; nothing to move is done at once."""
        flow = Flow(amount, ports, self._env.now, self._env.event())
        if amount <= 0 or not ports:
            flow.done.succeed()
            return flow
        for port in ports:
            port.flows[flow] = None
        self._share(ports)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Stop a flow that is not done; what has passed has passed."""
        if flow.done.triggered:
            return
        self._settle(flow)
        self._remove(flow)

    def _remove(self, flow: Flow) -> None:
        flow.version += 1
        for port in flow.ports:
            del port.flows[flow]
        self._share(flow.ports)

    def _settle(self, flow: Flow) -> None:
        """Account for what passed since the flow's rate was set."""
        now_s = self._env.now
        moved = flow.rate * (now_s - flow.since_s)
        inside = flow.rate * self._window.overlap_s(flow.since_s, now_s)
        for port in flow.ports:
            port.carried += moved
            port.measured += inside
        flow.left -= moved
        flow.since_s = now_s

    def _share(self, changed: tuple[Port, ...]) -> None:
        flows, ports = _connected(changed)
        for flow, rate in max_min(flows, ports).items():
            if rate == flow.rate:
                continue
            self._settle(flow)
            flow.rate = rate
            flow.version += 1
            self._expect(flow)

    def _expect(self, flow: Flow) -> None:
        version = flow.version

        def due(_: Event) -> None:
            if flow.version != version:
                return
            self._settle(flow)
            # Rounding leaves a few billionths of the work over; they belong to the ports too.
            for port in flow.ports:
                port.carried += flow.left
            flow.left = 0.0
            self._remove(flow)
            flow.done.succeed()

        timeout = self._env.timeout(max(0.0, flow.left / flow.rate))
        assert timeout.callbacks is not None
        timeout.callbacks.append(due)


def _connected(changed: tuple[Port, ...]) -> tuple[list[Flow], list[Port]]:
    """Flows and ports that the changed ports reach over shared flows."""
    flows: dict[Flow, None] = {}
    ports: dict[Port, None] = dict.fromkeys(changed)
    unseen = list(changed)
    while unseen:
        for flow in unseen.pop().flows:
            if flow not in flows:
                flows[flow] = None
                for port in flow.ports:
                    if port not in ports:
                        ports[port] = None
                        unseen.append(port)
    return list(flows), list(ports)


def max_min(flows: list[Flow], ports: list[Port]) -> dict[Flow, float]:
    """Max-min fair rates of flows that pass some of `ports`, by filling up the tightest first."""
    free = {port: port.capacity for port in ports if port.flows}
    open_ = {port: len(port.flows) for port in free}
    rates: dict[Flow, float] = {}
    while len(rates) < len(flows):
        tightest = min(
            (port for port in free if open_[port]), key=lambda port: free[port] / open_[port]
        )
        rate = free[tightest] / open_[tightest]
        for flow in tightest.flows:
            if flow in rates:
                continue
            rates[flow] = rate
            for port in flow.ports:
                free[port] -= rate
                open_[port] -= 1
    return rates
