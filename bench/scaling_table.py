"""What windows and episodes say together: growth with mappers, and whether all was well. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from bench.scaling_runs import Episode, Window

TARGET = 0.8
"""Of what as many single mappers would do."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """All rounds of one pair, rate and number of mappers: means, and the least and the most."""

    pair: str
    rate_gbps: float
    mappers: int
    rounds: int
    handoffs: int
    reasons: tuple[str, ...]
    """Of requests that were no mapped handoff, one for each."""
    handoffs_per_s: float
    range_per_s: tuple[float, float]
    delivered_gbps: float
    range_gbps: tuple[float, float]
    handoff_ms: float
    link_use: float
    """The mappers' mean link by its rate."""
    own_cores: float
    """Used by the cluster's processes."""
    other_cores: float
    """Neither used by them nor idle."""
    linearity: float | None = None
    """Delivered bytes by those of one mapper and the number of mappers; None without one mapper."""


def rows_of(windows: Sequence[Window], cores: int) -> list[Row]:
    """One row for each pair, rate and number of mappers, in this order; of a machine's `cores`."""
    keys = sorted({(w.pair != "tiny", w.pair, w.rate_gbps, w.mappers) for w in windows})
    found: list[Row] = []
    for _, pair, rate_gbps, mappers in keys:
        here = [
            w for w in windows if (w.pair, w.rate_gbps, w.mappers) == (pair, rate_gbps, mappers)
        ]
        delivered = [w.delivered_gbps for w in here]
        per_s = [w.handoffs_per_s for w in here]
        single = next((r for r in found if (r.pair, r.rate_gbps) == (pair, rate_gbps)), None)
        one = mean(delivered) if mappers == 1 else None
        if single is not None and single.mappers == 1:
            one = single.delivered_gbps
        found.append(
            Row(
                pair=pair,
                rate_gbps=rate_gbps,
                mappers=mappers,
                rounds=len(here),
                handoffs=sum(w.handoffs for w in here),
                reasons=tuple(reason for w in here for reason in w.reasons),
                handoffs_per_s=mean(per_s),
                range_per_s=(min(per_s), max(per_s)),
                delivered_gbps=mean(delivered),
                range_gbps=(min(delivered), max(delivered)),
                handoff_ms=mean(w.handoff_ms for w in here),
                link_use=mean(sum(w.mappers_gbps) for w in here) / mappers / rate_gbps,
                own_cores=mean(w.own_cores for w in here),
                other_cores=max(0.0, cores - mean(w.own_cores + w.idle_cores for w in here)),
                linearity=None if one is None else mean(delivered) / one / mappers,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """What an episode showed."""

    name: str
    requests: int
    failed: int
    read_again: int
    reasons: tuple[str, ...]
    """Of those that failed or were read again."""
    replicas: tuple[int, ...]
    """Running mappers, each number once for every time that it was reached."""
    engines_stayed: bool
    """The same processes from the first sample to the last."""
    seconds: float

    @property
    def good(self) -> bool:
        """One to three to one, and no request noticed."""
        clean = self.failed == self.read_again == 0
        return clean and self.engines_stayed and self.replicas == (1, 3, 1)


def change_of(episode: Episode) -> Change:
    """The episode in short. Numbers of replicas between one and the most are left out."""
    records = [record for outcome in episode.outcomes for record in outcome.records]
    samples = episode.samples
    running = [sample.replicas.get("RUNNING", 0) for sample in samples]
    ends = [number for number in running if number in (1, 3)]
    replicas = [number for at, number in enumerate(ends) if at == 0 or ends[at - 1] != number]
    engines = {(*sample.pids["small"], *sample.pids["large"]) for sample in samples}
    return Change(
        name=episode.name,
        requests=len(records),
        failed=sum(record.error is not None for record in records),
        read_again=sum(record.error is None and not record.mapped for record in records),
        reasons=tuple(sorted({one.complaint for one in records if one.complaint})),
        replicas=tuple(replicas),
        engines_stayed=len(engines) == 1,
        seconds=max(r.ended_s for r in records) - min(r.started_s for r in records),
    )
