"""Main effects and interactions of a factorial's turns, with intervals.

The model is linear in the logarithm of a figure, so effects are ratios: a level for each round (which takes what
differs from round to round), a coefficient for each term of the design, and, where there are turns enough and their
order tells it from the terms, a drift with the position in the round: one for every round where there are many, else
one for all. Interactions of three and more are left in the error. Least squares; Student's t with the degrees of
freedom that are left; each turn, being a process of its own, counts once. That turns near each other are alike does no
harm where `design.order` drew their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from sglang_patches.bench.design import Design
from sglang_patches.bench.statistics import Verdict, check_options, detectable_errors, log_figures, verdict
from sglang_patches.errors import PatchError
from sglang_patches.student import Floats, ratio_of, t_quantile

# Degrees of freedom that must be left: a drift fitted narrows the intervals by what it takes out of the residual, and
# widens them by how much less well that is then known. One for all rounds; one for every round, which also takes out
# most of a wave longer than a round.
_FREEDOM_WITH_DRIFT = 4
_FREEDOM_WITH_DRIFTS = 15
# From a coefficient, which is half the step from off to on, to the logarithm of the ratio that is told.
_SCALE = {"main": 2, "interaction": 4}


@dataclass(frozen=True)
class Observation:
    """One turn's figure.

    Attributes:
        round: from 0.
        position: in its round, from 0.
        run: index of the design's row.
        value: of the figure; positive.
    """

    round: int
    position: int
    run: int
    value: float


@dataclass(frozen=True)
class Effect:
    """One term's effect on one figure.

    Attributes:
        name: of the term.
        kind: main: `ratio` is the figure with the factor on over off, averaged over the other factors' settings.
            interaction: `ratio` is both factors' joint effect over the product of what each does alone; 1: none.
        aliases: terms that cannot be told from this one; `ratio` is of all together.
        ratio: geometric mean.
        low, high: of an interval that holds for this effect alone.
        low_adjusted, high_adjusted: wider, so that the intervals of all effects hold together (Bonferroni).
        verdict: by the adjusted interval; FASTER: the factor's being on is better, or the two together are better than
            each alone lets expect.
        smallest_detectable: relative effect that the adjusted interval of such a run finds with a power of 0.8.
    """

    name: str
    kind: Literal["main", "interaction"]
    aliases: tuple[str, ...]
    ratio: float
    low: float
    high: float
    low_adjusted: float
    high_adjusted: float
    verdict: Verdict
    smallest_detectable: float


@dataclass(frozen=True)
class Effects:
    """All effects on one figure.

    Attributes:
        figure: its name.
        residual: relative standard deviation of a turn about the model; 0.02: 2 %.
        freedom: degrees of freedom it is known with.
        drift: relative change from turn to turn within a round, mean over the rounds; None where it was not fitted.
        confidence, margin: as given.
    """

    figure: str
    higher_is_better: bool
    effects: tuple[Effect, ...]
    residual: float
    freedom: int
    drift: float | None
    confidence: float
    margin: float

    def document(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return asdict(self)


def freedom(design: Design, rounds: int) -> int:
    """Degrees of freedom that the terms and the rounds' levels leave; a drift takes one more."""
    return design.runs * rounds - rounds - len(design.terms)


def check_freedom(design: Design, rounds: int) -> None:
    """Raise PatchError if so few turns leave nothing to estimate the error from."""
    if rounds >= 1 and freedom(design, rounds) >= 1:
        return
    enough = 1 + next(more for more in range(rounds, rounds + 100) if more > 0 and freedom(design, more + 1) >= 1)
    raise PatchError(
        f"{design.describe()}: {rounds} round{'' if rounds == 1 else 's'} tell{'s' if rounds == 1 else ''} "
        f"{len(design.terms)} effects and nothing of the noise, so no interval\n"
        f"  expected   at least {enough} rounds\n  remedy     --rounds {enough}"
    )


def fit(
    design: Design,
    observations: Sequence[Observation],
    *,
    figure: str,
    higher_is_better: bool,
    margin: float = 0.01,
    confidence: float = 0.95,
) -> Effects:
    """Estimate all terms' effects.

    Args:
        observations: whole rounds.

    Raises:
        PatchError: a round is not whole, there are too few, or a figure is not positive and finite.
    """
    check_options(margin, confidence)
    rounds = sorted({seen.round for seen in observations})
    for at in rounds:
        runs = sorted(seen.run for seen in observations if seen.round == at)
        if runs != list(range(design.runs)):
            raise PatchError(
                f"{figure}: round {at} has runs {runs}\n  expected   each of the {design.runs} runs once\n"
                f"  remedy     leave out the round, or run the same command again, which measures what is missing"
            )
    check_freedom(design, len(rounds))
    logs = log_figures([seen.value for seen in observations], figure)
    runs_served = [seen.run for seen in observations]
    columns = [np.array([float(seen.round == at) for seen in observations]) for at in rounds]
    columns += [design.column(term.mask)[runs_served] for term in design.terms]
    drifts = _drifts(columns, observations, design.runs, freedom(design, len(rounds)))
    left = freedom(design, len(rounds)) - len(drifts)
    matrix = np.column_stack([*columns, *drifts])
    inverse = np.linalg.inv(matrix.T @ matrix)
    coefficients = inverse @ (matrix.T @ logs)
    residual = float(np.linalg.norm(logs - matrix @ coefficients)) / math.sqrt(left)
    errors = residual * np.sqrt(np.diag(inverse))
    one, all_together = (t_quantile((1 - confidence) / count, left) for count in (1, len(design.terms)))
    found = []
    for at, term in enumerate(design.terms, len(rounds)):
        log, error = _SCALE[term.kind] * float(coefficients[at]), _SCALE[term.kind] * float(errors[at])
        bounds = ratio_of(log - all_together * error), ratio_of(log + all_together * error)
        found.append(
            Effect(
                name=term.name,
                kind=term.kind,
                aliases=term.aliases,
                ratio=ratio_of(log),
                low=ratio_of(log - one * error),
                high=ratio_of(log + one * error),
                low_adjusted=bounds[0],
                high_adjusted=bounds[1],
                verdict=verdict(*bounds, margin, higher_is_better),
                smallest_detectable=ratio_of(detectable_errors(left, confidence, len(design.terms)) * error) - 1,
            )
        )
    return Effects(
        figure=figure,
        higher_is_better=higher_is_better,
        effects=tuple(found),
        residual=residual,
        freedom=left,
        drift=ratio_of(float(np.mean(coefficients[len(columns) :]))) - 1 if drifts else None,
        confidence=confidence,
        margin=margin,
    )


def _drifts(columns: list[Floats], observations: Sequence[Observation], runs: int, left: int) -> list[Floats]:
    """Columns of the position in the round to fit beside `columns`, as many as `left` degrees of freedom allow.

    Turns in another order than `design.order` draws, such as Yates', may leave no telling a drift from the terms.
    """
    if runs < 3:  # of two places, the later one is half of the terms' column
        return []
    place = np.array([seen.position - (runs - 1) / 2 for seen in observations])
    served = np.array([seen.round for seen in observations])
    of_each = [place * (served == at) for at in np.unique(served)]
    for found, needed in ((of_each, _FREEDOM_WITH_DRIFTS), ([place], _FREEDOM_WITH_DRIFT)):
        if left - len(found) < needed:
            continue
        if np.linalg.matrix_rank(np.column_stack([*columns, *found])) == len(columns) + len(found):
            return found
    return []
