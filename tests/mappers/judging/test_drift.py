"""Alternating handoffs between tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.errors import MapperError
from mappers.capture import load_model, pack
from mappers.judging.drift import drift
from mappers.mapper import Mapper
from tests.mappers.oracle import oracle, with_swapped_layers
from tests.mappers.tiny import sentences, write_model


def test_exact_mappers_do_not_drift_and_broken_ones_do(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=3, seed=1)
    model = load_model(folder, torch.float32, "cpu")
    conversations = pack(sentences(4, seed=2), folder, 66, 132)
    steps: list[int] = []

    def run(forward: Mapper, reverse: Mapper) -> tuple[list[float], list[float]]:
        report = drift(model, model, forward, reverse, conversations, advance=steps.append)
        assert report.turn_tokens == 6 and report.conversations == 2
        assert [one.turn for one in report.kept] == list(range(1, 11))
        assert [one.owner for one in report.kept[:2]] == ["target", "source"]
        kept, anew = report.kept, report.remapped
        return [one.kl_to_native for one in kept], [one.kl_to_native for one in anew]

    exact, broken = oracle(folder), with_swapped_layers(folder, 0, 2)
    for curve in run(exact, exact):
        assert max(curve) < 1e-5
    assert steps == [1, 1]
    kept, anew = run(broken, exact)
    assert min(kept) > 1e-5
    # The source kept its own first turn: it suffers less than where that comes back broken too.
    assert anew[1] > 2 * kept[1]


def test_short_conversations_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", layers=1)
    model = load_model(folder, torch.float32, "cpu")
    short = pack(sentences(1, seed=2), folder, 21, 21)
    with pytest.raises(MapperError, match="too short for 10 handoffs"):
        drift(model, model, oracle(folder), oracle(folder), short)
