"""Student's t: its quantiles, and the interval of a geometric mean over a few independent rounds.

Needs NumPy alone: `nccl` works where neither upstream nor SciPy is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval; from 0 to infinity where one round alone cannot tell."""

    value: float
    low: float
    high: float


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


def ratio_of(log: float) -> float:
    """The ratio that a logarithm stands for; above e^700, where a float ends, an interval tells nothing either way."""
    return math.inf if log == math.inf else math.exp(min(log, 700.0))


def reach(logs: Floats, confidence: float = CONFIDENCE, comparisons: int = 1) -> float:
    """Half the width of the interval of the mean of `logs`, shape (rounds,); infinite for fewer than 2."""
    count = len(logs)
    if count < 2:
        return math.inf
    return t_quantile((1 - confidence) / comparisons, count - 1) * float(np.std(logs, ddof=1)) / math.sqrt(count)


def interval(logs: Floats, comparisons: int = 1) -> Interval:
    """Of the geometric mean, from one logarithm a round; rounds are independent, replays of one process are not.

    A few rounds drawn again and again can spread no further than they do themselves; t widens for how few they are.

    Args:
        logs: shape (rounds,).
        comparisons: so many intervals hold together at `CONFIDENCE` (Bonferroni).
    """
    mean, wide = float(np.mean(logs)), reach(logs, comparisons=comparisons)
    return Interval(ratio_of(mean), ratio_of(mean - wide), ratio_of(mean + wide))
