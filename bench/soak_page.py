"""A soak as verdict, page and picture, made from what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.load import Record
from bench.soak_memory import (
    MAX_GROWTH_FRACTION,
    MAX_GROWTH_MB,
    WARM_UP_FRACTION,
    Growth,
    growths,
    short_lived,
    total_mb,
)
from bench.soak_runs import Measured, Pools, Soak

_SHOWN_MB = 150.0
"""Smaller processes share a line in the picture."""

_PAGE = """\
# Soak: {handoffs} handoffs over links of {rate:g} Gb/s

{verdict}

Four Ray nodes (the router's, one for each model, the mapper's) are network namespaces of one
machine, each behind a link of {rate:g} Gb/s in each direction; UCX may use TCP only. The quickstart
pair with its trained mapper hands over {conversations} conversations of {tokens} tokens by turns,
{in_flight} in flight all the time, each request a session of its own. Made by one command:

```sh
{command}
```

{about}

| | |
|---|---:|
| handoffs asked for | {handoffs} |
| mapped | {mapped} |
| failed | {failed} |
| read again | {read_again} |
| seconds | {seconds:.0f} |
| KV written over the links, GB | {gigabytes:.1f} |
| handoff, median (90 % below), ms | {median:,.0f} ({ninety:,.0f}) |

## Pools

| | before | {emptied:.1f} s after the last answer |
|---|---:|---:|
{pools}

Before the first request and after the last one an engine must have the same number of free blocks:
then nothing is pinned, loading or lost. (vLLM keeps one block of each pool for itself.)

## Memory

![memory gained since the warm-up, by handoffs](soak.png)

Resident memory, sampled every {every} handoffs. A process is flat when, from the end of the first
quarter to the end, a line through its samples gains no more than the larger of
{mb:.0f} MB and {fraction:.0%}; "kB each" is the line's slope by handoff. {others} processes that
came or went meanwhile are not in the table. A part of the router's growth is meant to be: it keeps
the token ids of every conversation for an hour (`sessions`).

| process (node) | pid | after a quarter, MB | at the end, MB | line, MB | kB each | flat |
|---|---:|---:|---:|---:|---:|---|
{memory}
"""


def problems(soak: Soak, found: Measured) -> list[str]:
    """Everything that makes the soak a failure, one line each; empty: it held."""
    records = found.outcome.records
    lines = [f"{n} times {what}" for what, n in Counter(map(_complaint, records)).items() if what]
    if len(records) != soak.handoffs:
        lines.append(f"{len(records)} of {soak.handoffs} requests were made")
    before, after = found.pools
    if before != after:
        lines.append(f"pools are not as before: {after}")
    lines += [
        f"{one.name} grew from {one.first_mb:.0f} to {one.last_mb:.0f} MB"
        for one in growths(found.memory)
        if not one.flat
    ]
    return lines


def page(soak: Soak, found: Measured, machine: Mapping[str, Any], command: str) -> str:
    """SOAK.md."""
    records = found.outcome.records
    mapped = [record for record in records if record.mapped]
    times = [record.handoff_ms for record in mapped if record.handoff_ms is not None]
    load = " to ".join(f"{one:.1f}" for one in sorted(found.load_averages))
    wrong = problems(soak, found)
    verdict = "It held: no failure, flat memory, empty pools."
    return _PAGE.format(
        verdict="\n".join(f"* {line}" for line in wrong) if wrong else verdict,
        handoffs=soak.handoffs,
        rate=soak.rate_gbps,
        conversations=soak.seeds * len(soak.tokens),
        tokens=", ".join(f"{one:,}" for one in soak.tokens),
        in_flight=soak.in_flight,
        command=command,
        about=f"{machine['cpu']}, {machine['cores']} cores, load average {load} (its own work "
        "included).",
        mapped=len(mapped),
        failed=sum(record.error is not None for record in records),
        read_again=sum(record.error is None and not record.mapped for record in records),
        seconds=found.seconds,
        gigabytes=sum(record.bytes_written for record in records) / 1e9,
        median=median(times) if times else 0.0,
        ninety=quantiles(times, n=10)[-1] if len(times) > 1 else 0.0,
        emptied=found.emptied_s,
        pools="\n".join(_pool_lines(*found.pools)),
        every=soak.every,
        mb=MAX_GROWTH_MB,
        fraction=MAX_GROWTH_FRACTION,
        others=short_lived(found.memory),
        memory="\n".join(map(_memory_line, growths(found.memory))),
    )


def plot(found: Measured, path: Path) -> None:
    """What the large processes, and all together, gained since the warm-up, by handoffs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), dpi=110, layout="constrained")
    panel = figure.subplots()
    shown = [one for one in growths(found.memory) if one.last_mb >= _SHOWN_MB]
    for one in shown:
        mine = [sample for sample in found.memory if sample.pid == one.pid]
        at, mb = [sample.handoffs for sample in mine], [sample.mb - one.first_mb for sample in mine]
        panel.plot(at, mb, marker=".", label=f"{one.name}, {one.first_mb:,.0f} MB")
    whole = total_mb(found.memory)
    warm = WARM_UP_FRACTION * whole[-1][0]
    level = next(mb for at, mb in whole if at >= warm)
    all_at, all_mb = [at for at, _ in whole], [mb - level for _, mb in whole]
    panel.plot(all_at, all_mb, color="black", linestyle="--", label=f"all, {level:,.0f} MB")
    panel.axvline(warm, color="0.85", zorder=0)
    panel.axhline(MAX_GROWTH_MB, color="0.7", linestyle=":", zorder=0)
    panel.set_xlabel("handoffs")
    panel.set_ylabel("resident memory since the warm-up (MB)")
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    figure.savefig(path)


def _complaint(record: Record) -> str | None:
    return record.complaint


def _pool_lines(before: Pools, after: Pools) -> list[str]:
    lines = [
        ("mapper: handoffs", before.mapper_handoffs, after.mapper_handoffs),
        ("mapper: bytes in use", before.mapper_bytes, after.mapper_bytes),
    ]
    for key in ("pinned_blocks", "loading_blocks", "free_blocks"):
        was, now = getattr(before, key), getattr(after, key)
        lines += [(f"{name}: {key.replace('_', ' ')}", was[name], now[name]) for name in was]
    return [f"| {name} | {was:,} | {now:,} |" for name, was, now in lines]


def _memory_line(one: Growth) -> str:
    numbers = f"{one.first_mb:,.1f} | {one.last_mb:,.1f} | {one.fitted_mb:+.1f}"
    flat = "yes" if one.flat else "**no**"
    return f"| {one.name} | {one.pid} | {numbers} | {one.kb_per_handoff:+.1f} | {flat} |"


def heads(growing: Sequence[Growth]) -> list[str]:
    """For the terminal: one line for each process, largest first."""
    return [_memory_line(one).strip("| ") for one in growing]
