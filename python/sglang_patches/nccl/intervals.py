"""Medians, ratios to the baseline of the same rounds, and Student's t intervals for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sglang_patches.student import Floats, Interval, interval

#: One candidate at one size: round -> the microseconds of each replay. Rounds may differ in length, none is empty.
Rounds = Mapping[int, list[float]]


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
