"""Which of the changes between a good and a bad way to serve make it bad: delta debugging with few questions.

A set of changes is asked about by serving *good* with them. `search` finds a set that is bad by itself and from which
nothing can be left out, then others that share nothing with it. It halves an ordered list instead of splitting sets in
two as `ddmin` does (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2), 2002):
the shortest bad beginning of the list ends with a change that takes part; what follows it is dropped, and, with that
change kept, the list before it is halved again, until the kept changes are bad by themselves (the scheme of Junker,
"QuickXplain", AAAI 2004, with the position of each change found by bisection).

**How many questions.** For one set of k among n changes, all answers good or bad, and more changes never better:

    k (ceil(log2 n) + 3) - 1       6 for one of 12 changes, 13 for two of 12; ddmin's worst case is n^2 + 3n

that is, k times: log2 n to find it, 1 to see whether the kept ones suffice, 1 to see that it cannot be left out (known
for one of them), 1 to see that everything else is good. Changes that need others (below) can cost k more; every answer
that is neither good nor bad costs one more. Nothing is asked twice; the empty set is good and the full one bad.

**Worked by hand**, 8 changes 0..7 of which 2 and 5 hurt together only. Halve 0..7: {0,1,2,3} good, {0,..,5} bad,
{0,..,4} good, so 5 takes part. {5} alone is good. Halve 0..4 with 5 kept: {5,0,1} good, {5,0,1,2} bad, so 2 takes part.
{2,5} is bad: a cause. Without 5, {2} is good; without 2, {5} is known to be. All but 5, and all but 2, are good: no
other set is bad. 10 questions; the bound says 11.

**Changes that need others.** A patch that requires another cannot be on without it, so that most sets could not be
served. `needs` says so, and only closed sets are asked about: a change comes with all that it needs, and goes with all
that need it. What was found is told apart into `changes` and the `riders` that come along.

**Answers that do not help.** Where a set cannot be served, or its figure stays too near the threshold, another point
nearby is asked about; where none is left, the changes between are taken together and then left out one by one.

**Adding a change may also heal.** Then the set that is found is still bad, and good (or unclear) without any one of its
changes, since that is asked and never inferred; but that no other set is bad does not follow. `healed` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

#: Indices of changes; a set that is asked about is closed under what its members need.
Subset = frozenset[int]

# Unclear answers cost the most turns of all, and a figure near the threshold seldom leaves it one change further on.
UNCLEAR_POINTS = 3


class Answer(Enum):
    """What serving a set of changes showed."""

    GOOD = "good"
    BAD = "bad"
    UNCLEAR = "unclear"  # measured, and still on both sides of the threshold
    IMPOSSIBLE = "impossible"  # could not be measured


@dataclass(frozen=True)
class Question:
    """A set to be asked about.

    Attributes:
        reason: one clause for people, with `{}` where the changes in `about` are to be named.
        at_most: questions left including this one, if the change sought now is the last that takes part and each
            answer is good or bad.
    """

    subset: Subset
    reason: str
    about: Subset
    at_most: int


@dataclass(frozen=True)
class Cause:
    """A set of changes that is bad by itself.

    Attributes:
        changes: those that take part.
        riders: what these need, and so was always there with them.
        without: for each of `changes`, the answer about this set without it (and without what needs it).
        needed: for each of `changes`, the answer about everything except it and the other causes, asked or following
            from a good larger set; good: nothing else does what it does, provided that adding changes does not heal.
    """

    changes: Subset
    riders: Subset
    without: dict[int, Answer]
    needed: dict[int, Answer] = field(default_factory=dict)

    @property
    def everything(self) -> Subset:
        """What has to be served to show it."""
        return self.changes | self.riders

    @property
    def minimal(self) -> bool:
        """Whether leaving out any one of the changes was measured and good."""
        return all(answer is Answer.GOOD for answer in self.without.values())


@dataclass(frozen=True)
class Findings:
    """What `search` found.

    Attributes:
        causes: in the order found; they share no change.
        rest: the set without all causes, and the answer about it, asked or following from a good larger set.
        healed: two sets that were asked about, the first bad and the second, which contains it, good.
        answers: everything that was asked, in that order.
    """

    causes: tuple[Cause, ...]
    rest: tuple[Subset, Answer]
    healed: tuple[Subset, Subset] | None
    answers: dict[Subset, Answer]


Asking = Generator[Question, Answer, Answer]


class Order:
    """The changes in the order in which they are halved, and what needs what.

    Args:
        needs: for each change, in the order of preference (likely ones first: of several causes the one that ends
            first is found first), the changes it cannot do without.
    """

    def __init__(self, needs: Sequence[Collection[int]]) -> None:
        self.all: Subset = frozenset(range(len(needs)))
        self._needs = [self._reach(index, needs) for index in range(len(needs))]
        self._needed_by = [frozenset(other for other in self.all if index in self._needs[other]) for index in self.all]
        self.list: list[int] = []
        for index in range(len(needs)):
            # What a change needs comes first, so that beginnings of the list are closed (but for circles).
            self.list += [other for other in sorted(self._needs[index], key=self._depth) if other not in self.list]

    @staticmethod
    def _reach(index: int, needs: Sequence[Collection[int]]) -> Subset:
        found, queue = {index}, [index]
        while queue:
            for other in needs[queue.pop()]:
                if other not in found:
                    found.add(other)
                    queue.append(other)
        return frozenset(found)

    def _depth(self, index: int) -> tuple[int, int]:
        return len(self._needs[index]), index

    def closed(self, changes: Iterable[int]) -> Subset:
        """These and all that they need."""
        return frozenset().union(*(self._needs[index] for index in changes))

    def without(self, whole: Subset, changes: Iterable[int]) -> Subset:
        """A closed set less these changes and all that need them; closed again."""
        return whole.difference(*(self._needed_by[index] for index in changes))

    def heads(self, whole: Subset) -> list[int]:
        """Of a closed set, the fewest that bring all others along, in the order of the list."""
        kept: list[int] = []
        for index in reversed(self.list):
            if index in whole and index not in self.closed(kept):
                kept.append(index)
        return kept[::-1]


class _Search:
    def __init__(self, order: Order) -> None:
        self.order = order
        self.answers: dict[Subset, Answer] = {frozenset(): Answer.GOOD, order.all: Answer.BAD}

    def run(self) -> Generator[Question, Answer, Findings]:
        causes: list[Cause] = []
        whole = self.order.all
        while True:
            chosen = yield from self._find(whole)
            cause = yield from self._minimal(chosen)
            causes.append(cause)
            left = self.order.without(whole, cause.changes)
            answer = yield from self._rest(whole, left, cause)
            if answer is not Answer.BAD:
                break
            whole = left
        told = []
        for cause in causes:
            others = [index for other in causes if other is not cause for index in other.changes]
            base = self.order.without(self.order.all, others)
            told.append((yield from self._needed(cause, base)))
        known: tuple[Subset, ...] = (frozenset(), self.order.all)
        asked = {subset: answer for subset, answer in self.answers.items() if subset not in known}
        return Findings(tuple(told), (left, answer), self._healed(), asked)

    def _ask(self, subset: Subset, reason: str, about: Iterable[int], at_most: int) -> Asking:
        if subset not in self.answers:
            self.answers[subset] = yield Question(subset, reason, frozenset(about), at_most)
        return self.answers[subset]

    def _ask_unless_good(self, subset: Subset, reason: str, about: Iterable[int], at_most: int) -> Asking:
        """`_ask`, but good where a larger set is: for what is told under the proviso that adding does not heal."""
        for larger, answer in self.answers.items():
            if answer is Answer.GOOD and larger.issuperset(subset):
                return answer
        return (yield from self._ask(subset, reason, about, at_most))

    def _find(self, whole: Subset) -> Generator[Question, Answer, list[int]]:
        """Changes that are bad by themselves; `whole` is closed and bad."""
        chosen: list[int] = []
        before = [index for index in self.order.list if index in whole]
        while True:
            base = self.order.closed(chosen)
            before = [index for index in before if index not in base]
            reason = "whether {} does it alone" if len(chosen) == 1 else "whether {} do it together"
            if (yield from self._ask(base, reason, chosen, 1 + 2 * len(chosen))) is Answer.BAD or not before:
                return chosen
            low, high = yield from self._turn(chosen, before)
            chosen += before[low:high]
            before = before[:low]

    def _turn(self, chosen: list[int], before: list[int]) -> Generator[Question, Answer, tuple[int, int]]:
        """(low, high): with the first `high` of `before` (and `chosen`) bad, with the first `low` not; next to each
        other but for points without an answer."""
        low, high = 0, len(before)
        silent: set[int] = set()
        unclear = 0
        after = 1 + 2 * (len(chosen) + 1)
        while high - low > 1 and unclear < UNCLEAR_POINTS:
            points = [point for point in range(low + 1, high) if point not in silent]
            if not points:
                break
            middle = min(points, key=lambda point: abs(2 * point - low - high))
            subset = self.order.closed([*chosen, *before[:middle]])
            reason = f"which of {{}} takes part{' with what is found' if chosen else ''}"
            at_most = (high - low - 1).bit_length() + after
            answer = yield from self._ask(subset, reason, before[low:high], at_most)
            if answer is Answer.BAD:
                high = middle
            elif answer is Answer.GOOD:
                low = middle
            else:
                silent.add(middle)
                unclear += answer is Answer.UNCLEAR
        return low, high

    def _minimal(self, chosen: Iterable[int]) -> Generator[Question, Answer, Cause]:
        """The cause in `chosen`, whose closed set is bad, after leaving out whatever can be."""
        whole = self.order.closed(chosen)
        while True:
            heads = self.order.heads(whole)
            without: dict[int, Answer] = {}
            for done, index in enumerate(heads):
                smaller = self.order.without(whole, [index])
                at_most = 2 * len(heads) - done
                answer = yield from self._ask(smaller, "whether {} can be left out", [index], at_most)
                if answer is Answer.BAD:
                    whole = smaller
                    break
                without[index] = answer
            else:
                return Cause(frozenset(heads), whole - frozenset(heads), without)

    def _rest(self, whole: Subset, left: Subset, cause: Cause) -> Asking:
        """The answer about `left`, which is `whole` without the cause; good where a larger set already is."""
        if len(cause.changes) > 1:
            # The larger sets have to be asked about anyway, to see whether each change is needed.
            for index in sorted(cause.changes):
                larger = self.order.without(whole, [index])
                at_most = len(cause.changes)
                answer = yield from self._ask(larger, "whether all but {} is good", [index], at_most)
                if answer is Answer.GOOD:
                    return answer
        return (yield from self._ask_unless_good(left, "whether all but {} is good", cause.changes, 1))

    def _needed(self, cause: Cause, base: Subset) -> Generator[Question, Answer, Cause]:
        needed = {}
        for done, index in enumerate(sorted(cause.changes)):
            subset = self.order.without(base, [index])
            at_most = len(cause.changes) - done
            needed[index] = yield from self._ask_unless_good(subset, "whether all but {} is good", [index], at_most)
        return Cause(cause.changes, cause.riders, cause.without, needed)

    def _healed(self) -> tuple[Subset, Subset] | None:
        pairs = [
            (one, other)
            for one, bad in self.answers.items()
            if bad is Answer.BAD
            for other, good in self.answers.items()
            if good is Answer.GOOD and one < other
        ]
        return min(pairs, key=lambda pair: len(pair[1]) - len(pair[0]), default=None)


def search(order: Order) -> Generator[Question, Answer, Findings]:
    """Find the causes among the changes; yields each `Question`, is sent its `Answer`, and returns `Findings`.

    A generator, so that whoever measures keeps the pace, and may stop and begin again: given the same answers it asks
    the same questions in the same order.
    """
    return _Search(order).run()


def answer_all(order: Order, test: Callable[[Subset], Answer]) -> Findings:
    """`search` with a function that answers."""
    asking = search(order)
    try:
        question = next(asking)
        while True:
            question = asking.send(test(question.subset))
    except StopIteration as done:
        return done.value
