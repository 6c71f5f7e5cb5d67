"""Quantiles and intervals of Student's t."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sglang_patches.student import Interval, interval, ratio_of, reach, t_quantile


@pytest.mark.parametrize(
    ("tail", "freedom", "value"),
    [(0.05, 1, 12.706205), (0.05, 2, 4.302653), (0.05, 3, 3.182446), (0.05, 4, 2.776445), (0.01, 9, 3.249836)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(tail: float, freedom: int, value: float) -> None:
    assert t_quantile(tail, freedom) == pytest.approx(value, abs=1e-6)


def test_quantiles_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 40):
        for tail in (0.5, 0.05, 0.05 / 20, 1e-4):
            assert t_quantile(tail, freedom) == pytest.approx(stats.t.ppf(1 - tail / 2, freedom), rel=1e-9)


@pytest.mark.parametrize(("tail", "freedom"), [(0.0, 2), (1.0, 2), (0.05, 0)])
def test_there_is_no_quantile_without_a_tail_or_a_degree_of_freedom(tail: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        t_quantile(tail, freedom)


def test_the_interval_of_two_rounds_is_that_of_the_table_and_of_one_is_everything() -> None:
    logs = np.log([1.0, 1.21])
    assert reach(logs) == pytest.approx(12.706205 * math.log(1.21) / 2)
    assert reach(logs, confidence=0.9) == pytest.approx(6.313752 * math.log(1.21) / 2)
    assert interval(logs).value == pytest.approx(1.1)
    assert interval(logs[:1]) == Interval(1.0, 0.0, math.inf)
    assert (ratio_of(-math.inf), ratio_of(math.inf)) == (0.0, math.inf)
    assert math.isfinite(ratio_of(1e9))
