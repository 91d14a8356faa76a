"""A mapper that rehearsed knows what its map takes, and cuts accordingly."""

from __future__ import annotations

import pytest
from torch import Tensor

from deployments import workshop
from mappers.mapper import IdentityMapper
from tests.deployments.conversion.converters import GEOMETRY, converter


class Clock:
    """Time that passes where somebody works: 10 ms for any chunk, 1 ms per token."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


async def test_the_map_is_known_before_the_first_handoff(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sizes = Clock(), list[int]()
    monkeypatch.setattr(workshop, "time", clock)

    class Working(IdentityMapper):
        def apply(
            self, k_STHD: Tensor, v_STHD: Tensor, start_position: int
        ) -> tuple[Tensor, Tensor]:
            first = k_STHD.shape[1] not in sizes
            sizes.append(k_STHD.shape[1])
            clock.now_s += 0.01 + 0.001 * k_STHD.shape[1] + first
            return super().apply(k_STHD, v_STHD, start_position)

    made = await converter(Working(GEOMETRY))
    await made.rehearse()
    cost = made._shop.costs["map"]
    assert sizes == [32, 32, 64, 64]
    assert cost.terms == pytest.approx((0.01, 0.001))
    assert made.backlog_s == 0
    await made.close()
