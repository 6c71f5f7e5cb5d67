"""Properties of designs: what they can tell apart, and orders that a drift cannot fool."""

from __future__ import annotations

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
def test_a_linear_drift_cancels_over_each_pair_of_rounds(design: Design, rounds: int, seed: int) -> None:
    orders = order(design, rounds, seed)
    assert orders == order(design, rounds, seed)
    assert [sorted(runs) for runs in orders] == [list(range(design.runs))] * rounds
    time = np.arange(design.runs)
    for first, second in zip(orders[::2], orders[1::2], strict=False):
        for term in design.terms:
            column = design.column(term.mask)
            assert column[first] @ time + column[second] @ time == 0


def test_a_disturbance_in_the_middle_of_two_rounds_is_no_main_effect() -> None:
    # As happens where a run is stopped and goes on on another day; with two factors, one of three terms must have it.
    design = full("ab")
    for seed in range(20):
        served = [run for runs in order(design, 2, seed) for run in runs]
        for term in design.terms[:2]:
            assert design.column(term.mask)[served[2:6]].sum() == 0
    assert len({tuple(order(design, 1, seed)[0]) for seed in range(20)}) > 2


def test_within_a_round_time_goes_with_no_main_effect_much_and_seeds_give_other_orders() -> None:
    design, time = full("abcd"), np.arange(16) - 7.5
    first = [order(design, 1, seed)[0] for seed in range(20)]
    assert len({tuple(runs) for runs in first}) == 20
    worst = [
        max(abs(float(design.column(t.mask)[runs] @ time)) for t in design.terms[:4]) / np.sqrt(16 * (time @ time))
        for runs in first
    ]
    random = np.random.default_rng(0)
    by_chance = [
        max(abs(float(design.column(t.mask)[random.permutation(16)] @ time)) for t in design.terms[:4])
        / np.sqrt(16 * (time @ time))
        for _ in range(20)
    ]
    assert float(np.median(worst)) < 0.6 * float(np.median(by_chance))


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
