"""The size of chunks: what is learnt of the stages, and that the quickest size is taken."""

from __future__ import annotations

import pytest

from cluster.chunking import PACED, Cost, Cutting, Paced, makespan_s

CUTTING = Cutting(grid_tokens=32, most_tokens=512)


def known(**terms: tuple[float, float]) -> dict[Paced, Cost]:
    """Costs that were seen with chunks of three sizes and fit `terms` exactly."""
    costs = {stage: Cost(rate_only=False) for stage in PACED}
    for stage in PACED:
        chunk_s, token_s = terms[stage]
        for size in (64, 256, 512):
            costs[stage].saw(10, 10 * size, 10 * (chunk_s + token_s * size))
    return costs


def played_s(tokens: int, size: int, costs: dict[Paced, Cost], buffers: int = 2) -> float:
    """The pipeline chunk by chunk, with so many buffers between its stages."""
    full, rest = divmod(tokens, size)
    chunks = [size] * full + [rest] * bool(rest)
    ends: list[dict[Paced, float]] = []
    for number, chunk in enumerate(chunks):
        now: dict[Paced, float] = {}
        for at, stage in enumerate(PACED):
            waits = [0.0]
            if at:
                waits.append(now[PACED[at - 1]])
            if number:
                waits.append(ends[-1][stage])
            if at < 2 and number >= buffers:
                waits.append(ends[number - buffers][PACED[at + 1]])
            chunk_s, token_s = costs[stage].terms or (0.0, 0.0)
            now[stage] = max(waits) + chunk_s + token_s * chunk
        ends.append(now)
    return ends[-1]["write"]


def test_a_cost_is_a_line_through_what_was_seen() -> None:
    cost = Cost(rate_only=False)
    for size in (64, 512, 128, 256):
        cost.saw(4, 4 * size, 4 * (0.01 + 2e-4 * size))
    assert cost.terms == pytest.approx((0.01, 2e-4))


def test_one_size_alone_tells_the_rate_but_not_what_a_chunk_costs() -> None:
    cost = Cost(rate_only=False)
    for _ in range(3):
        cost.saw(2, 200, 0.2)
    assert cost.terms == pytest.approx((0.002, 0.098 / 100))


def test_a_cost_of_transfers_has_a_rate_alone() -> None:
    cost = Cost(rate_only=True)
    for size in (64, 512, 128, 256):
        cost.saw(4, 4 * size, 4 * (0.002 + 2e-4 * size))
    assert cost.terms == pytest.approx((0.002, 2e-4))
    for size, seconds in ((64, 0.2), (512, 0.3)):
        cost.saw(1, size, seconds)
    assert cost.terms is not None and cost.terms[0] == 0.002
    assert cost.token_s is not None and cost.token_s > 2e-4


def test_the_newest_handoffs_count_most() -> None:
    cost = Cost(rate_only=False)
    for _ in range(50):
        cost.saw(1, 100, 1.0)
    for _ in range(20):
        cost.saw(1, 100, 0.1)
    assert cost.terms is not None
    # 0.9 ** 20 of the weight is left to the old ones.
    assert sum((cost.terms[0], 100 * cost.terms[1])) == pytest.approx(0.21, abs=0.01)


def test_terms_stay_within_what_is_possible() -> None:
    falling, steep = Cost(rate_only=False), Cost(rate_only=False)
    for size, seconds in ((100, 0.5), (400, 0.1)):
        falling.saw(1, size, seconds)
    for size, seconds in ((100, 0.01), (400, 0.9)):
        steep.saw(1, size, seconds)
    assert falling.terms is not None and falling.terms[1] == 0
    assert steep.terms is not None and steep.terms[0] == 0.002


@pytest.mark.parametrize("size", [32, 64, 128, 256, 512])
@pytest.mark.parametrize(
    "terms",
    [
        {"read": (0.003, 48e-5), "map": (0.003, 6e-5), "write": (0.003, 48e-5)},
        {"read": (0.003, 2e-5), "map": (0.01, 2e-4), "write": (0.003, 3e-5)},
    ],
)
def test_the_makespan_is_that_of_the_pipeline_played_through(
    terms: dict[str, tuple[float, float]], size: int
) -> None:
    costs = known(**terms)
    assert makespan_s(2_048, size, costs) == pytest.approx(played_s(2_048, size, costs))


def test_short_handoffs_get_small_chunks_where_moving_takes_longest() -> None:
    costs = known(read=(0.003, 48e-5), map=(0.003, 6e-5), write=(0.003, 48e-5))
    sizes = [CUTTING.chunk_tokens(tokens, costs) for tokens in (560, 2_048, 6_080, 32_768)]
    assert sizes == [64, 128, 256, 512]
    assert makespan_s(560, 64, costs) < 0.65 * makespan_s(560, 512, costs)


def test_a_stage_with_much_to_do_per_chunk_gets_large_ones() -> None:
    costs = known(read=(0.003, 2e-5), map=(0.05, 2e-4), write=(0.003, 3e-5))
    assert CUTTING.chunk_tokens(2_048, costs) == 512


def test_the_largest_size_is_taken_until_all_stages_are_known() -> None:
    costs = known(read=(0.002, 2e-3), map=(0.002, 2e-3), write=(0.002, 2e-3))
    assert CUTTING.chunk_tokens(560, costs) == 32
    costs["write"] = Cost(rate_only=False)
    assert CUTTING.chunk_tokens(560, costs) == 512


@pytest.mark.parametrize("most", [32, 96, 480, 512])
def test_sizes_are_multiples_of_both_engines_blocks(most: int) -> None:
    cutting = Cutting(grid_tokens=32, most_tokens=most)
    costs = known(read=(0.002, 3e-4), map=(0.0, 1e-5), write=(0.0, 3e-4))
    for tokens in (33, 500, 9_999):
        size = cutting.chunk_tokens(tokens, costs)
        assert size % 32 == 0 and 32 <= size <= most
        assert cutting.buffers(size) * size <= 2 * most
