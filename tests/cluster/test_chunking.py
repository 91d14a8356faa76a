"""The size of chunks: what is learnt of the stages, and that the quickest size is taken."""

from __future__ import annotations

import pytest

from cluster.chunking import PACED, Cost, Cutting, Paced, chunk_s_of, makespan_s

CUTTING = Cutting(grid_tokens=32, most_tokens=512)


def known(**terms: tuple[float, float]) -> dict[Paced, Cost]:
    """Costs of (seconds per chunk, seconds per token)."""
    costs = {stage: Cost(terms[stage][0]) for stage in PACED}
    for stage in PACED:
        chunk_s, token_s = terms[stage]
        costs[stage].saw(10, 2_560, 10 * chunk_s + 2_560 * token_s)
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


def test_a_cost_is_so_much_for_any_chunk_and_a_rate() -> None:
    cost = Cost(0.01)
    for size in (64, 512, 128, 256):
        cost.saw(4, 4 * size, 4 * (0.01 + 2e-4 * size))
    assert cost.terms == pytest.approx((0.01, 2e-4))
    assert cost.token_s is not None and cost.token_s > 2e-4
    quick = Cost(0.01)
    quick.saw(4, 400, 4 * 0.003)
    assert quick.terms == pytest.approx((0.003, 0.0))


def test_the_newest_handoffs_count_most() -> None:
    cost = Cost(0.0)
    for _ in range(50):
        cost.saw(1, 100, 1.0)
    for _ in range(20):
        cost.saw(1, 100, 0.1)
    # 0.9 ** 20 of the weight is left to the old ones.
    assert cost.token_s == pytest.approx(0.0021, abs=0.0001)


def test_two_sizes_tell_what_a_chunk_costs_by_itself() -> None:
    assert chunk_s_of((32, 0.018), (512, 0.102)) == pytest.approx(0.0124)
    # Noise: a larger one is not quicker, and no chunk is free.
    assert chunk_s_of((32, 0.018), (512, 0.017)) == 0.018
    assert chunk_s_of((32, 0.0001), (512, 0.1)) == 0.002


MOVING = {"read": (0.003, 48e-5), "map": (0.003, 6e-5), "write": (0.003, 48e-5)}
MAPPING = {"read": (0.003, 2e-5), "map": (0.01, 2e-4), "write": (0.003, 3e-5)}
READING = {"read": (0.002, 20e-5), "map": (0.002, 4e-5), "write": (0.002, 2e-5)}


@pytest.mark.parametrize("size", [32, 64, 128, 256, 512])
@pytest.mark.parametrize("terms", [MOVING, MAPPING, READING])
def test_the_makespan_of_equal_chunks_is_that_of_the_pipeline_with_its_buffers(
    terms: dict[str, tuple[float, float]], size: int
) -> None:
    costs = known(**terms)
    assert makespan_s([size] * (2_048 // size), costs) == pytest.approx(
        played_s(2_048, size, costs)
    )


def test_the_makespan_of_chunks_of_several_sizes() -> None:
    costs = known(read=(0.0, 1.0), map=(0.0, 2.0), write=(0.0, 1.0))
    # Read until 1, 3, 4; mapped until 3, 7, 9; written until 4, 9, 10.
    assert makespan_s([1, 2, 1], costs) == pytest.approx(10)


def test_short_handoffs_get_small_chunks_where_moving_takes_longest() -> None:
    costs = known(**MOVING)
    sizes = [max(CUTTING.cut(tokens, costs)) for tokens in (560, 2_048, 6_080, 32_768)]
    assert sizes == [64, 128, 256, 512]
    assert makespan_s(CUTTING.cut(560, costs), costs) < 0.65 * played_s(560, 512, costs)


def test_a_stage_with_much_to_do_per_chunk_gets_large_ones() -> None:
    costs = known(read=(0.003, 2e-5), map=(0.05, 2e-4), write=(0.003, 3e-5))
    assert CUTTING.cut(2_048, costs) == [512] * 4


def test_chunks_shrink_towards_the_end_where_reading_takes_longest() -> None:
    costs = known(**READING)
    chunks = CUTTING.cut(6_080, costs)
    assert chunks[-3:] == [128, 64, 32] and chunks[0] == max(chunks) >= 256
    tail_s = makespan_s(chunks, costs) - 6_080 * 20e-5 - len(chunks) * 0.002
    assert tail_s < 0.2 * (makespan_s([512] * 11 + [448], costs) - 6_080 * 20e-5 - 12 * 0.002)


def test_chunks_grow_at_the_beginning_where_the_map_takes_longest() -> None:
    costs = known(read=(0.002, 15e-5), map=(0.002, 20e-5), write=(0.002, 2e-5))
    chunks = CUTTING.cut(6_080, costs)
    assert chunks[:2] == [32, 64] and max(chunks) >= 128


def test_the_largest_size_is_taken_until_all_stages_are_known() -> None:
    costs = known(read=(0.002, 2e-3), map=(0.002, 2e-3), write=(0.002, 2e-3))
    assert max(CUTTING.cut(560, costs)) == 32
    costs["write"] = Cost()
    assert CUTTING.cut(560, costs) == [512, 48]


@pytest.mark.parametrize("most", [32, 96, 480, 512])
@pytest.mark.parametrize("terms", [MOVING, MAPPING, READING])
def test_chunks_begin_on_both_engines_blocks_and_fit_the_buffers(
    terms: dict[str, tuple[float, float]], most: int
) -> None:
    cutting, costs = Cutting(grid_tokens=32, most_tokens=most), known(**terms)
    for tokens in (1, 33, 500, 9_999):
        chunks = cutting.cut(tokens, costs)
        assert sum(chunks) == tokens and 0 < min(chunks) <= max(chunks) <= most
        assert all(size % 32 == 0 for size in chunks[:-1])
        size = -(-max(chunks) // 32) * 32
        assert 2 <= cutting.buffers(chunks) <= 2 * most // size
