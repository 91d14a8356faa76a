"""Streaming moments: independent of how observations are cut."""

from __future__ import annotations

import pytest
import torch

from cluster.errors import MapperError
from mappers.geometry import KVGeometry
from mappers.moments import Moments, moments_bytes, require_memory


def observations() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(400, 6, generator=generator, dtype=torch.float64) * 3 + 50
    y_NO = torch.randn(400, 4, generator=generator, dtype=torch.float64) + x_NF[:, :4]
    return x_NF, y_NO


def test_four_merged_shards_equal_one() -> None:
    x_NF, y_NO = observations()
    whole = Moments(6, 4)
    whole.update(x_NF, y_NO)
    merged = Moments(6, 4)
    for x_part, y_part in zip(
        x_NF.split([10, 190, 1, 199]), y_NO.split([10, 190, 1, 199]), strict=True
    ):
        shard = Moments(6, 4)
        shard.update(x_part, y_part)
        merged.merge(shard)
    assert merged.count == 400
    for name in ("mean_x_F", "mean_y_O", "xx_FF", "xy_FO", "yy_O"):
        a, b = getattr(merged, name), getattr(whole, name)
        assert (a - b).abs().max() / b.abs().max() < 1e-10, name


def test_a_weight_counts_observations_as_often() -> None:
    x_NF, y_NO = observations()
    weighted, repeated = Moments(6, 4), Moments(6, 4)
    weighted.update(x_NF, y_NO)
    weighted.update(x_NF[:3], y_NO[:3], weight=7)
    repeated.update(torch.cat([x_NF] + [x_NF[:3]] * 7), torch.cat([y_NO] + [y_NO[:3]] * 7))
    assert weighted.count == repeated.count == 421
    torch.testing.assert_close(weighted.mean_x_F, repeated.mean_x_F)
    torch.testing.assert_close(weighted.xx_FF, repeated.xx_FF)
    torch.testing.assert_close(weighted.xy_FO, repeated.xy_FO)
    torch.testing.assert_close(weighted.yy_O, repeated.yy_O)


def test_moments_are_the_covariance() -> None:
    x_NF, y_NO = observations()
    moments = Moments(6, 4)
    for x_part, y_part in zip(x_NF.split(64), y_NO.split(64), strict=True):
        moments.update(x_part, y_part)
    joint = torch.cov(torch.cat([x_NF, y_NO], dim=1).T, correction=0)
    torch.testing.assert_close(moments.xx_FF / 400, joint[:6, :6])
    torch.testing.assert_close(moments.xy_FO / 400, joint[:6, 6:])
    torch.testing.assert_close(moments.yy_O / 400, joint.diagonal()[6:])


def test_a_pair_too_large_for_memory_is_refused_with_both_sizes() -> None:
    small, large = KVGeometry(40, 8, 128), KVGeometry(64, 8, 128)
    assert moments_bytes(small, large) == pytest.approx(80.5e9, rel=0.01)
    with pytest.raises(MapperError, match=r"80\.\d GB .* 16\.0 GB"):
        require_memory(small, large, 16_000_000_000)
