"""A bisection over simulated turns: noise is measured away, failures and drift are told, and nothing is run twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sglang_patches.bench import suspects
from sglang_patches.bench.bisect import share
from sglang_patches.bench.bisection import Bisection, Policy
from sglang_patches.bench.deltas import Answer, Findings, Subset
from sglang_patches.bench.evidence import GOOD, Evidence
from sglang_patches.bench.model import Arm
from sglang_patches.bench.turns import TurnFailed
from sglang_patches.errors import PatchError

from .simulated import Journal, NamedChanges, changes


def slow(*causes: set[int], by: float = 1.4) -> Any:
    """20 ms, and so many times more for each cause that is whole."""
    return lambda subset: 20.0 * by ** sum(subset.issuperset(cause) for cause in causes)


def bisection(journal: Any, found: NamedChanges, policy: Policy | None = None) -> Bisection:
    return Bisection(found, Evidence("verify_ms", 0.05), policy or Policy(), journal)


def searched(run: Bisection) -> Findings:
    assert run.ends() is Answer.BAD
    return run.search()


def found(findings: Findings) -> list[set[int]]:
    return [set(cause.changes) for cause in findings.causes]


def test_quiet_machine_needs_one_turn_a_set(tmp_path: Path) -> None:
    journal = Journal(tmp_path, slow({3}), noise=0.002)
    run = bisection(journal, changes(12), Policy(anchor_every=100))
    assert found(searched(run)) == [{3}]
    assert len(journal.starts) == 4 + len(run.steps) - 1 + 1 <= 4 + 6 + 1  # good once more at the end
    assert len({step.subset for step in run.steps}) == len(run.steps)


@pytest.mark.parametrize("cause", [{2}, {1, 6}, {0, 4, 7}], ids=["one", "two", "three"])
def test_planted_set_is_found_in_noise(tmp_path: Path, cause: set[int]) -> None:
    """2 % noise, 15 % slower, threshold 5 %: right in at least 95 of 100 runs, and never a wrong set called minimal."""
    right = 0
    for seed in range(100):
        run = bisection(Journal(tmp_path, slow(cause, by=1.15), noise=0.02, seed=seed), changes(8))
        if run.ends() is Answer.BAD:
            right += found(run.search()) == [cause]
    assert right >= 95


@pytest.mark.parametrize(("by", "least"), [(1.0, 95), (1.04, 0)])
def test_no_regression_is_not_invented(tmp_path: Path, by: float, least: int) -> None:
    """No difference, and one below the threshold: called bad in at most 5 of 100 runs."""
    answers = []
    for seed in range(100):
        run = bisection(Journal(tmp_path, slow({0}, by=by), noise=0.02, seed=seed), changes(3))
        answers.append(run.ends())
    assert answers.count(Answer.BAD) <= 5
    assert answers.count(Answer.GOOD) >= least


def test_sentence_without_regression(tmp_path: Path) -> None:
    run = bisection(Journal(tmp_path, slow({0}, by=1.0), noise=0.005, seed=1), changes(3))
    answer = run.ends()
    said = suspects.no_regression(run, answer)
    assert said.startswith("no regression to find: verify_ms 20")
    assert "5 %" in said
    told = suspects.analysis(run, None)
    assert told["found"] is False
    assert told["bad"]["answer"] == "good"


def test_near_the_threshold_stays_unclear(tmp_path: Path) -> None:
    """Each of two changes costs just the threshold: neither is called good or bad, and the limit of turns holds."""
    journal = Journal(tmp_path, lambda subset: 20.0 * 1.05 ** len(subset), noise=0.01, seed=3)
    run = bisection(journal, changes(2), Policy(max_turns=4))
    findings = searched(run)
    assert found(findings) == [{0, 1}]
    assert not findings.causes[0].minimal
    assert {step.answer for step in run.steps[1:]} == {Answer.UNCLEAR}
    assert max(run.evidence.turns(step.subset) for step in run.steps) <= 4
    assert "which of them are needed is not clear" in suspects.sentence(run, findings)


def test_a_budget_ends_the_search_blames_no_more_than_was_measured_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    def run(budget: int | None) -> tuple[Journal, Bisection, Findings]:
        journal = Journal(tmp_path, slow({3}, {1, 6}, by=1.12), noise=0.02, seed=5)
        made = bisection(journal, changes(8), Policy(budget=budget))
        return journal, made, searched(made)

    whole, made, findings = run(None)
    assert found(findings) == [{3}, {1, 6}] or found(findings) == [{1, 6}, {3}]
    assert not made.cut_short
    for budget in range(len(whole.turns) - 1, 4, -4):
        journal, ended, said = run(budget)
        assert len(journal.turns) <= max(budget, 2 * ended.policy.max_turns)
        assert [turn.figures for turn in journal.turns] == [turn.figures for turn in whole.turns[: len(journal.turns)]]
        assert all(not cause.minimal or set(cause.changes) in ({3}, {1, 6}) for cause in said.causes)
        assert ended.cut_short
        assert any("--max-servers" in note for note in suspects.remarks(ended, said))
        assert suspects.sentence(ended, said)
        assert suspects.analysis(ended, said)["found"]
        assert not (tmp_path / "failures.json").exists()


def test_drift_widens_intervals_instead_of_moving_answers(tmp_path: Path) -> None:
    """The machine slows by 1 % a turn, more in all than the threshold: good is measured again, and no set is blamed
    that does nothing."""
    for seed in range(20):
        run = bisection(Journal(tmp_path, slow({5}, by=1.6), noise=0.005, drift=0.01, seed=seed), changes(8))
        for cause in searched(run).causes:
            assert not cause.minimal or cause.changes == {5}


def test_machine_that_changes_at_once_blames_nobody(tmp_path: Path) -> None:
    """After the sixth turn everything takes 30 % longer, which no line fits: nothing harmless is called a cause."""
    for seed in range(20):
        journal = Journal(tmp_path, slow({5}, by=1.6), noise=0.005, seed=seed, jump=(6, 1.3))
        run = bisection(journal, changes(8), Policy(anchor_every=3))
        for cause in searched(run).causes:
            assert not cause.minimal or cause.changes == {5}


def test_figures_where_more_is_better(tmp_path: Path) -> None:
    journal = Journal(tmp_path, lambda s: 90.0 * (0.7 if 1 in s else 1), metric="tokens_per_s", noise=0.002)
    run = Bisection(changes(4), Evidence("tokens_per_s", 0.05), Policy(), journal)  # type: ignore[arg-type]
    findings = searched(run)
    assert found(findings) == [{1}]
    assert "-30 %" in suspects.sentence(run, findings)


def test_server_that_fails_is_started_twice_and_then_walked_around(tmp_path: Path) -> None:
    """c2 without c3 cannot be served, which no header states."""

    def fails(subset: Subset) -> bool:
        return 2 in subset and 3 not in subset

    journal = Journal(tmp_path, slow({5}), noise=0.002, fails=fails)
    run = bisection(journal, changes(6))
    assert found(searched(run)) == [{5}]
    failed = [step for step in run.steps if step.failure]
    assert [step.subset for step in failed] == [{0, 1, 2}]
    assert failed[0].answer is Answer.IMPOSSIBLE
    assert journal.starts.count(frozenset({0, 1, 2})) == 2


def test_failed_server_is_not_started_again_by_a_rerun(tmp_path: Path) -> None:
    """The rerun asks the journal for the same turns, also where good was measured for the set that then failed."""

    def fails(subset: Subset) -> bool:
        return 2 in subset and 3 not in subset

    journals = [Journal(tmp_path, slow({5}), noise=0.002, fails=fails) for _ in range(2)]
    for journal in journals:
        assert found(searched(bisection(journal, changes(6), Policy(anchor_every=1)))) == [{5}]
    assert [(t.arm, t.block) for t in journals[0].turns] == [(t.arm, t.block) for t in journals[1].turns]
    assert [journal.starts.count(frozenset({0, 1, 2})) for journal in journals] == [2, 0]


def test_failing_ends_are_errors(tmp_path: Path) -> None:
    journal = Journal(tmp_path, slow({0}), fails=lambda subset: len(subset) == 3)
    with pytest.raises(TurnFailed, match="arm bad"):
        bisection(journal, changes(3)).ends()


def test_same_figures_same_steps(tmp_path: Path) -> None:
    """A rerun that gets the same figures asks for the same turns in the same order: on that resuming rests."""
    journals = [Journal(tmp_path, slow({1, 6}, by=1.12), noise=0.02, seed=11) for _ in range(2)]
    runs = [bisection(journal, changes(8)) for journal in journals]
    assert found(searched(runs[0])) == found(searched(runs[1]))
    assert [(t.arm, t.block) for t in journals[0].turns] == [(t.arm, t.block) for t in journals[1].turns]
    assert max(runs[0].evidence.turns(step.subset) for step in runs[0].steps) > 1


def test_analysis_and_sentence_name_both_causes(tmp_path: Path) -> None:
    """One slow alone, two slow together, one that the pair's second needs."""
    journal = Journal(tmp_path, slow({2}, {0, 5}, by=1.5), noise=0.002)
    run = bisection(journal, changes(7, {5: (4,)}))
    findings = searched(run)
    told = suspects.analysis(run, findings)
    json.dumps(told, allow_nan=False)
    assert {tuple(suspect["changes"]) for suspect in told["suspects"]} == {("c2",), ("c0", "c5")}
    pair = next(suspect for suspect in told["suspects"] if len(suspect["changes"]) == 2)
    assert pair["needs"] == ["c4"]
    assert pair["minimal"]
    assert pair["only_one"]
    assert pair["ratio"] == pytest.approx(1.5, rel=0.02)
    assert pair["low"] < 1.5 < pair["high"]
    checks = [(check["without"], check["from"], check["changes"], check["answer"]) for check in told["checks"]]
    assert ("c0", "suspect", ["c4", "c5"], "good") in checks
    assert ("c5", "suspect", ["c0", "c4"], "good") in checks
    assert ("c2", "everything", ["c1", "c3", "c4", "c6"], "good") in checks
    assert len(checks) == 2 * 3
    assert all(check["ratio"] == pytest.approx(1.0, rel=0.02) for check in told["checks"] if check["from"] == "suspect")
    said = suspects.sentence(run, findings)
    assert "c2: verify_ms 29.95, +50 %" in said
    assert "c0 and c5 (with c4, which it needs) only together: verify_ms 29.97, +50 %" in said
    assert said.endswith("(good: verify_ms 19.99); the rest is good")
    assert suspects.remarks(run, findings) == []
    measured = [index for step in told["steps"] for index in step["measured"]]
    assert sorted(measured) == list(range(len(journal.turns)))
    assert [row[3] for row in suspects.table(run)] == [step["answer"] for step in told["steps"]]


def test_shared_change_and_healing_are_remarked(tmp_path: Path) -> None:
    run = bisection(Journal(tmp_path, slow({1, 3}, {1, 5}, by=1.5), noise=0.002), changes(8))
    findings = searched(run)
    assert suspects.remarks(run, findings) == ["Bad without c3 is still bad: other changes do it with c1, too."]

    def healed(subset: Subset) -> float:
        return 30.0 if (0 in subset and not {2, 3} & subset) or 7 in subset else 20.0

    run = bisection(Journal(tmp_path, healed, noise=0.002), changes(8))
    assert "heal" not in " ".join(suspects.remarks(run, searched(run)))  # nothing measured shows it

    def heals(subset: Subset) -> float:
        return 30.0 if 0 in subset and (2 not in subset or 7 in subset) else 20.0

    run = bisection(Journal(tmp_path, heals, noise=0.002), changes(8))
    assert any("heal" in remark for remark in suspects.remarks(run, searched(run)))


def test_progress_says_how_many_are_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path, slow({3}), noise=0.002)
    run = bisection(journal, changes(8))
    searched(run)
    steps = [line for line in journal.progress.lines if " left if that is all" in line]
    assert len(steps) == len(run.steps) - 1
    left = [int(line.rpartition("at most ")[2].split()[0]) for line in steps]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 1
    assert journal.expected[-1] >= len(journal.turns)


def test_metric_that_a_turn_lacks(tmp_path: Path) -> None:
    run = Bisection(changes(2), Evidence("accept_length", 0.05), Policy(), Journal(tmp_path, slow({0})))  # type: ignore[arg-type]
    with pytest.raises(PatchError, match=r"turn 0 \(arm good, good\) has no accept_length"):
        run.ends()


@pytest.mark.parametrize(
    ("metric", "threshold", "confidence", "said"),
    [
        ("speed", 0.05, 0.95, "expected   tokens_per_s"),
        ("verify_ms", 0.0, 0.95, "more than 0%"),
        ("tokens_per_s", 1.0, 0.95, "less than 100%"),
        ("verify_ms", 0.05, 95, "between 0.5 and 1"),
    ],
)
def test_options_that_make_no_sense(metric: str, threshold: float, confidence: float, said: str) -> None:
    with pytest.raises(PatchError, match=said):
        Evidence(metric, threshold, confidence)


def test_threshold_texts() -> None:
    assert share("5%") == share("0.05") == share(" 5 % ") == 0.05
    with pytest.raises(PatchError, match=r"such as 5% or 0\.05"):
        share("five")
    assert share("150%") == 1.5
    with pytest.raises(PatchError, match=r"'5' is 500 %(.|\n)*write 5%, or 500%"):
        share("5")


def test_interval_against_hand_computation() -> None:
    """Turns good, set, set, good with logarithms 0, 0.3, 0.34, 0.02, at times -1.5, -0.5, 0.5, 1.5 from the middle.

    Drift: (3 x 0.01 + 0.04 x 0.5) / 5 = 0.01 a turn. What it leaves: 0.005 of good, 0.015 of the set, twice each, so a
    variance of 0.0005 with 4 - 2 - 1 = 1 degree of freedom. Set less good: 0.31, of standard error that variance's root
    x sqrt(1/2 + 1/2). Student's t for 95 % and 1 degree: 12.7062.
    """
    evidence = Evidence("verify_ms", 0.05)
    some = frozenset({0})
    for subset, log in ((GOOD, 0.0), (some, 0.3), (some, 0.34), (GOOD, 0.02)):
        assert evidence.answer(some) is None
        evidence.add(subset, {"verify_ms": math.exp(log)}, "turn")
    assert evidence.scatter == (pytest.approx(0.0005**0.5), 1)
    known = evidence.estimate(some)
    wide = 12.7062 * 0.0005**0.5
    assert known.value == pytest.approx(math.exp(0.32))
    assert known.ratio == pytest.approx(math.exp(0.31))
    assert known.low == pytest.approx(math.exp(0.31 - wide), rel=1e-4)
    assert known.high == pytest.approx(math.exp(0.31 + wide), rel=1e-4)
    assert evidence.answer(some) is None  # low is 1.026, below 1.05
    assert str(known) == "1.377, +36 % (+2.6 % to +81 %)"


def test_answers_are_on_the_side_of_the_threshold() -> None:
    """The same spread around 0 %, 5 % and 40 %, for a figure where less and one where more is better."""
    for metric, sign in (("verify_ms", 1), ("tokens_per_s", -1)):
        answers = []
        for change in (0.0, 0.05, 0.4):
            evidence = Evidence(metric, 0.05)
            for at in range(12):
                some = frozenset({0}) if at % 4 in (1, 2) else GOOD
                log = (math.log1p(sign * change) if some else 0.0) + 0.005 * (-1) ** (at // 2)
                evidence.add(some, {metric: 50 * math.exp(log)}, "turn")
            answers.append(evidence.answer(frozenset({0})))
        assert answers == [Answer.GOOD, None, Answer.BAD]


@pytest.mark.parametrize("rare", [GOOD, frozenset({0})], ids=["good", "set"])
def test_next_turn_is_of_the_rarer(rare: Subset) -> None:
    evidence = Evidence("verify_ms", 0.05)
    often = frozenset({0}) if rare == GOOD else GOOD
    for at, subset in enumerate((often, often, rare, often, often)):
        evidence.add(subset, {"verify_ms": 20 + 0.1 * (at % 3)}, "turn")
    assert evidence.next(frozenset({0})) == rare


def test_arm_is_what_is_served() -> None:
    assert changes(3).arm("s1", frozenset({0, 2})) == Arm(name="s1", spec="c0 c2")
