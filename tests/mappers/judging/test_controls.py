"""Random mappers of equal norm, and source caches as they are."""

from __future__ import annotations

from pathlib import Path

import torch

from mappers.geometry import KVGeometry
from mappers.judging.controls import random_like, raw_source
from mappers.mapper import IdentityMapper, LinearMapper
from tests.mappers.oracle import oracle
from tests.mappers.tiny import write_model


def test_a_random_mapper_keeps_norms_and_biases_and_nothing_else(tmp_path: Path) -> None:
    mapper = oracle(write_model(tmp_path / "model", layers=3))
    twin = random_like(mapper, seed=1)
    assert isinstance(twin, LinearMapper)
    for name in ("k_weight_LGFO", "v_weight_LGFO"):
        ours, theirs = getattr(mapper.weights, name), getattr(twin.weights, name)
        torch.testing.assert_close(ours.flatten(1).norm(dim=1), theirs.flatten(1).norm(dim=1))
        assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0).abs() < 0.1
    assert torch.equal(mapper.weights.k_bias_LGO, twin.weights.k_bias_LGO)
    assert mapper.weights.k_weight_LGFO[0, 0, 0, 0] == 1.0, "the mapper itself is left alone"
    again = random_like(mapper, seed=1)
    assert isinstance(again, LinearMapper)
    assert torch.equal(again.weights.v_weight_LGFO, twin.weights.v_weight_LGFO)


def test_only_linear_mappers_have_a_random_twin() -> None:
    assert random_like(IdentityMapper(KVGeometry(2, 2, 4))) is None


def test_a_raw_cache_repeats_layers_and_needs_equal_heads() -> None:
    mapper = IdentityMapper(KVGeometry(2, 2, 4))
    mapper.target = KVGeometry(4, 2, 4)
    k_SPHD = torch.arange(2.0)[:, None, None, None].expand(2, 3, 2, 4)
    raw = raw_source((k_SPHD, k_SPHD), mapper)
    assert raw is not None and raw[0][:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    mapper.target = KVGeometry(4, 1, 4)
    assert raw_source((k_SPHD, k_SPHD), mapper) is None
