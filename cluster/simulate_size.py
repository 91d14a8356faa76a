"""The smallest pools with which a variant meets its latency targets at one rate.

Engine pools are halved in on together, with mappers in plenty; then the mappers. Every trial is a
simulation of the whole fleet. Knows nothing of prices: fewer replicas of a pool are always better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cluster.errors import ConfigError
from cluster.plan import BF16_BYTES, transfer_s
from cluster.simulate import Setup
from cluster.simulate_load import Request
from cluster.simulate_report import Percentiles, Point
from cluster.simulate_spec import Pool, Replicas, Targets, Variant, pools_of

_STEP = 1.3
_TOLERANCE = 0.02
_BATCH = 32
_FURTHEST = 16
# A handoff may take this part of the time in which the large model's first token is due.
_HANDOFF_SHARE = 0.5

Trial = Callable[[Replicas], Point]


def size(
    setup: Setup,
    variant: Variant,
    rate: float,
    requests: Sequence[Request],
    targets: Targets,
    trial: Trial,
) -> Replicas:
    """Replicas of the pools of `variant`; `trial` simulates a fleet at `rate`.

    Raises ConfigError when no number of replicas meets the targets.
    """
    counts = {pool: first_guess(setup, variant, pool, rate, requests) for pool in pools_of(variant)}
    engines: list[Pool] = [pool for pool in counts if pool != "mapper"]
    if "mapper" in counts:
        wanted = counts["mapper"]
        counts["mapper"] = 2 * wanted
        _halve(engines, counts, variant, targets, trial)
        counts["mapper"] = wanted
        _halve(["mapper"], counts, variant, targets, trial)
    else:
        _halve(engines, counts, variant, targets, trial)
    return _replicas(counts)


def first_guess(
    setup: Setup, variant: Variant, pool: Pool, rate: float, requests: Sequence[Request]
) -> int:
    """Replicas that could just do the work, each engine reading alone and writing 32 answers."""
    if not requests:
        raise ConfigError("no request arrived to size a fleet for; raise --rate or --seconds")
    if pool == "mapper":
        sent = setup.source if setup.rules.place == "receiver" else setup.target
        tokens = sum(one.prompt_tokens for one in requests if one.escalates)
        moved_bytes = tokens * sent.geometry.kv_bytes_per_token(BF16_BYTES)
        work_s = transfer_s(moved_bytes, setup.link_gbps)
    else:
        cost = setup.engine(pool)
        work_s = 0.0
        for one in requests:
            read, written = _asked(variant, pool, one)
            if read:
                work_s += cost.step_s(0, 0, cost.read_flop(0, read), read, 0)[0]
            step_s, _ = cost.step_s(_BATCH, one.prompt_tokens * _BATCH, 0.0, 0, 0)
            work_s += written * step_s / _BATCH
    return max(1, math.ceil(rate * work_s / len(requests)))


def _asked(variant: Variant, pool: Pool, one: Request) -> tuple[int, int]:
    """Tokens that a request has a pool of engines read and write."""
    if variant == "all_large":
        return one.prompt_tokens, one.answer_tokens
    if pool == "small":
        return one.prompt_tokens, one.small_tokens
    if not one.escalates:
        return 0, 0
    return 0 if variant == "handoff" else one.prompt_tokens, one.large_tokens


def _halve(
    pools: Sequence[Pool],
    counts: dict[Pool, int],
    variant: Variant,
    targets: Targets,
    trial: Trial,
) -> None:
    """Set `counts` of `pools` to the fewest that pass."""
    failed: dict[Pool, int] = dict.fromkeys(pools, 0)
    passed: dict[Pool, int | None] = dict.fromkeys(pools)
    most = {pool: _FURTHEST * counts[pool] for pool in pools}
    while True:
        seen = trial(_replicas(counts))
        for pool in pools:
            if _passes(seen, pool, variant, targets):
                passed[pool] = counts[pool]
            else:
                failed[pool] = counts[pool]
                best = passed[pool]
                passed[pool] = None if best is not None and best <= counts[pool] else best
        if all(
            passed[pool] == counts[pool] and _close(failed[pool], counts[pool]) for pool in pools
        ):
            return
        for pool in pools:
            counts[pool] = _next(failed[pool], passed[pool])
            if counts[pool] > most[pool]:
                raise ConfigError(_hopeless(variant, targets, seen))


def _hopeless(variant: Variant, targets: Targets, seen: Point) -> str:
    return (
        f"no fleet of the variant {variant} meets p99 of {targets.first_token_s:g} s to the first "
        f"tokens and {targets.tpot_s * 1e3:g} ms a token; {_worst(seen)}. Raise --first-token-s or "
        "--tpot-ms, lower --step-tokens or --max-tokens, or give a replica more GPUs"
    )


def _next(failed: int, passed: int | None) -> int:
    if passed is None:
        return max(failed + 1, round(failed * _STEP))
    if _close(failed, passed):
        return passed
    if failed == 0:
        return max(1, math.floor(passed / _STEP))
    return (failed + passed) // 2


def _close(failed: int, passed: int) -> bool:
    return passed == 1 or (failed > 0 and passed - failed <= max(1, _TOLERANCE * passed))


def _passes(seen: Point, pool: Pool, variant: Variant, targets: Targets) -> bool:
    """Whether nothing that depends on this pool is late."""
    if pool == "mapper":
        # A handoff is short, so a line of them that grows is not a fleet that still fills up.
        # More mappers have more links.
        if seen.saturated in ("mapper", "link"):
            return False
        limit_s = targets.first_token_s * _HANDOFF_SHARE
        return _within(seen.handoff, limit_s) and _within(
            seen.large_first_token, targets.first_token_s
        )
    if pool == "small":
        first, tpot = seen.first_token, seen.small_tpot
    elif variant == "all_large":
        first, tpot = seen.first_token, seen.large_tpot
    else:
        first, tpot = seen.large_first_token, seen.large_tpot
    return _within(first, targets.first_token_s) and _within(tpot, targets.tpot_s)


def _within(one: Percentiles | None, limit_s: float) -> bool:
    return one is None or one.p99_s <= limit_s


def _worst(seen: Point) -> str:
    named = {
        "first token": seen.first_token,
        "large model's first token": seen.large_first_token,
        "small model's time per token": seen.small_tpot,
        "large model's time per token": seen.large_tpot,
    }
    words = [f"{name} {one.p99_s:.3g} s" for name, one in named.items() if one is not None]
    return f"with {seen.gpus:,} GPUs the p99s were: {', '.join(words)}"


def _replicas(counts: dict[Pool, int]) -> Replicas:
    return Replicas(
        small=counts.get("small", 0), large=counts["large"], mapper=counts.get("mapper", 0)
    )
