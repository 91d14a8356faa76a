"""Streaming moments: independent of how observations are cut."""

from __future__ import annotations

import pytest
import torch

from mappers.fitting.moments import Moments
from mappers.fitting.sizes import moments_bytes


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


def test_real_weights_are_those_of_a_weighted_covariance() -> None:
    x_NF, y_NO = observations()
    weight_N = torch.rand(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moments = Moments(6, 4)
    for rows in torch.arange(400).split(150):
        moments.update(x_NF[rows], y_NO[rows], weight_N[rows])
    joint = torch.cov(torch.cat([x_NF, y_NO], dim=1).T, correction=0, aweights=weight_N)
    total = float(weight_N.sum())
    assert moments.count == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(moments.xx_FF / total, joint[:6, :6])
    torch.testing.assert_close(moments.xy_FO / total, joint[:6, 6:])
    torch.testing.assert_close(moments.mean_x_F, weight_N @ x_NF / total)


def test_tiles_below_the_diagonal_are_filled_in_when_asked_for() -> None:
    features = 2_100  # three tiles
    generator = torch.Generator().manual_seed(0)
    x_NF = torch.randn(8, features, generator=generator, dtype=torch.float64)
    moments = Moments(features, 0)
    moments.update(x_NF, x_NF[:, :0])
    centred_NF = x_NF - x_NF.mean(0)
    rows = torch.tensor([0, 5, 1_023, 1_024, 1_500, 2_047, 2_099])
    torch.testing.assert_close(moments.gram_of(rows), (centred_NF.T @ centred_NF)[rows][:, rows])
    kept = sum(xx.nbytes for xx in moments.xx_tiles) + moments.xy_FO.nbytes
    kept += moments.mean_x_F.nbytes
    assert kept == moments_bytes(features, 0) < 0.8 * features**2 * 8


def test_state_is_taken_back_bit_for_bit() -> None:
    x_NF, y_NO = observations()
    one, other = Moments(6, 4), Moments(6, 4)
    one.update(x_NF[:100], y_NO[:100])
    other.load({name: tensor.clone() for name, tensor in one.tensors().items()})
    for moments in (one, other):
        moments.update(x_NF[100:], y_NO[100:])
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
