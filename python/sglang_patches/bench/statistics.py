"""Whether B differs from A: an interval on their ratio over paired rounds, and a verdict that says no more than it.

The interval is the union of two. Resampling whole rounds (BCa bootstrap: Efron 1987, `scipy.stats.bootstrap`) follows a
lopsided spread, but a few rounds drawn again and again can spread no further than they do themselves: with 4 rounds,
bounds that say 95 % hold 85 to 90 times in 100. Student's t on the logarithms widens for how few rounds there are, and
is cautious under heavy tails, because a difference of two like turns is symmetric. Neither can know of an error that
all rounds share; rounds must alternate their order (ABBA) for a drift to cancel.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy import optimize, stats

from sglang_patches.errors import PatchError
from sglang_patches.student import Floats, ratio_of, reach, t_quantile

Verdict = Literal["FASTER", "SLOWER", "SAME", "AMBIGUOUS"]

#: The power at which `smallest_detectable` is told.
POWER = 0.8
_RESAMPLES = 2000


@dataclass(frozen=True)
class Comparison:
    """B against A in one figure.

    Attributes:
        verdict: FASTER and SLOWER are B's; SAME: the whole interval is within the margin; AMBIGUOUS: neither is shown.
        ratio: geometric mean over the rounds of B / A.
        low: of the ratio's interval; 0 where fewer than 2 rounds cannot tell.
        high: of the ratio's interval; infinite where fewer than 2 rounds cannot tell.
        smallest_detectable: relative difference (0.03: 3 %) that rounds as many and as scattered as these would set
            apart from none with power `POWER`; infinite for fewer than 2 rounds.
        rounds: pairs compared.
        higher_is_better: of the figure.
        margin: relative difference up to which two arms count as the same.
        confidence: of all `comparisons` intervals together.
        comparisons: how many were made of the same rounds; each interval is widened for it (Bonferroni).
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    smallest_detectable: float
    rounds: int
    higher_is_better: bool
    margin: float
    confidence: float
    comparisons: int

    def document(self) -> dict[str, Any]:
        """All of it, JSON-able: null stands for infinite."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    higher_is_better: bool,
    margin: float = 0.01,
    confidence: float = 0.95,
    comparisons: int = 1,
    seed: int = 0,
    figure: str = "the figure",
) -> Comparison:
    """Compare B with A over paired rounds.

    Args:
        a: one figure of A's turn of each round, in order of rounds; positive.
        b: likewise of B, from the same rounds.
        seed: of the bootstrap; the same figures and seed give the same interval.
        figure: its name, for errors.

    Raises:
        PatchError: a figure is not positive and finite, the arms have different numbers of rounds, or an option is out
            of its range.
    """
    check_options(margin, confidence, comparisons)
    if len(a) != len(b):
        raise PatchError(
            f"{figure}: {len(a)} rounds of A and {len(b)} of B\n  expected   one turn of each arm in every round\n"
            f"  remedy     leave out the rounds that are not complete"
        )
    logs = log_figures(b, f"{figure} of B") - log_figures(a, f"{figure} of A")
    if len(logs) == 0:
        raise PatchError(f"{figure}: no round to compare\n  remedy     run at least 2; 4 tell something")
    low, high = _bounds(logs, confidence, comparisons, seed)
    return Comparison(
        verdict=verdict(low, high, margin, higher_is_better),
        ratio=ratio_of(float(np.mean(logs))),
        low=low,
        high=high,
        smallest_detectable=smallest_detectable(logs, confidence, comparisons),
        rounds=len(logs),
        higher_is_better=higher_is_better,
        margin=margin,
        confidence=confidence,
        comparisons=comparisons,
    )


def log_figures(values: Sequence[float], name: str) -> Floats:
    """Natural logarithms, shape (rounds,), of figures that must be positive and finite.

    Raises:
        PatchError: one is not.
    """
    for at, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise PatchError(
                f"{name} is {value} in round {at}\n  expected   a positive, finite number: ratios are compared\n"
                f"  remedy     leave this figure out, or see in the turn's log why nothing was measured"
            )
    return np.log(np.asarray(values, dtype=np.float64))


def smallest_detectable(logs: Floats, confidence: float = 0.95, comparisons: int = 1) -> float:
    """The relative difference that a t interval from rounds like these leaves 1 out for, with power `POWER`.

    A noncentral t (Student's t of normal rounds around a true difference), solved for the difference.

    Args:
        logs: log ratios, shape (rounds,).

    Returns:
        0.03 for 3 %; infinite for fewer than 2 rounds.
    """
    count = len(logs)
    if count < 2:
        return math.inf
    error = float(np.std(logs, ddof=1)) / math.sqrt(count)
    return ratio_of(detectable_errors(count - 1, confidence, comparisons) * error) - 1


@cache
def detectable_errors(freedom: int, confidence: float, comparisons: int) -> float:
    """A true effect, in standard errors of its estimate, that a t interval finds with power `POWER`.

    Args:
        freedom: degrees of freedom that the standard error is known with.
    """
    wanted = t_quantile((1 - confidence) / comparisons, freedom)
    # The spread a run sees, over the true one: the middles of 2,000 equally likely slices of its distribution.
    seen = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, freedom) / freedom)

    def power(shift: float) -> float:
        return float(np.mean(stats.norm.cdf(shift - wanted * seen) + stats.norm.cdf(-shift - wanted * seen)))

    return float(optimize.brentq(lambda at: power(at) - POWER, 0.0, 4 * wanted + 4))


def _bounds(logs: Floats, confidence: float, comparisons: int, seed: int) -> tuple[float, float]:
    mean, wide = float(np.mean(logs)), reach(logs, confidence, comparisons)
    low, high = mean - wide, mean + wide
    if len(logs) > 1 and np.ptp(logs) > 0:
        with warnings.catch_warnings():  # rounds that hardly differ: SciPy warns of a degenerate distribution
            warnings.simplefilter("ignore")
            drawn = stats.bootstrap(
                (logs,),
                np.mean,
                n_resamples=_RESAMPLES,
                confidence_level=1 - (1 - confidence) / comparisons,
                method="BCa",
                rng=np.random.default_rng(seed),
            ).confidence_interval
        # fmin and fmax: NaN, where all resamples agree, leaves Student's bounds.
        low, high = float(np.fmin(low, drawn.low)), float(np.fmax(high, drawn.high))
    return ratio_of(low), ratio_of(high)


def verdict(low: float, high: float, margin: float, higher_is_better: bool) -> Verdict:
    """What an interval of a ratio says: no more than it, and SAME rather than a difference within the margin."""
    if 1 - margin <= low and high <= 1 + margin:
        return "SAME"
    if low <= 1 <= high:
        return "AMBIGUOUS"
    return "FASTER" if (low > 1) == higher_is_better else "SLOWER"


def check_options(margin: float, confidence: float, comparisons: int = 1) -> None:
    """Raise PatchError where one is out of its range."""
    for name, value, fits, wanted in (
        ("margin", margin, 0 <= margin < 1, "at least 0 and below 1 (0.01: 1 %)"),
        ("confidence", confidence, 0 < confidence < 1, "between 0 and 1 (0.95: 95 %)"),
        ("comparisons", comparisons, comparisons >= 1, "at least 1"),
    ):
        if not fits:
            raise PatchError(f"{name} is {value}\n  expected   {wanted}\n  remedy     correct --{name}")
