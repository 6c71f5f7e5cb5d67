"""The search for causes: planted sets are found, nothing is left in that can be left out, and questions are few."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_patches.bench.deltas import Answer, Findings, Order, Subset, answer_all, search

FREE: list[Collection[int]] = [[]] * 8


def bound(changes: int, taking_part: int) -> int:
    """The number of questions that the module's docstring promises."""
    return taking_part * ((changes - 1).bit_length() + 3) - 1


def planted(*causes: Collection[int]) -> Callable[[Subset], Answer]:
    """Bad exactly where a whole cause is there."""
    return lambda subset: Answer.BAD if any(subset.issuperset(cause) for cause in causes) else Answer.GOOD


def found(findings: Findings) -> list[set[int]]:
    return [set(cause.changes) for cause in findings.causes]


@st.composite
def plants(draw: st.DrawFn) -> tuple[int, set[int]]:
    """A number of changes, and the one, two or three of them that hurt (together)."""
    count = draw(st.integers(3, 14))
    return count, draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))


def test_worked_example() -> None:
    """The example in the module's docstring, question by question."""
    asked = []

    def test(subset: Subset) -> Answer:
        asked.append(set(subset))
        return planted({2, 5})(subset)

    findings = answer_all(Order(FREE), test)
    every = set(range(8))
    assert asked == [
        {0, 1, 2, 3},
        {0, 1, 2, 3, 4, 5},
        {0, 1, 2, 3, 4},
        {5},
        {5, 0, 1},
        {5, 0, 1, 2},
        {2, 5},
        {2},
        every - {2},
        every - {5},
    ]
    (cause,) = findings.causes
    assert cause.changes == {2, 5}
    assert cause.minimal
    assert set(cause.needed.values()) == {Answer.GOOD}
    assert findings.rest == (frozenset(every - {2, 5}), Answer.GOOD)
    assert findings.healed is None


@given(plants())
def test_planted_set_is_found_with_few_questions(plant: tuple[int, set[int]]) -> None:
    count, cause = plant
    assume(len(cause) < count)
    findings = answer_all(Order([[]] * count), planted(cause))
    assert found(findings) == [cause]
    assert findings.causes[0].minimal
    assert set(findings.causes[0].needed.values()) == {Answer.GOOD}
    assert len(findings.answers) <= bound(count, len(cause))


@given(plants())
def test_questions_left_are_not_exceeded(plant: tuple[int, set[int]]) -> None:
    """From where the search is for the last change of the set, no more questions come than it said."""
    count, cause = plant
    assume(len(cause) < count)
    asking = search(Order([[]] * count))
    told: list[int | None] = []  # where the promise holds
    question = next(asking)
    try:
        while True:
            answer = planted(cause)(question.subset)
            if question.reason.startswith("which"):
                # The list is halved from its end: what takes part and is behind these is known by now.
                holds = sum(index <= max(question.about) for index in cause) == 1
            else:
                holds = answer is Answer.BAD or "left out" in question.reason or "all but" in question.reason
            told.append(question.at_most if holds else None)
            question = asking.send(answer)
    except StopIteration:
        pass
    assert told[-1] is not None
    for at, at_most in enumerate(told):
        assert at_most is None or len(told) - at <= at_most


@given(st.integers(4, 14), st.data())
def test_causes_that_share_nothing_are_all_found(count: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(count)))
    one, other = set(order[:1]), set(order[1:3])
    findings = answer_all(Order([[]] * count), planted(one, other))
    assert sorted(found(findings), key=len) == [one, other]
    assert all(cause.minimal and set(cause.needed.values()) <= {Answer.GOOD} for cause in findings.causes)
    assert findings.rest[1] is Answer.GOOD


def test_causes_that_share_a_change_are_told() -> None:
    """{1, 3} and {1, 5}: one is found; that all but 3 is bad says that 3 is not the only partner."""
    findings = answer_all(Order(FREE), planted({1, 3}, {1, 5}))
    (cause,) = findings.causes
    assert cause.changes == {1, 3}
    assert cause.needed == {1: Answer.GOOD, 3: Answer.BAD}


@given(st.integers(2, 7), st.data())
def test_any_table_of_answers_gives_a_minimal_bad_set(count: int, data: st.DataObject) -> None:
    """Whatever is good or bad (healing included): each cause is bad, and good without any one of its changes."""
    bad = data.draw(st.sets(st.frozensets(st.integers(0, count - 1), min_size=1, max_size=count - 1), max_size=40))

    def test(subset: Subset) -> Answer:
        return Answer.BAD if subset in bad or len(subset) == count else Answer.GOOD

    findings = answer_all(Order([[]] * count), test)
    assert findings.causes
    for cause in findings.causes:
        assert test(cause.changes) is Answer.BAD
        assert cause.minimal
        assert all(test(cause.changes - {index}) is Answer.GOOD for index in cause.changes)
    assert len(findings.answers) < 2**count
    if findings.healed:
        small, large = findings.healed
        assert small < large
        assert (test(small), test(large)) == (Answer.BAD, Answer.GOOD)


def test_healing_is_told() -> None:
    """0 hurts unless 2 is there; 7 undoes what 2 does. {0} is found, and a good set that contains it was seen."""

    def test(subset: Subset) -> Answer:
        return Answer.BAD if 0 in subset and (2 not in subset or 7 in subset) else Answer.GOOD

    findings = answer_all(Order(FREE), test)
    assert found(findings) == [{0}]
    assert findings.healed == ({0}, {0, 1, 2, 3})


@st.composite
def needy(draw: st.DrawFn) -> list[set[int]]:
    """What each change needs; circles included."""
    count = draw(st.integers(3, 9))
    return [draw(st.sets(st.integers(0, count - 1), max_size=2)) - {index} for index in range(count)]


@given(needy(), st.data())
def test_only_closed_sets_are_asked_about(needs: list[set[int]], data: st.DataObject) -> None:
    order = Order(needs)
    cause = data.draw(st.sets(st.integers(0, len(needs) - 1), min_size=1, max_size=3))
    whole = order.closed(cause)

    def test(subset: Subset) -> Answer:
        assert all(subset.issuperset(needs[index]) for index in subset)
        assert 0 < len(subset) < len(needs)
        return planted(cause)(subset)

    findings = answer_all(order, test)
    assert len(findings.causes) == 1
    assert findings.causes[0].everything == whole
    assert order.closed(findings.causes[0].changes) == whole
    assert findings.causes[0].minimal


def test_needed_change_is_told_from_the_one_that_needs_it() -> None:
    """3 needs 1. Where 1 hurts, 1 is named; where 3 does, 3 is named, and 1 as what it brings along."""
    needs: list[Collection[int]] = [[], [], [], [1], []]
    (cause,) = answer_all(Order(needs), planted({1})).causes
    assert (cause.changes, cause.riders) == ({1}, frozenset())
    (cause,) = answer_all(Order(needs), planted({3})).causes
    assert (cause.changes, cause.riders) == ({3}, {1})
    assert cause.without == {3: Answer.GOOD}  # asked: 1 alone


@given(plants(), st.data())
def test_sets_that_cannot_be_served_are_walked_around(plant: tuple[int, set[int]], data: st.DataObject) -> None:
    """A few sets give no answer: what is found is still bad and holds the plant."""
    count, cause = plant
    silent = data.draw(st.sets(st.frozensets(st.integers(0, count - 1), min_size=1, max_size=count - 1), max_size=12))
    how = data.draw(st.sampled_from([Answer.UNCLEAR, Answer.IMPOSSIBLE]))

    def test(subset: Subset) -> Answer:
        return how if subset in silent else planted(cause)(subset)

    findings = answer_all(Order([[]] * count), test)
    first = findings.causes[0]
    assert first.changes >= cause
    assert test(first.changes) is Answer.BAD or first.changes == set(range(count))
    # Whatever it holds beyond the plant could not be told apart from it: leaving it out gave no answer.
    assert all(first.without[index] is how for index in first.changes - cause)


def test_block_without_answers_is_kept_together() -> None:
    """2 is served only with 3 and the reverse, which nobody stated."""

    def test(subset: Subset) -> Answer:
        return Answer.IMPOSSIBLE if (2 in subset) != (3 in subset) else planted({2})(subset)

    (cause,) = answer_all(Order(FREE), test).causes
    assert cause.changes == {2, 3}
    assert not cause.minimal
    assert set(cause.without.values()) == {Answer.IMPOSSIBLE}


def test_unclear_points_are_not_tried_without_end() -> None:
    asked: list[Subset] = []

    def test(subset: Subset) -> Answer:
        asked.append(subset)
        return Answer.UNCLEAR

    findings = answer_all(Order([[]] * 14), test)
    assert found(findings) == [set(range(14))]
    assert len(asked) == 3 + 14  # points, and each change left out


@settings(max_examples=30)
@given(plants())
def test_same_answers_same_questions(plant: tuple[int, set[int]]) -> None:
    """On which resuming rests."""
    count, cause = plant
    one, other = (answer_all(Order([[]] * count), planted(cause)) for _ in range(2))
    assert list(one.answers) == list(other.answers)


def test_single_change_is_the_cause() -> None:
    def never(subset: Subset) -> Answer:
        pytest.fail(f"asked about {set(subset)}")

    findings = answer_all(Order([[]]), never)
    assert found(findings) == [{0}]
    assert findings.answers == {}
    assert findings.rest == (frozenset(), Answer.GOOD)
