"""Reads measurements for `cluster.simulate_measured`: lists of them, and what benchmarks write.

`bench/handoff.py --json` holds single runs and the rates that the same machine reached. Each of its
cells becomes one measurement, the median of its warm runs, to be simulated with those rates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError
from scipy.optimize import nnls

from cluster import plan
from cluster.catalog import Architecture
from cluster.chunking import Cutting, new_costs
from cluster.errors import ConfigError
from cluster.simulate import Setup
from cluster.simulate_cost import EngineCost, Machine
from cluster.simulate_measured import Case, Measured, MeasuredLoop
from cluster.simulate_spec import Place

TCP_SHARE = 1_448 / 1_514
"""Payload in an Ethernet frame of 1,500 bytes with TCP over IPv4 and timestamps."""

# Of the quickstart's engines: the smallest blocks that vLLM's CPU attention takes.
_BLOCK_TOKENS = 32
_PLACES: dict[str | None, Place] = {"source": "sender", "target": "receiver", "own": "apart"}
_FORMS = (
    'write a list of {"prompt_tokens", "link_gbps", "path": "mapped" or "recompute", "seconds"} or '
    '{"mappers", "link_gbps", "in_flight", "tokens", "handoffs_per_s"}, an object with such a list '
    "under `measured`, or name what `bench/handoff.py --json` wrote"
)


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True)


class _Run(_Read):
    place: str
    rate_gbps: PositiveFloat | None
    first: bool
    wanted: str
    path: str
    tokens: int
    prompt_tokens: PositiveInt
    covered_tokens: int
    bytes_written: int
    handoff_ms: PositiveFloat
    stages_ms: dict[str, float]

    @property
    def counts(self) -> bool:
        return not self.first and self.path == self.wanted


class _Rates(_Read):
    map_tokens_per_s: PositiveFloat
    overhead_ms: PositiveFloat
    unlimited_gbps: PositiveFloat


class _Runs(_Read):
    """`chunk_tokens` is there when chunks had one size whatever the rates."""

    runs: list[_Run]
    rates: _Rates
    chunk_tokens: PositiveInt | None = None


def read_cases(paths: Sequence[Path], setup: Setup) -> list[Case]:
    """All measurements of the files, each with what `setup` becomes for it.

    Raises ConfigError that names the first wrong entry.
    """
    return [case for path in paths for case in _cases(path, setup)]


def _cases(path: Path, setup: Setup) -> list[Case]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a JSON file of measurements") from None
    except ValueError as error:
        raise ConfigError(f"{path}: the file: {error}; {_FORMS}") from None
    if isinstance(content, dict) and "measured" in content:
        content = content["measured"]
    if isinstance(content, list):
        rows = [_row(path, number, one) for number, one in enumerate(content)]
        return [Case(row, _as_listed(setup, row)) for row in rows]
    if isinstance(content, dict) and "runs" in content and "rates" not in content:
        raise ConfigError(
            f"{path} has no rates; `python bench/handoff.py --from {path} --json {path}` adds them"
        )
    try:
        return _handoff_cases(path, _Runs.model_validate(content), setup)
    except ValidationError as error:
        raise _wrong(path, error) from None


def _row(path: Path, number: int, content: object) -> Measured | MeasuredLoop:
    is_loop = isinstance(content, dict) and "handoffs_per_s" in content
    try:
        return (MeasuredLoop if is_loop else Measured).model_validate(content)
    except ValidationError as error:
        raise _wrong(path, error, number) from None


def _wrong(path: Path, error: ValidationError, *where: object) -> ConfigError:
    first = error.errors()[0]
    place = ".".join(str(part) for part in (*where, *first["loc"]))
    return ConfigError(f"{path}: {place or 'the file'}: {first['msg']}; {_FORMS}")


def _as_listed(setup: Setup, row: Measured | MeasuredLoop) -> Setup:
    if isinstance(row, MeasuredLoop):
        return setup
    if row.link_gbps is not None:
        setup = replace(setup, link_gbps=row.link_gbps)
    if row.at is not None:
        rules = setup.rules.model_copy(update={"place": _PLACES[row.at]})
        setup = replace(setup, rules=rules)
    return setup


def _handoff_cases(path: Path, found: _Runs, setup: Setup) -> list[Case]:
    cells: dict[tuple[str, float | None, int], list[_Run]] = {}
    again: dict[int, list[_Run]] = {}
    for run in found.runs:
        if run.counts and run.path == "mapped":
            cells.setdefault((run.place, run.rate_gbps, run.tokens), []).append(run)
        elif run.counts:
            again.setdefault(run.tokens, []).append(run)
    if not cells or not again:
        raise ConfigError(f"{path} needs warm handoffs and lengths that were read again")
    _check_pair(path, setup, cells.values())
    read_s = {_prompt(runs): _seconds(runs) for _, runs in sorted(again.items())}
    shortest = min(cells, key=lambda cell: cell[2])
    machine = machine_of(setup.target, read_s, found.rates.map_tokens_per_s)
    # Admission, as it is measured, ends with the first token: the step to it is simulated.
    rest_s = _rest_s(setup, machine, cells[shortest])
    besides_ms = max(0.0, found.rates.overhead_ms - 1e3 * rest_s)
    scenario = setup.scenario.model_copy(update={"overhead_ms": besides_ms})
    here = replace(setup, scenario=scenario, machine=machine)
    cases = [_mapped(here, found, cell, runs) for cell, runs in cells.items()]
    for tokens, spent_s in read_s.items():
        # A length says nothing of itself.
        others = {one: other_s for one, other_s in read_s.items() if one != tokens}
        if others:
            machine = machine_of(setup.target, others, found.rates.map_tokens_per_s)
            row = Measured(prompt_tokens=tokens, link_gbps=None, path="recompute", seconds=spent_s)
            cases.append(Case(row, replace(here, machine=machine)))
    return cases


def machine_of(
    target: Architecture, read_s: Mapping[int, float], map_tokens_per_s: float
) -> Machine:
    """A machine that reads prompts of so many tokens in so many seconds.

    With one length every FLOP takes the same time; with more, those of attention have a time of
    their own, by least squares of relative errors.
    """
    token_flop = plan.prefill_flop_per_token(target, 0)
    tokens = np.array(list(read_s), dtype=float)
    spent_s = np.array(list(read_s.values()))
    flop = np.stack([token_flop * tokens, np.zeros_like(tokens)], axis=1)
    flop[:, 1] = [plan.prefill_flop_per_token(target, one) * one for one in read_s]
    flop[:, 1] -= flop[:, 0]
    per_flop_s, attention_s = 0.0, 0.0
    if len(read_s) > 1:
        per_flop_s, attention_s = nnls(flop / spent_s[:, None], np.ones_like(spent_s))[0]
    if per_flop_s <= 0:
        per_flop_s = attention_s = float(np.mean(spent_s / flop.sum(axis=1)))
    engine = plan.Gpus(tflops=1 / per_flop_s / 1e12, memory_gb_s=None)
    return Machine(engine, float(attention_s / per_flop_s), map_tokens_per_s)


def _mapped(
    setup: Setup, found: _Runs, cell: tuple[str, float | None, int], runs: Sequence[_Run]
) -> Case:
    at, rate_gbps, _ = cell
    prompt, covered, local_gbps = _prompt(runs), _covered(runs), found.rates.unlimited_gbps
    link_gbps = local_gbps if rate_gbps is None else min(rate_gbps * TCP_SHARE, local_gbps)
    changed = {
        "place": _PLACES[at],
        "local_gbps": local_gbps,
        "native_suffix_tokens": prompt + 1 - covered,
    }
    setup = replace(setup, link_gbps=link_gbps, rules=setup.rules.model_copy(update=changed))
    chunk_tokens = found.chunk_tokens or _chosen_chunk_tokens(setup, covered)
    rules = setup.rules.model_copy(update={"chunk_tokens": chunk_tokens})
    row = Measured.model_validate(
        {
            "prompt_tokens": prompt,
            "link_gbps": rate_gbps,
            "path": "mapped",
            "seconds": _seconds(runs),
            "at": at,
        }
    )
    return Case(row, replace(setup, rules=rules))


def _chosen_chunk_tokens(setup: Setup, covered_tokens: int) -> int | None:
    """The chunks in which a mapper moves a handoff once it knows its own rates."""
    rules, cost = setup.rules, setup.handoff
    most = rules.chunk_tokens
    if most is None:
        return None
    local_gbps = rules.local_gbps or setup.link_gbps
    read_gbps = local_gbps if rules.place == "sender" else setup.link_gbps
    write_gbps = local_gbps if rules.place == "receiver" else setup.link_gbps
    seen = new_costs()
    seen["read"].saw(1, most, plan.transfer_s(most * cost.read_bytes_per_token, read_gbps))
    seen["map"].saw(1, most, cost.map_s(most))
    seen["write"].saw(1, most, plan.transfer_s(most * cost.write_bytes_per_token, write_gbps))
    cutting = Cutting(grid_tokens=_BLOCK_TOKENS, most_tokens=most)
    return max(cutting.cut(covered_tokens, seen))


def _check_pair(path: Path, setup: Setup, cells: Iterable[Sequence[_Run]]) -> None:
    token_bytes = plan.kv_bytes_per_token(setup.target.geometry)
    for run in chain.from_iterable(cells):
        if run.bytes_written != run.covered_tokens * token_bytes:
            raise ConfigError(
                f"{path} was measured with another large model than {setup.target.name}; name the "
                "pair with --source and --target"
            )


def _rest_s(setup: Setup, machine: Machine, runs: Sequence[_Run]) -> float:
    """What the target takes for the tokens that it reads itself."""
    engine = EngineCost(setup.target, machine.engine, setup.rules, machine.attention)
    covered, context = _covered(runs), _prompt(runs) + 1
    flop = engine.read_flop(covered, context)
    return engine.step_s(0, 0, flop, context - covered, covered)[0]


def _prompt(runs: Sequence[_Run]) -> int:
    return round(median(run.prompt_tokens for run in runs))


def _covered(runs: Sequence[_Run]) -> int:
    return round(median(run.covered_tokens for run in runs))


def _seconds(runs: Sequence[_Run]) -> float:
    return median(run.handoff_ms for run in runs) / 1e3
