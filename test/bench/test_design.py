"""Properties of designs: what they can tell apart, and orders that a machine that wanders cannot fool."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.bench.design import MAX_FACTORS, Design, fraction, full, order
from sglang_patches.errors import PatchError

NAMES = "abcdefghij"


@st.composite
def designs(draw: st.DrawFn, largest: int = 7) -> Design:
    count = draw(st.integers(1, largest))
    powers = [power for power in range(count) if 2 ** (count - power) > count or power == 0]
    return fraction(NAMES[:count], 2 ** draw(st.sampled_from(powers)))


def mask_of(design: Design, name: str) -> int:
    return sum(1 << design.factors.index(factor) for factor in name.split(" x "))


@given(designs())
def test_terms_are_balanced_and_orthogonal_and_aliases_share_their_column(design: Design) -> None:
    columns = np.array([design.column(term.mask) for term in design.terms])
    assert (columns.sum(axis=1) == 0).all()
    assert (columns @ columns.T == design.runs * np.eye(len(columns))).all()
    assert len({tuple(row) for row in design.levels}) == design.runs
    for term in design.terms:
        for other in term.aliases:
            assert (design.column(mask_of(design, other)) == design.column(term.mask)).all()


@given(designs())
def test_every_main_effect_and_pair_is_told_exactly_once(design: Design) -> None:
    told = [name for term in design.terms for name in (term.name, *term.aliases)]
    count = len(design.factors)
    assert len(told) == len(set(told)) == count + count * (count - 1) // 2
    assert [term.name for term in design.terms[:count]] == list(design.factors)


@given(designs())
def test_the_resolution_is_what_the_aliases_say(design: Design) -> None:
    mains = [term for term in design.terms if term.kind == "main"]
    pairs = [term for term in design.terms if term.kind == "interaction"]
    clear = (not any(term.aliases for term in mains), not any(term.aliases for term in pairs))
    words = {3: (False, None), 4: (True, False)}
    expected = words.get(design.resolution or 9, (True, True))
    assert clear[0] == expected[0]
    assert expected[1] is None or clear[1] == expected[1]


@pytest.mark.parametrize(
    ("factors", "of", "resolution"),
    # Box, Hunter and Hunter, table 6.22 of the best regular fractions.
    [(3, 2, 3), (4, 2, 4), (5, 2, 5), (5, 4, 3), (6, 2, 6), (6, 4, 4), (6, 8, 3), (7, 2, 7), (7, 4, 4), (7, 8, 4),
     (7, 16, 3), (8, 4, 5), (8, 8, 4), (8, 16, 4), (9, 16, 4), (9, 32, 3), (10, 8, 5), (10, 64, 3)],
)  # fmt: skip
def test_fractions_have_the_best_resolution_there_is(factors: int, of: int, resolution: int) -> None:
    design = fraction(NAMES[:factors], of)
    assert design.runs == 2**factors // of
    assert design.resolution == resolution


def test_the_half_of_four_factors_is_the_one_of_the_books() -> None:
    design = fraction("abcd", 2)
    assert {term.name: term.aliases for term in design.terms} == {
        "a": (), "b": (), "c": (), "d": (), "a x b": ("c x d",), "a x c": ("b x d",), "a x d": ("b x c",),
    }  # fmt: skip
    assert "resolution IV (I = a x b x c x d)" in design.describe()
    assert "8 runs" in design.describe()


@settings(deadline=None, max_examples=30)
@given(designs(5), st.integers(1, 5), st.integers(0, 9))
def test_every_round_serves_every_run_and_more_rounds_begin_with_the_same(
    design: Design, rounds: int, seed: int
) -> None:
    orders = order(design, rounds, seed)
    assert [sorted(runs) for runs in orders] == [list(range(design.runs))] * rounds
    assert order(design, rounds + 1, seed)[:rounds] == orders


@pytest.mark.parametrize(("factors", "of"), [("ab", 1), ("abc", 1), ("abcd", 2)])
def test_over_the_seeds_no_place_in_time_goes_with_a_term(factors: str, of: int) -> None:
    """What makes the intervals right whatever the machine does: a factor is on in every place as often as it is off."""
    design, seeds = fraction(factors, of), 400
    served = np.array([[run for runs in order(design, 2, seed) for run in runs] for seed in range(seeds)])
    for term in design.terms:
        assert np.abs(design.column(term.mask)[served].sum(axis=0)).max() < 4.5 * np.sqrt(seeds)


def test_no_round_follows_from_the_one_before() -> None:
    design = full("abc")
    for seed in range(20):
        orders = order(design, 4, seed)
        assert all(other not in (one, one[::-1]) for one, other in pairwise(orders))


@pytest.mark.parametrize(("factors", "rounds"), [("ab", 3), ("abc", 2), ("abcd", 4)])
def test_a_slow_wave_of_any_phase_goes_with_no_term_much(factors: str, rounds: int) -> None:
    design, random = full(factors), np.random.default_rng(0)
    place = np.arange(design.runs * rounds)
    waves = []
    for cycles in (0.5, 1.0, 2.0, 3.0):
        angle = 2 * np.pi * cycles * place / len(place)
        wave = np.array([np.cos(angle), np.sin(angle)]).reshape(2, rounds, design.runs)
        wave -= wave.mean(axis=2, keepdims=True)
        waves.append(wave.reshape(2, -1) / np.linalg.norm(wave))

    def caught(orders: list[list[int]]) -> float:
        served = [run for runs in orders for run in runs]
        columns = np.array([design.column(term.mask)[served] for term in design.terms])
        return max(float(((columns @ wave.T) ** 2).sum(axis=1).max()) / len(served) for wave in waves)

    ours = [caught(order(design, rounds, seed)) for seed in range(20)]
    by_chance = [caught([list(random.permutation(design.runs)) for _ in range(rounds)]) for _ in range(20)]
    assert float(np.median(ours)) < 0.7 * float(np.median(by_chance))


@pytest.mark.parametrize(
    ("factors", "of", "message"),
    [
        ("", 1, "0 factors\n  expected   1 to 10"),
        (NAMES + "k", 1, "11 factors"),
        ("aba", 1, "factor a is named twice"),
        ("abc", 3, "a power of 2"),
        ("abc", 0, "a power of 2"),
        ("abcd", 4, r"1/4 of 2\^4: 4 runs cannot tell 4 factors apart\n.*at least 8 runs: --fraction up to 2"),
        ("ab", 8, "cannot tell 2 factors apart"),
    ],
)  # fmt: skip
def test_impossible_designs_are_refused(factors: str, of: int, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        fraction(factors, of)
    assert len(NAMES) == MAX_FACTORS
