"""Whether a set of changes is bad: one figure of each turn, against the turns of good, with an interval.

Restarting a server for each question is dear, so a set is measured once where that is enough, and all turns are read
together. The model is least squares on logarithms: a level for each set, a drift of the machine that is linear in the
number of turns, and a scatter between turns that is the same for all sets. An interval is Student's t with what is left
of the turns after levels and drift; it is wide while little is known, and for a set measured long after good. Good is
measured again now and then, so that a drift which is not linear shows as scatter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_patches.bench.deltas import Answer, Subset
from sglang_patches.bench.model import HIGHER_IS_BETTER
from sglang_patches.bench.statistics import log_figures
from sglang_patches.errors import PatchError
from sglang_patches.student import Floats, ratio_of, t_quantile

GOOD: Subset = frozenset()


@dataclass(frozen=True)
class Estimate:
    """A set against good.

    Attributes:
        value: geometric mean of the set's figure, as measured.
        ratio: to good's, drift taken out; 1.4 is 40 % more.
        low, high: of the ratio's interval; 0 and infinite while nothing tells how far turns scatter.
        turns: of the set.
    """

    value: float
    ratio: float
    low: float
    high: float
    turns: int

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.value:.4g}, {percent(self.ratio)}"
        return f"{self.value:.4g}, {percent(self.ratio)} ({percent(self.low)} to {percent(self.high)})"

    def document(self) -> dict[str, Any]:
        """All of it, JSON-able: null stands for infinite."""
        return {
            "value": self.value,
            "ratio": self.ratio,
            "low": self.low,
            "high": None if math.isinf(self.high) else self.high,
            "turns": self.turns,
        }


class Evidence:
    """The figures of all turns so far, and what they say."""

    def __init__(self, metric: str, threshold: float, confidence: float = 0.95) -> None:
        """Begin with nothing.

        Args:
            metric: a figure of `HIGHER_IS_BETTER`.
            threshold: a set is bad if the figure is worse than good's by more than this share of it; 0.05 is 5 %.
            confidence: of each interval; an answer is given where the interval is on one side of the threshold.

        Raises:
            PatchError: the metric is unknown, or a number makes no sense.
        """
        if metric not in HIGHER_IS_BETTER:
            raise PatchError(
                f"--metric {metric!r} is not a figure of a turn\n  expected   {', '.join(HIGHER_IS_BETTER)}"
            )
        self.metric = metric
        self.higher_is_better = HIGHER_IS_BETTER[metric]
        if not 0 < threshold < (1 if self.higher_is_better else math.inf):
            wanted = "more than 0% and less than 100%" if self.higher_is_better else "more than 0%"
            raise PatchError(f"--threshold {threshold:.3%}\n  expected   {wanted} of good's {metric}, such as 5%")
        if not 0.5 < confidence < 1:
            raise PatchError(f"--confidence {confidence}\n  expected   between 0.5 and 1, such as 0.95")
        self.threshold = threshold
        self.confidence = confidence
        self._limit = math.log1p(-threshold if self.higher_is_better else threshold)
        self._sets: list[Subset] = []
        self._of: list[int] = []  # of each turn, the place of its set in `_sets`
        self._logs: list[float] = []

    def add(self, subset: Subset, figures: Mapping[str, float], turn: str) -> None:
        """Take a turn's figures.

        Args:
            turn: names it in errors.

        Raises:
            PatchError: the metric is not among them, or not positive and finite.
        """
        if self.metric not in figures:
            raise PatchError(
                f"{turn} has no {self.metric}\n  seen       {', '.join(sorted(figures)) or 'no figures'}\n"
                f"  remedy     another --metric (verify_ms and accept_length need speculation; graph_share needs the "
                f"patch eagle-verify-cuda-graph)"
            )
        log = float(log_figures([figures[self.metric]], f"{self.metric} of {turn}")[0])
        if subset not in self._sets:
            self._sets.append(subset)
        self._of.append(self._sets.index(subset))
        self._logs.append(log)

    def turns(self, subset: Subset) -> int:
        """How often it was measured."""
        return self._of.count(self._sets.index(subset)) if subset in self._sets else 0

    @property
    def scatter(self) -> tuple[float, int]:
        """Standard deviation of the logarithm between turns of one set (NaN if unknown), and its degrees of freedom."""
        rows = _rows(self._of, len(self._sets))
        freedom = len(self._logs) - rows.shape[1]
        if freedom < 1 or np.linalg.matrix_rank(rows) < rows.shape[1]:
            return math.nan, 0
        levels, *_ = np.linalg.lstsq(rows, np.asarray(self._logs), rcond=None)
        left = np.asarray(self._logs) - rows @ levels
        return math.sqrt(float(left @ left) / freedom), freedom

    def estimate(self, subset: Subset) -> Estimate:
        """What is known of a set that was measured at least once; good must have been, too."""
        logs = np.asarray(self._logs)
        mine, good = (np.asarray(self._of) == self._sets.index(one) for one in (subset, GOOD))
        value = float(np.mean(logs[mine]))
        scatter, freedom = self.scatter
        if subset == GOOD or not freedom:
            change, wide = value - float(np.mean(logs[good])), math.inf
        else:
            rows = _rows(self._of, len(self._sets))
            levels, *_ = np.linalg.lstsq(rows, logs, rcond=None)
            change = float(levels[self._sets.index(subset)] - levels[self._sets.index(GOOD)])
            wide = t_quantile(1 - self.confidence, freedom) * scatter * self._spread(subset, [])
        if subset == GOOD:
            wide = 0.0
        low, high = ratio_of(change - wide) if wide < math.inf else 0.0, ratio_of(change + wide)
        return Estimate(math.exp(value), ratio_of(change), low, high, int(mine.sum()))

    def next(self, subset: Subset) -> Subset:
        """Which of good and this set, both measured before, to measure next for the narrower interval."""
        return min((subset, GOOD), key=lambda one: self._spread(subset, [one]))

    def _spread(self, subset: Subset, more: Sequence[Subset]) -> float:
        """Standard error of the set's change, in units of the scatter, after `more` turns; infinite if it has none."""
        rows = _rows([*self._of, *map(self._sets.index, more)], len(self._sets))
        if np.linalg.matrix_rank(rows) < rows.shape[1]:
            return math.inf
        contrast = np.zeros(rows.shape[1])
        contrast[self._sets.index(subset)], contrast[self._sets.index(GOOD)] = 1, -1
        return math.sqrt(float(contrast @ np.linalg.solve(rows.T @ rows, contrast)))

    def answer(self, subset: Subset) -> Answer | None:
        """GOOD or BAD where the interval is on one side of the threshold; None where more turns are needed."""
        if not self.turns(subset) or not self.turns(GOOD):
            return None
        known = self.estimate(subset)
        limit = math.exp(self._limit)
        if self.higher_is_better:
            good, bad = known.low > limit, known.high < limit
        else:
            good, bad = known.high < limit, known.low > limit
        return Answer.GOOD if good else Answer.BAD if bad else None


def _rows(of: Sequence[int], sets: int) -> Floats:
    """Shape (turns, sets + 1): the set of each turn, and when it was, from the middle."""
    rows = np.zeros((len(of), sets + 1))
    rows[np.arange(len(of)), of] = 1
    rows[:, sets] = np.arange(len(of)) - (len(of) - 1) / 2
    return rows


def percent(ratio: float) -> str:
    """A ratio as a signed change: +40 %, -3.1 %."""
    change = 100 * (ratio - 1)
    return f"{change:+.0f} %" if abs(change) >= 10 else f"{change:+.1f} %"
