"""Answers the questions of `deltas` by serving, with as few turns as the figures allow, and keeps every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_patches.bench.changes import Changes
from sglang_patches.bench.deltas import Answer, Findings, Order, Question, Subset, search
from sglang_patches.bench.evidence import GOOD, Evidence
from sglang_patches.bench.folder import replace
from sglang_patches.bench.journal import Journal
from sglang_patches.bench.model import Arm, Turn
from sglang_patches.bench.turns import TurnFailed

# A server that failed once may have met a passing trouble; one that failed twice stands for the set.
STARTS = 2
# Searches after the first one, each with all figures so far; one is the rule.
PASSES = 4


@dataclass(frozen=True)
class Policy:
    """How often is measured.

    Attributes:
        rounds: blocks of good and bad at the beginning.
        max_turns: of one set; what is not clear then stays unclear.
        anchor_every: good is measured again after so many turns without it.
        budget: turns in all, those of the ends aside; what is not answered then stays so, and is told. None: no limit.
    """

    rounds: int = 2
    max_turns: int = 6
    anchor_every: int = 5
    budget: int | None = None


@dataclass
class Step:
    """One question and its answer; `turns` are those measured for it, of good too. Step 0 is bad itself."""

    number: int
    reason: str
    subset: Subset
    arm: Arm
    answer: Answer | None = None
    turns: list[Turn] = field(default_factory=list)
    failure: str = ""


class Failures:
    """Servers that failed, kept in the folder so that a rerun does not start them again but goes on as it did."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def of(self, arm: Arm, turns: int) -> str | None:
        """Why this arm could not be measured when so many turns had been, if that is known."""
        return self._seen.get(f"{turns} {arm.spec}")

    def add(self, arm: Arm, turns: int, why: str) -> None:
        """Keep it."""
        self._seen[f"{turns} {arm.spec}"] = why
        replace(self._file, json.dumps(self._seen, indent=1) + "\n")


class Bisection:
    """A run: the ends first, then the search."""

    def __init__(
        self,
        changes: Changes,
        evidence: Evidence,
        policy: Policy,
        journal: Journal,
        check: Callable[[list[Turn]], object] = lambda turns: None,
    ) -> None:
        """Prepare; nothing is measured yet.

        Args:
            check: called with all turns after each; it raises where they cannot be compared.
        """
        self.changes, self.evidence, self.policy, self.journal = changes, evidence, policy, journal
        self.order = Order(changes.needs)
        self.steps: list[Step] = []
        self.turns: list[Turn] = []
        self.cut_short = False  # by the policy's budget
        self._check = check
        self._failures = Failures(journal.folder / "failures.json")
        self._block = -1
        self._since_good = 0
        self._good = changes.good

    def ends(self) -> Answer:
        """Measure good and bad in turn: BAD if there is a regression to find, GOOD if none, or UNCLEAR.

        Raises:
            TurnFailed: one of them cannot be measured.
        """
        step = Step(0, "whether bad is worse than good", self.order.all, self.changes.bad)
        self.steps.append(step)
        self.journal.expect(2 * self.policy.rounds + _least(len(self.changes.list)))
        self._say(f"good and bad differ in {len(self.changes.list)}: {self.changes.labels(self.order.all)}")
        for block in range(self.policy.max_turns):
            self._block += 1
            for subset in (GOOD, self.order.all) if block % 2 == 0 else (self.order.all, GOOD):
                self._turn(step, subset)
            if block + 1 < self.policy.rounds:
                continue
            step.answer = self.evidence.answer(self.order.all)
            if step.answer is not None:
                break
        else:
            step.answer = Answer.UNCLEAR
        self._say(f"bad: {self.evidence.metric} {self.evidence.estimate(self.order.all)}: {step.answer.value}")
        return step.answer

    def search(self) -> Findings:
        """Find the causes; to be called when `ends` said BAD.

        At the end good is measured once more and everything is looked at again: where the machine changed meanwhile,
        intervals are wider now, sets whose answer is gone are measured again, and the search takes the other way.

        Raises:
            TurnFailed: good cannot be measured any more.
        """
        found = self._pass()
        for _ in range(PASSES):
            before = len(self.turns)
            if self._since_good and not self._spent():
                self._block += 1
                self._say("good once more, to see that the machine is what it was")
                self._turn(self.steps[-1], GOOD)
            again = self._pass()
            settled = again.answers == found.answers and len(self.turns) <= before + 1
            found = again
            if settled:
                break
        return found

    def _spent(self) -> bool:
        """Whether there are as many turns as the policy allows; to be asked where one more is wanted."""
        if self.policy.budget is None or len(self.turns) < self.policy.budget:
            return False
        self.cut_short = True
        return True

    def _pass(self) -> Findings:
        asking = search(self.order)
        try:
            question = next(asking)
            while True:
                question = asking.send(self._answer(question))
        except StopIteration as done:
            return done.value

    def _answer(self, question: Question) -> Answer:
        known = next((step for step in self.steps[1:] if step.subset == question.subset), None)
        if known is not None and (known.failure or self.evidence.answer(known.subset) is known.answer):
            assert known.answer is not None
            return known.answer
        self._block += 1
        step = known or self._new_step(question)
        try:
            step.answer = self._measured(step)
        except _Impossible as error:
            step.failure = str(error)
            step.answer = Answer.IMPOSSIBLE
            self._say(f"step {step.number}: cannot be measured: {step.failure.splitlines()[0]}")
            return step.answer
        known_now = self.evidence.estimate(step.subset)
        self._say(f"step {step.number}: {self.evidence.metric} {known_now}: {step.answer.value}")
        return step.answer

    def _new_step(self, question: Question) -> Step:
        number = len(self.steps)
        reason = question.reason.format(self.changes.labels(question.about))
        step = Step(number, reason, question.subset, self.changes.arm(f"s{number}", question.subset))
        self.steps.append(step)
        shown = self.changes.labels(question.subset)
        self._say(f"step {number}, {reason}: good with {shown} (at most {question.at_most} left if that is all)")
        spent = [len(one.turns) for one in self.steps[1:-1]]
        each = max(1.0, sum(spent) / len(spent)) if spent else 1.0
        self.journal.expect(len(self.turns) + round(question.at_most * each) + 1)
        return step

    def _measured(self, step: Step) -> Answer:
        subset = step.subset
        for _ in range(2 * self.policy.max_turns):
            turns = self.evidence.turns(subset)
            if turns:
                answer = self.evidence.answer(subset)
                if answer is not None:
                    return answer
                if turns >= self.policy.max_turns or self._spent():
                    break
                self._turn(step, self.evidence.next(subset))
            elif self._spent():
                raise _Impossible(f"not measured: --max-servers {self.policy.budget} are used up")
            else:
                if self._since_good >= self.policy.anchor_every:
                    self._turn(step, GOOD)
                self._turn(step, subset)
        return Answer.UNCLEAR

    def _turn(self, step: Step, subset: Subset) -> None:
        arm = self._good if subset == GOOD else step.arm
        ends = subset in (GOOD, self.order.all)
        if (known := self._failures.of(arm, len(self.turns))) is not None:
            raise _Impossible(known)
        for start in range(1, STARTS + 1):
            try:
                turn = self.journal.turn(arm, self._block)
                break
            except TurnFailed as error:
                if ends:
                    raise
                if start == STARTS:
                    self._failures.add(arm, len(self.turns), str(error))
                    raise _Impossible(str(error)) from None
                self._say(f"step {step.number}: {str(error).splitlines()[0]}; once more")
        self._since_good = 0 if subset == GOOD else self._since_good + 1
        step.turns.append(turn)
        self.turns.append(turn)
        self.evidence.add(subset, turn.figures, f"turn {turn.index} (arm {turn.arm}, {arm.spec or 'default'})")
        self._check(self.turns)

    def _say(self, line: str) -> None:
        self.journal.progress.say(line)


class _Impossible(Exception):
    """A set whose server failed as often as it was started, or that there are no turns left for."""


def _least(changes: int) -> int:
    """Questions that one change to blame takes, at most."""
    return (changes - 1).bit_length() + 2
