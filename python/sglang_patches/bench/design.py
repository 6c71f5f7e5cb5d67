"""Which runs of 2^k a factorial measures, in which order, and what its effects cannot be told apart from.

A *run* is one setting of all factors, -1 (off) or +1 (on); a *round* serves every run of the design once. A term (a
main effect or the interaction of two factors) is a bit mask of factors: 0b101 is the first with the third.

Source: Box, Hunter and Hunter, Statistics for Experimenters, chapters 5 and 6 (regular two-level fractions, defining
relation, resolution).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sglang_patches.errors import PatchError
from sglang_patches.student import Floats

MAX_FACTORS = 10
_ORDERS_TRIED = 64
# In cycles a run, of what a machine does as it warms and cools, the first as good as a straight line; and turns below
# which a wave is no slow one.
_WAVES = (0.05, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)
_SHORTEST = 4
# Of a wave, in each degree of freedom: what it cannot fall below in the residual, as turns scatter by themselves too.
_NOISE = 0.02


@dataclass(frozen=True)
class Term:
    """A column of the model.

    Attributes:
        name: `a`, or `a x b`.
        mask: of its factors.
        kind: of the effect.
        aliases: names of the main effects and interactions of two that share this column: only their sum is measured.
    """

    name: str
    mask: int
    kind: Literal["main", "interaction"]
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class Design:
    """A full 2^k design, or a regular fraction of it.

    Attributes:
        factors: names, at most `MAX_FACTORS`.
        levels: shape (runs, factors), -1 or +1, in Yates' order of the first factors; int8.
        generators: masks whose product of levels is +1 in every run; empty for the full design.
    """

    factors: tuple[str, ...]
    levels: NDArray[np.int8]
    generators: tuple[int, ...] = ()

    @property
    def runs(self) -> int:
        return len(self.levels)

    @cached_property
    def relation(self) -> tuple[int, ...]:
        """The defining relation: all products of generators, the empty one left out."""
        return _products(self.generators)

    @property
    def resolution(self) -> int | None:
        """Length of the shortest word of the defining relation; None for the full design, which has no word."""
        return min((word.bit_count() for word in self.relation), default=None)

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """Main effects, then interactions of two; those that share a column are one term, named after the first."""
        singles = [1 << at for at in range(len(self.factors))]
        masks = singles + [one | other for one, other in combinations(singles, 2)]
        found: list[Term] = []
        seen: set[int] = set()
        for mask in masks:
            if mask in seen:
                continue
            shared = {mask ^ word for word in self.relation}
            seen |= shared
            aliases = tuple(self.name(other) for other in masks if other in shared)
            kind: Literal["main", "interaction"] = "main" if mask.bit_count() == 1 else "interaction"
            found.append(Term(self.name(mask), mask, kind, aliases))
        return tuple(found)

    def name(self, mask: int) -> str:
        """Of a term: its factors, joined with `x`."""
        return " x ".join(factor for at, factor in enumerate(self.factors) if mask >> at & 1)

    def column(self, mask: int) -> Floats:
        """Product of the levels of a term's factors, shape (runs,), -1 or +1."""
        inside = [at for at in range(len(self.factors)) if mask >> at & 1]
        return np.prod(self.levels[:, inside], axis=1, dtype=np.float64)

    def describe(self) -> str:
        """The design in one clause, and what it cannot tell apart."""
        power = f"2^{len(self.factors)}"
        if not self.generators:
            return f"full {power} design, {self.runs} runs"
        words = ", ".join(f"I = {self.name(word)}" for word in self.generators)
        roman = {3: "III", 4: "IV", 5: "V", 6: "VI", 7: "VII", 8: "VIII", 9: "IX", 10: "X"}[self.resolution or 0]
        meaning = {
            3: "main effects are mixed with interactions of two",
            4: "main effects are clear of interactions of two, which are mixed with each other",
        }.get(self.resolution or 0, "main effects and interactions of two are clear of each other")
        of = 2 ** len(self.generators)
        return f"1/{of} of {power}, {self.runs} runs, resolution {roman} ({words}): {meaning}"


def full(factors: Sequence[str]) -> Design:
    """All settings of the factors.

    Raises:
        PatchError: no factor, too many, or one named twice.
    """
    return fraction(factors, 1)


def fraction(factors: Sequence[str], of: int) -> Design:
    """The 1/`of` fraction with the highest resolution, and among those with the fewest shortest words.

    Args:
        factors: names.
        of: 1 (all runs), 2, 4, 8, ...

    Raises:
        PatchError: as `full`, `of` is no power of 2, or so few runs would mix main effects with each other.
    """
    _check_factors(factors)
    count, power = len(factors), of.bit_length() - 1
    if of < 1 or of != 1 << power:
        raise PatchError(
            f"a fraction of 1/{of}\n  expected   1/2, 1/4, 1/8, ...: a power of 2\n"
            f"  remedy     --fraction 2 measures half of the runs"
        )
    base = count - power
    # Each further factor is set as the product of two or more of the first ones; longer products alias less.
    products = [mask for mask in range(1, 1 << max(base, 0)) if mask.bit_count() > 1]
    if len(products) < power:
        least = next(size for size in range(1, count + 1) if 2**size - 1 >= count)
        raise PatchError(
            f"1/{of} of 2^{count}: {2.0**base:g} runs cannot tell {count} factors apart\n"
            f"  expected   at least {2**least} runs: --fraction up to {2 ** (count - least)}\n"
            f"  remedy     a smaller --fraction, or fewer factors"
        )
    best: tuple[int, ...] = ()
    best_lengths: list[int] | None = None
    for chosen in combinations(sorted(products, key=lambda mask: -mask.bit_count()), power):
        generators = tuple(mask | 1 << (base + at) for at, mask in enumerate(chosen))
        lengths = sorted(word.bit_count() for word in _products(generators))
        # Lists compare as wanted: a longer shortest word first, then fewer of them.
        if best_lengths is None or lengths > best_lengths:
            best, best_lengths = generators, lengths
    grid = [[1 if run >> at & 1 else -1 for at in range(base)] for run in range(1 << base)]
    levels = np.array(grid, dtype=np.int8).reshape(1 << base, base)
    for mask in best:
        inside = [at for at in range(base) if mask >> at & 1]
        levels = np.column_stack([levels, np.prod(levels[:, inside], axis=1, dtype=np.int8)])
    return Design(tuple(factors), levels, best)


def order(design: Design, rounds: int, seed: int) -> list[list[int]]:
    """The runs of each round, in the order in which they are served.

    Every round's order is drawn anew. Then a machine that wanders scatters the effects no more, over the orders that
    could have been drawn, than the residual of the fit tells, whatever it is that wanders (Fisher: it is the drawing
    that makes the test valid); a round that repeats or mirrors the one before doubles what it caught instead. Of
    several orders drawn the one is taken that, with the rounds before it, lets the terms catch least of slow waves, as
    against the residual: then an effect is not feigned under the one order that a seed stands for, either.

    Returns:
        One list of run indices a round; those of fewer rounds are the first of those of more.
    """
    random = np.random.default_rng(seed)
    columns = np.array([design.column(term.mask) for term in design.terms])
    orders: list[NDArray[np.int64]] = []
    for _ in range(rounds):
        waves = _slow_waves(design.runs, len(orders) + 1)
        caught = np.zeros((len(columns), waves.shape[2]))
        for runs, wave in zip(orders, waves, strict=False):
            caught += columns[:, runs] @ wave
        drawn = np.array([random.permutation(design.runs) for _ in range(_ORDERS_TRIED)])
        # Shape (orders, terms, waves): the share of a wave that a term catches, over the phases that it may have.
        both = (caught + np.moveaxis(columns[:, drawn], 0, 1) @ waves[-1]) ** 2 / (design.runs * len(waves))
        shares = both[..., ::2] + both[..., 1::2]
        left = (design.runs - 1) * len(waves) - len(columns)
        if left > 0:
            shares /= (1 - shares.sum(axis=1, keepdims=True)).clip(0) / left + _NOISE
        worst = shares.max(axis=(1, 2))
        # Rounded, so that orders equally good by symmetry are told apart by the drawing and not by a last bit.
        orders.append(drawn[np.argmin(np.round(worst, 9))])
    return [runs.tolist() for runs in orders]


def _slow_waves(runs: int, rounds: int) -> Floats:
    """Cosine and sine, by turns, of waves from a mere drift down to a quarter of the run, about each round's mean.

    Returns:
        Shape (rounds, runs, waves); cosine and sine of a period have a sum of squares of 1 together.
    """
    turns = runs * rounds
    time = np.arange(turns)
    found = []
    for cycles in _WAVES:
        if turns / cycles < _SHORTEST:
            continue
        angle = 2 * np.pi * cycles / turns * time
        wave = np.stack([np.cos(angle), np.sin(angle)], axis=1).reshape(rounds, runs, 2)
        wave -= wave.mean(axis=1, keepdims=True)
        found.append(wave / np.linalg.norm(wave))
    return np.concatenate(found, axis=2)


def _products(generators: Sequence[int]) -> tuple[int, ...]:
    found = [0]
    for generator in generators:
        found += [word ^ generator for word in found]
    return tuple(found[1:])


def _check_factors(factors: Sequence[str]) -> None:
    if not 1 <= len(factors) <= MAX_FACTORS:
        raise PatchError(
            f"{len(factors)} factors\n  expected   1 to {MAX_FACTORS}\n"
            f"  remedy     name those that may matter: --factors a,b,c"
        )
    twice = sorted({factor for factor in factors if list(factors).count(factor) > 1})
    if twice:
        raise PatchError(f"factor {', '.join(twice)} is named twice\n  remedy     name each factor once")
