"""Medians, ratios to the baseline of the same rounds, and Student's t intervals for both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: One candidate at one size: round -> the microseconds of each replay. Rounds may differ in length, none is empty.
Rounds = Mapping[int, list[float]]
Floats = NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval; from 0 to infinity where one round alone cannot tell."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """A candidate against the baseline, over the rounds that both finished.

    Attributes:
        median: rows -> microseconds, geometric mean of the rounds' medians.
        ratio: rows -> candidate's median over the baseline's; below 1 is faster.
        overall: geometric mean of the ratios over all sizes.
        rounds: how many rounds both finished.
    """

    median: dict[int, Interval]
    ratio: dict[int, Interval]
    overall: Interval
    rounds: int


def t_quantile(tail: float, freedom: int) -> float:
    """What Student's t with `freedom` degrees exceeds in absolute value with probability `tail`.

    The series of Abramowitz and Stegun, 26.7.3 and 26.7.4, in the angle whose tangent is t / sqrt(freedom).

    Raises:
        ValueError: `tail` is not between 0 and 1, or there is no degree of freedom.
    """
    if not 0 < tail < 1 or freedom < 1:
        raise ValueError(f"tail {tail} and {freedom} degrees of freedom; expected 0 < tail < 1 and at least 1")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 1 - tail else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """The probability that the absolute value of t is below sqrt(freedom) * tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):  # of the cosine
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def interval(logs: Floats, comparisons: int = 1) -> Interval:
    """Of the geometric mean, from one logarithm a round; rounds are independent, replays of one process are not.

    A few rounds drawn again and again can spread no further than they do themselves; t widens for how few they are.

    Args:
        logs: shape (rounds,).
        comparisons: so many intervals hold together at `CONFIDENCE` (Bonferroni).
    """
    count, mean = len(logs), float(np.mean(logs))
    if count < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    reach = t_quantile((1 - CONFIDENCE) / comparisons, count - 1) * float(np.std(logs, ddof=1)) / math.sqrt(count)
    # Above e^700 a float ends; so wide an interval tells nothing either way.
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(min(mean + reach, 700.0)))


def _log_medians(samples: Rounds, rounds: list[int]) -> Floats:
    return np.log([np.median(samples[index]) for index in rounds])


def compare(
    candidate: Mapping[int, Rounds], baseline: Mapping[int, Rounds], *, comparisons: int = 1
) -> Comparison | None:
    """Compare a candidate with the baseline at the sizes both have, over the rounds both finished at all of them.

    Within a round the ratio is taken first, so that what slows a whole round cancels.

    Args:
        candidate: rows -> rounds; `baseline` likewise.
        comparisons: how many candidates are compared: `overall` is widened for it, `median` and `ratio` are not.

    Returns:
        None if they share no size or no round.
    """
    sizes = sorted(set(candidate) & set(baseline))
    shared = [set(table[rows]) for table in (candidate, baseline) for rows in sizes]
    rounds = sorted(set.intersection(*shared)) if shared else []
    if not rounds:
        return None
    ours = {rows: _log_medians(candidate[rows], rounds) for rows in sizes}
    ratios = {rows: ours[rows] - _log_medians(baseline[rows], rounds) for rows in sizes}
    return Comparison(
        median={rows: interval(logs) for rows, logs in ours.items()},
        ratio={rows: interval(logs) for rows, logs in ratios.items()},
        overall=interval(np.mean(list(ratios.values()), axis=0), comparisons),
        rounds=len(rounds),
    )


def crossover(ratio: Mapping[int, Interval]) -> int:
    """The largest number of rows up to which, at every measured size, the ratio's interval is below 1; 0 if none is."""
    best = 0
    for rows in sorted(ratio):
        if ratio[rows].high >= 1:
            break
        best = rows
    return best
