"""Statistics of `nccl tune` against answers known in advance."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_patches.nccl.intervals import compare, crossover
from sglang_patches.student import Interval


def drawn(
    center: float, rounds: int = 5, replays: int = 40, seed: int = 0, spread: float = 0.02
) -> dict[int, list[float]]:
    random = np.random.default_rng(seed)
    return {index: list(center * random.lognormal(0, spread, replays)) for index in range(rounds)}


def test_without_noise_everything_is_exact() -> None:
    base = {1: dict.fromkeys(range(3), [20.0] * 5), 8: dict.fromkeys(range(3), [40.0] * 5)}
    ours = {1: dict.fromkeys(range(3), [10.0] * 5), 8: dict.fromkeys(range(3), [30.0] * 5)}
    found = compare(ours, base)
    assert found is not None
    for told, value in ((found.median[8], 30), (found.ratio[1], 0.5), (found.ratio[8], 0.75)):
        assert (told.value, told.low, told.high) == pytest.approx((value, value, value))
    assert found.overall.value == pytest.approx((0.5 * 0.75) ** 0.5)
    assert found.overall.low == pytest.approx(found.overall.high)
    assert found.rounds == 3


def test_what_slows_a_whole_round_cancels() -> None:
    slow = {0: 1.0, 1: 3.0, 2: 1.5, 3: 1.0}
    base = {1: {index: [20.0 * factor] * 9 for index, factor in slow.items()}}
    ours = {1: {index: [10.0 * factor] * 9 for index, factor in slow.items()}}
    found = compare(ours, base)
    assert found is not None
    assert (found.ratio[1].low, found.ratio[1].high) == pytest.approx((0.5, 0.5))
    assert found.median[1].high > 1.4 * found.median[1].low


def test_only_rounds_that_both_finished_count() -> None:
    base = {1: {0: [20.0] * 4, 2: [10.0] * 4}, 2: {0: [20.0] * 4, 2: [10.0] * 4}}
    ours = {1: {0: [20.0] * 4, 1: [1.0] * 4, 2: [10.0] * 4}, 2: {0: [20.0] * 4, 1: [1.0] * 4}}
    found = compare(ours, base)
    assert found is not None
    assert found.rounds == 1
    assert found.ratio[1].value == found.ratio[2].value == 1
    assert compare({1: {1: [1.0]}}, base) is None
    assert compare({4: base[1]}, base) is None
    assert compare({}, base) is None


@pytest.mark.parametrize("rounds", [3, 8])
def test_an_interval_covers_the_truth_as_often_as_it_says(rounds: int) -> None:
    random = np.random.default_rng(7)
    covered, trials = 0, 300
    for _ in range(trials):
        # Rounds differ by 3 %, replays by 5 %: as in practice, and unlike replays alone, rounds matter.
        ours, base = (
            {1: {index: list(random.lognormal(0, 0.03) * random.lognormal(0, 0.05, 20)) for index in range(rounds)}}
            for _ in range(2)
        )
        found = compare(ours, base)
        assert found is not None
        covered += found.ratio[1].low <= 1 <= found.ratio[1].high
    assert 0.92 < covered / trials < 0.98


def test_a_real_difference_is_seen_and_a_wider_interval_for_more_comparisons() -> None:
    base, ours = {1: drawn(20, seed=1)}, {1: drawn(18, seed=2)}
    one, many = compare(ours, base), compare(ours, base, comparisons=20)
    assert one is not None
    assert many is not None
    assert one.overall.high < 1
    assert one.overall.value == pytest.approx(0.9, abs=0.02)
    assert many.overall.high - many.overall.low > one.overall.high - one.overall.low
    assert many.ratio == one.ratio


def test_one_round_alone_has_no_interval_and_many_replays_do_not_make_up_for_rounds() -> None:
    alone = compare({1: drawn(10, rounds=1)}, {1: drawn(20, rounds=1)})
    assert alone is not None
    assert alone.ratio[1].value == pytest.approx(0.5, abs=0.02)
    assert (alone.ratio[1].low, alone.overall.high) == (0, float("inf"))
    # Processes that differ by 10 %, each measured exactly: a thousand replays know no more of that than two.
    widths = []
    for replays in (2, 1000):
        ours = {1: {index: [10.0 * factor] * replays for index, factor in enumerate((1.0, 1.1, 0.9))}}
        found = compare(ours, {1: dict.fromkeys(range(3), [10.0] * replays)})
        assert found is not None
        widths.append(found.ratio[1].high - found.ratio[1].low)
    assert widths[0] == pytest.approx(widths[1])
    assert widths[0] > 0.4


def test_the_interval_holds_its_value_and_the_ratio_is_that_of_the_medians_shown() -> None:
    ours, base = {1: {0: [1.0, 9.0, 9.0], 1: [4.0] * 3}}, {1: {0: [2.0] * 3, 1: [3.0] * 3}}
    found, itself = compare(ours, base), compare(base, base)
    assert found is not None
    assert itself is not None
    assert found.median[1].value == pytest.approx(6.0)
    assert found.ratio[1].value == pytest.approx(found.median[1].value / itself.median[1].value)
    assert found.ratio[1].low < found.ratio[1].value < found.ratio[1].high


@pytest.mark.parametrize(
    ("highs", "rows"),
    [({1: 0.5, 2: 0.9, 4: 1.1, 8: 0.9}, 2), ({1: 1.0, 2: 0.5}, 0), ({1: 0.5, 2: 0.5}, 2), ({}, 0)],
)
def test_crossover_is_where_the_first_size_is_not_better(highs: dict[int, float], rows: int) -> None:
    assert crossover({size: Interval(0.5, 0.4, high) for size, high in highs.items()}) == rows
