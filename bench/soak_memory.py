"""Resident memory of all processes of a cluster of namespaces over a long run, and if it is flat.

Linux only: it reads /proc. It does not know what the processes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import linregress

MAX_GROWTH_FRACTION = 0.05
MAX_GROWTH_MB = 20.0
WARM_UP_FRACTION = 0.25
"""What a process takes in the first part of the run is the cost of having run at all."""

_PAGE_MB = 4096 / 1e6


@dataclass(frozen=True, kw_only=True)
class Resident:
    """One process after `handoffs` handoffs; with its part of what is shared, as `top` has it."""

    handoffs: int
    pid: int
    name: str
    mb: float


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A process between the end of the warm-up and the end of the run.

    `fitted_mb` is what a line through its samples gains in that time.
    """

    name: str
    pid: int
    samples: int
    first_mb: float
    last_mb: float
    fitted_mb: float
    kb_per_handoff: float

    @property
    def allowed_mb(self) -> float:
        """The larger of a share of what it had and a fixed amount."""
        return max(MAX_GROWTH_MB, MAX_GROWTH_FRACTION * self.first_mb)

    @property
    def flat(self) -> bool:
        """The line gains no more than is allowed; single samples come and go with buffers."""
        return self.fitted_mb <= self.allowed_mb


def growths(samples: Sequence[Resident]) -> list[Growth]:
    """One for each process that lived from the end of the warm-up to the end, largest first.

    ValueError when there are fewer than three moments after the warm-up.
    """
    last = max(sample.handoffs for sample in samples)
    after = [sample for sample in samples if sample.handoffs >= WARM_UP_FRACTION * last]
    moments = sorted({sample.handoffs for sample in after})
    if len(moments) < 3:
        raise ValueError(f"{len(moments)} moments after the warm-up: take three or more")
    found = []
    for pid in sorted({sample.pid for sample in after}):
        mine = sorted((s for s in after if s.pid == pid), key=lambda sample: sample.handoffs)
        if [sample.handoffs for sample in mine] != moments:
            continue
        line = linregress([s.handoffs for s in mine], [s.mb for s in mine])
        found.append(
            Growth(
                name=mine[-1].name,
                pid=pid,
                samples=len(mine),
                first_mb=mine[0].mb,
                last_mb=mine[-1].mb,
                fitted_mb=float(line.slope) * (moments[-1] - moments[0]),
                kb_per_handoff=float(line.slope) * 1e3,
            )
        )
    return sorted(found, key=lambda one: -one.last_mb)


def short_lived(samples: Sequence[Resident]) -> int:
    """Processes that are not in `growths`, because they came later or left."""
    return len({sample.pid for sample in samples}) - len(growths(samples))


def total_mb(samples: Sequence[Resident]) -> list[tuple[int, float]]:
    """(handoffs, memory of all processes together), in order."""
    moments = sorted({sample.handoffs for sample in samples})
    return [(at, sum(s.mb for s in samples if s.handoffs == at)) for at in moments]


def residents(pids: Mapping[str, Sequence[int]], handoffs: int) -> list[Resident]:
    """These processes now, by the node that they are on; without those that have just ended."""
    found = []
    for node, here in pids.items():
        for pid in here:
            try:
                resident = Path(f"/proc/{pid}/statm").read_text().split()[1]
                name = process_name(Path(f"/proc/{pid}/cmdline").read_bytes())
            except (FileNotFoundError, ProcessLookupError):
                continue
            mb = int(resident) * _PAGE_MB
            found.append(Resident(handoffs=handoffs, pid=pid, name=f"{name} ({node})", mb=mb))
    return found


def process_name(cmdline: bytes) -> str:
    """A short name of a process by its command line, as the kernel keeps it."""
    words = [word.decode(errors="replace") for word in cmdline.split(b"\0") if word]
    if not words:
        return "ended"
    first = words[0]
    if first.startswith("ray::"):
        # Ray appends what a worker does at this moment.
        title = first.removeprefix("ray::").partition(".")[0].strip()
        _, replica, deployment = title.rpartition("ServeReplica:")
        return f"replica of {deployment.rpartition(':')[2]}" if replica else title
    if first.startswith("VLLM::"):
        return first.split()[0]
    for word in words:
        if word.endswith(".py"):
            return Path(word).name
    return Path(first).name
