"""What a bisection found, in words and as the analysis of its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sglang_patches.bench.bisection import Bisection, Step
from sglang_patches.bench.deltas import Answer, Cause, Findings, Subset
from sglang_patches.bench.evidence import GOOD


def no_regression(run: Bisection, answer: Answer) -> str:
    """The finding where bad is not worse than good, or not clearly."""
    evidence = run.evidence
    good, bad = evidence.estimate(GOOD), evidence.estimate(run.order.all)
    figures = f"{evidence.metric} {good.value:.4g} of good ({good.turns} turns), of bad {bad} ({bad.turns} turns)"
    limit = f"{100 * evidence.threshold:.3g} %"
    if answer is Answer.GOOD:
        return f"no regression to find: {figures}, which is not worse by {limit}"
    return f"whether there is a regression to find stays unclear: {figures}, on both sides of {limit}"


def sentence(run: Bisection, findings: Findings) -> str:
    """The finding: the changes to blame, each set with its figures against good."""
    good = run.evidence.estimate(GOOD)
    parts = [_blamed(run, cause) for cause in findings.causes]
    said = f"{'; '.join(parts)} (good: {run.evidence.metric} {good.value:.4g})"
    subset, answer = findings.rest
    named = run.changes.labels(frozenset().union(*(cause.changes for cause in findings.causes)))
    if not subset and len(run.changes.list) == sum(len(cause.everything) for cause in findings.causes):
        return f"{said}; good and bad differ in nothing else"
    known = _figure(run, subset)
    if known is None and len(findings.causes[-1].changes) > 1:
        # A larger set was asked about and good, and says it for this one.
        for index in sorted(findings.causes[-1].changes):
            larger = run.order.without(run.order.all, [index])
            if len(findings.causes) == 1 and run.evidence.turns(larger):
                named, known = run.changes.labels([index]), _figure(run, larger)
                break
    if answer is Answer.GOOD:
        return f"{said}; bad without {named}: {known}" if known else f"{said}; the rest is good"
    why = "could not be measured" if answer is Answer.IMPOSSIBLE else f"stays unclear: {known}"
    return f"{said}; bad without {named} {why}"


def _blamed(run: Bisection, cause: Cause) -> str:
    labels = [run.changes.list[index].label for index in sorted(cause.changes)]
    named = " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)
    rest = f" (with {run.changes.labels(cause.riders)}, which it needs)" if cause.riders else ""
    figure = _figure(run, cause.everything)
    metric = run.evidence.metric
    if len(labels) == 1:
        return f"{named}{rest}: {metric} {figure}"
    alone = []
    for index in sorted(cause.changes):
        smaller = run.order.without(cause.everything, [index])
        alone.append(f"without {run.changes.list[index].label} {_figure(run, smaller) or 'good'}")
    how = "only together" if cause.minimal else "together (which of them are needed is not clear)"
    return f"{named}{rest} {how}: {metric} {figure}; {', '.join(alone)}"


def _figure(run: Bisection, subset: Subset) -> str | None:
    return str(run.evidence.estimate(subset)) if run.evidence.turns(subset) else None


def analysis(run: Bisection, findings: Findings | None) -> dict[str, Any]:
    """The analysis of a result of kind `bisect`; `findings` is None where there was nothing to find.

    Ratios are to good's figure, with `low` and `high` of their intervals; null is no bound. `checks` has, for each
    change of each suspect, the suspect without it, and everything but it and the other suspects. Where a larger good
    set answers, a check has no figure of its own.
    """
    evidence, changes = run.evidence, run.changes
    scatter, freedom = evidence.scatter
    ends = run.steps[0]
    told: dict[str, Any] = {
        "metric": evidence.metric,
        "higher_is_better": evidence.higher_is_better,
        "threshold": evidence.threshold,
        "confidence": evidence.confidence,
        "found": findings is not None,
        "good": _estimate(run, GOOD),
        "bad": {**_estimate(run, run.order.all), "answer": ends.answer.value if ends.answer else None},
        "scatter": {"standard_deviation": scatter if freedom else None, "degrees_of_freedom": freedom},
        "changes": [change.label for change in changes.list],
        "steps": [_step(run, step) for step in run.steps],
    }
    if findings is None:
        return told
    told["suspects"] = [_suspect(run, cause, findings) for cause in findings.causes]
    told["checks"] = [check for cause in findings.causes for check in _checks(run, cause, findings)]
    rest, answer = findings.rest
    told["rest"] = {"changes": _labels(run, rest), "answer": answer.value, **_estimate(run, rest)}
    if findings.healed:
        bad, good = findings.healed
        told["healed"] = {"bad": _labels(run, bad), "good": _labels(run, good), "by": _labels(run, good - bad)}
    return told


def remarks(run: Bisection, findings: Findings) -> list[str]:
    """What else there is to know, a sentence each."""
    said = []
    for cause in findings.causes:
        for index, answer in cause.needed.items():
            label = run.changes.list[index].label
            others = run.changes.labels(cause.changes - {index})
            if answer is Answer.BAD and len(cause.changes) > 1:
                said.append(f"Bad without {label} is still bad: other changes do it with {others}, too.")
            elif answer in (Answer.UNCLEAR, Answer.IMPOSSIBLE):
                said.append(f"Whether something else does it without {label} is not known ({answer.value}).")
        for index, answer in cause.without.items():
            if answer is not Answer.GOOD:
                label = run.changes.list[index].label
                said.append(f"Whether {label} can be left out of its set is not known ({answer.value}).")
    if findings.healed:
        bad, good = findings.healed
        said.append(
            f"{run.changes.labels(bad)} is bad, and with {run.changes.labels(good - bad)} added it is good: changes "
            f"heal here, so that other sets may be bad without having been found."
        )
    if run.cut_short:
        said.append(
            f"The search ended after {len(run.turns)} turns (--max-servers {run.policy.budget}); the same command with "
            f"more goes on from here. Turns scatter too much for the threshold, or many changes matter."
        )
    failed = [step for step in run.steps if step.failure]
    said += [f"Step {step.number} could not be measured: {step.failure.splitlines()[0]}" for step in failed]
    return said


def _suspect(run: Bisection, cause: Cause, findings: Findings) -> dict[str, Any]:
    return {
        "changes": _labels(run, cause.changes),
        "needs": _labels(run, cause.riders),
        "minimal": cause.minimal,
        "only_one": all(answer is Answer.GOOD for answer in cause.needed.values()) and findings.healed is None,
        **_estimate(run, cause.everything),
    }


def _checks(run: Bisection, cause: Cause, findings: Findings) -> Iterator[dict[str, Any]]:
    """What shows that each change of a suspect is needed: the suspect without it, and everything else without it."""
    others = [index for other in findings.causes if other is not cause for index in other.changes]
    base = run.order.without(run.order.all, others)
    for kind, whole, answers in (("suspect", cause.everything, cause.without), ("everything", base, cause.needed)):
        for index, answer in sorted(answers.items()):
            subset = run.order.without(whole, [index])
            yield {
                "without": run.changes.list[index].label,
                "from": kind,
                "changes": _labels(run, subset),
                "answer": answer.value,
                **_estimate(run, subset),
            }


def _step(run: Bisection, step: Step) -> dict[str, Any]:
    return {
        "step": step.number,
        "asked": step.reason,
        "changes": _labels(run, step.subset),
        "arm": step.arm.name,
        "answer": step.answer.value if step.answer else None,
        **_estimate(run, step.subset),
        "measured": [turn.index for turn in step.turns],
        "failure": step.failure,
    }


def _estimate(run: Bisection, subset: Subset) -> dict[str, Any]:
    return run.evidence.estimate(subset).document() if run.evidence.turns(subset) else {}


def _labels(run: Bisection, subset: Iterable[int]) -> list[str]:
    return [run.changes.list[index].label for index in sorted(subset)]


def table(run: Bisection) -> list[tuple[str, str, str, str]]:
    """(step, served, figure, answer) of each step, for a screen."""
    rows = []
    for step in run.steps:
        known = _figure(run, step.subset) or "-"
        served = "bad" if step.number == 0 else f"good with {run.changes.labels(step.subset)}"
        rows.append((str(step.number), served, known, step.answer.value if step.answer else ""))
    return rows
