"""Whether turns may be compared: the same tokens came out, and nothing but what was selected differs.

What was selected is what two arms' selections differ in: patches, variables, arguments, interpreter; and what a patch
says in its header that it sets (`Changes`) is selected with it, though not between turns of one arm. Anything else that
matters by `sglang_patches.document.diff` is a reason not to compare, also a value that follows from the selected one
(an argument that upstream adjusts to another): only the person who asked can say that it belongs to the question, with
``--allow``.
"""

from __future__ import annotations

import fnmatch
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_patches.bench import arms as selections
from sglang_patches.bench import folder as folders
from sglang_patches.bench.model import HIGHER_IS_BETTER, Arm, Sample, Turn
from sglang_patches.bench.turns import PORT_TAKEN
from sglang_patches.document import diff as differ
from sglang_patches.document.diff import Difference
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

OUTPUTS = "outputs"
# Arguments that say which model it is.
_NAMING = {
    "target": {"model_path", "revision"},
    "draft": {"speculative_draft_model_path", "speculative_draft_model_revision", "speculative_algorithm"},
}
_Samples = Callable[[int], Sequence[Sample]]


class NotComparable(PatchError):
    """The turns are not of the same work, or differ in more than what was selected."""


@dataclass(frozen=True)
class Obstacle:
    """One reason not to compare.

    Attributes:
        topic: `outputs`, or of a `Difference`.
        subject: the thing's name, without quotes.
        text: what differs, in words.
    """

    topic: str
    subject: str
    text: str

    def allowed_by(self, allow: Sequence[str]) -> bool:
        """Whether one of the words names its topic or subject."""
        return any(word.strip("`") in (self.topic, self.subject) for word in allow)


def check(
    turns: Sequence[Turn], arms: Sequence[Arm], series: Series, samples: _Samples, allow: Sequence[str] = ()
) -> list[str]:
    """Return what differs and was allowed, in words; to be called after each turn with all so far.

    Args:
        samples: those of a turn, by its index.
        allow: topics (`outputs`, `argument`, `variable`, ...) or names of things that may differ.

    Raises:
        NotComparable: something differs that was neither selected nor allowed.
    """
    found = list(dict.fromkeys(obstacles(turns, arms, series, samples)))
    refused = [one for one in found if not one.allowed_by(allow)]
    if refused:
        names = dict.fromkeys(one.topic if one.topic == OUTPUTS else one.subject for one in refused)
        words = " ".join(f"--allow {shlex.quote(name)}" for name in names)
        lines = [f"  {one.topic:<10} {one.text}" for one in refused[:8]]
        lines += [f"  ...        and {len(refused) - 8} more"] if len(refused) > 8 else []
        raise NotComparable(
            "the arms are not compared: more than what was selected differs\n"
            + "\n".join(lines)
            + f"\n  remedy     find out why; if it belongs to what you compare, the same command with {words}"
        )
    return [f"{one.topic}: {one.text}" for one in found]


def notes(turns: Sequence[Turn]) -> list[str]:
    """What could not be checked, and what a figure does not show, in words."""
    silent = sorted({turn.arm for turn in turns if turn.document is None})
    unknown = sorted({turn.arm for turn in turns if turn.output_sha256 is None})
    said = [
        f"arm {name}'s servers tell no provenance document, so only their resolved arguments were compared"
        for name in silent
    ]
    said += [f"arm {name}'s servers tell no output ids, so outputs were not compared" for name in unknown]
    again = [turn for turn in turns if turn.retried not in ("", PORT_TAKEN)]
    said += [
        f"turn {turn.index} (arm {turn.arm}) was measured by a second server; of its first one, {turn.retried}"
        for turn in again
    ]
    return said + _not_ratios(turns) + _constant(turns)


def looks(folder: Path, kind: str, rounds: int) -> list[int]:
    """After how many rounds verdicts were told before in this folder, from the result that is there now."""
    try:
        earlier = folders.load(folder)
    except PatchError:
        return []
    if earlier.kind != kind:
        return []
    told = [*earlier.analysis.get("looks", []), len({turn.block for turn in earlier.turns})]
    return sorted({number for number in told if number < rounds})


def looked(looks: Sequence[int]) -> list[str]:
    """What earlier looks mean for a verdict, in words."""
    if not looks:
        return []
    after = ", ".join(map(str, looks))
    return [
        f"verdicts were told after {after} rounds before, and more rounds were measured then: each look is one more "
        f"chance to call like arms different, so together {len(looks) + 1} times what the confidence says at most"
    ]


def _figures(turns: Sequence[Turn]) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Each judged figure and its values by arm, a turn's in each; 0 where a turn does not tell it."""
    for figure in HIGHER_IS_BETTER:
        by_arm: dict[str, list[float]] = {}
        for turn in turns:
            by_arm.setdefault(turn.arm, []).append(turn.figures.get(figure, 0.0))
        yield figure, by_arm


def _not_ratios(turns: Sequence[Turn]) -> list[str]:
    """Judged figures that are 0, or not there, in some arms only: no ratio tells them, and they may tell the most."""
    said = []
    for figure, by_arm in _figures(turns):
        if any(max(values) > 0 for values in by_arm.values()) and any(min(values) <= 0 for values in by_arm.values()):
            means = ", ".join(f"{sum(values) / len(values):.4g} in {arm}" for arm, values in by_arm.items())
            said.append(f"{figure} is not compared: {means} (0: none, or not told)")
    return said


def _constant(turns: Sequence[Turn]) -> list[str]:
    """Figures that no round of two or more arms changes: their intervals have no width, and that is not precision."""
    said = []
    for figure, by_arm in _figures(turns):
        same = [
            arm
            for arm, values in by_arm.items()
            if len(values) > 1 and min(values) > 0 and math.isclose(min(values), max(values), rel_tol=1e-9)
        ]
        if len(same) > 1:
            arms = "every arm" if len(same) == len(by_arm) else f"arms {', '.join(same)}"
            said.append(
                f"{figure} is equal in all rounds of {arms}, which ask the same prompts: between these its intervals "
                f"have no width and its smallest detectable difference is 0 for these prompts only; others may differ"
            )
    return said


def obstacles(turns: Sequence[Turn], arms: Sequence[Arm], series: Series, samples: _Samples) -> Iterator[Obstacle]:
    """All reasons not to compare these turns, an arm's own turns with each other first.

    The parameters are those of `check`.
    """
    by_name = {arm.name: arm for arm in arms}
    first: dict[str, Turn] = {}
    for turn in turns:
        if turn.arm in first:
            for difference in _differences(first[turn.arm], turn):
                text = f"in two turns of arm {turn.arm} ({first[turn.arm].index} as A, {turn.index} as B): {difference}"
                yield Obstacle(difference.topic, difference.subject.strip("`"), text)
        first.setdefault(turn.arm, turn)
    names = list(first)
    for name in names[1:]:
        for difference in _differences(first[names[0]], first[name]):
            if not _selected(difference, by_name[names[0]], by_name[name], series):
                text = f"arm {names[0]} as A, arm {name} as B: {difference}"
                yield Obstacle(difference.topic, difference.subject.strip("`"), text)
    yield from _outputs(turns, samples, _lossy(arms, series))


def _lossy(arms: Sequence[Arm], series: Series) -> str:
    """What is known, from headers of patches (`Lossless`), of why outputs may differ; empty if nothing is."""
    names = {name: [arm.name for arm in arms if name in selections.on(arm, series)] for name in series.by_name}
    told = [
        f"{name}, on in {' and '.join(where)}, changes answers"
        for name, where in names.items()
        if where and not series[name].lossless
    ]
    return f"; patch {', '.join(told)}: judge its quality too" if told else ""


def _outputs(turns: Sequence[Turn], samples: _Samples, known_cause: str) -> Iterator[Obstacle]:
    known = [turn for turn in turns if turn.output_sha256 is not None]
    for turn in known[1:]:
        if turn.output_sha256 == known[0].output_sha256:
            continue
        pairs = list(zip(samples(known[0].index), samples(turn.index), strict=False))
        apart = [one.prompt for one, other in pairs if one.output_sha256 != other.output_sha256]
        where = f"of {len(apart)} of {len(pairs)} prompts, first of prompt {apart[0]}" if apart else "of all prompts"
        both = [f"turn {one.index} (arm {one.arm})" for one in (known[0], turn)]
        yield Obstacle(OUTPUTS, OUTPUTS, f"greedy tokens {where}, differ between {both[0]} and {both[1]}{known_cause}")
        return


def _differences(one: Turn, other: Turn) -> list[Difference]:
    if one.document is not None and other.document is not None:
        found = differ.diff(one.document, other.document)
    else:
        a, b = ((t.document.server_args if t.document else t.server_args) or {} for t in (one, other))
        common = a.keys() & b.keys()
        found = list(differ.arguments({n: a[n] for n in common}, {n: b[n] for n in common}))
    return [difference for difference in found if difference.matters]


def _selected(difference: Difference, one: Arm, other: Arm, series: Series) -> bool:
    """Whether this difference is one of those that the two selections ask for."""
    name, topic = difference.subject.strip("`"), difference.topic
    toggled = selections.on(one, series) ^ selections.on(other, series)
    if topic == "patch":
        return name in toggled
    set_by_them = [pattern for patch in toggled for pattern in series[patch].changes]
    if topic in ("variable", "argument") and any(fnmatch.fnmatchcase(name, pattern) for pattern in set_by_them):
        return True
    if topic == "variable":
        return one.environment.get(name) != other.environment.get(name)
    if topic in ("argument", "model"):
        # A patch may bring an argument of its own, which then is there in one only.
        if topic == "argument" and toggled and "absent" in (difference.a, difference.b):
            return True
        here, there = selections.arguments(one), selections.arguments(other)
        chosen = {argument for argument in here.keys() | there.keys() if here.get(argument) != there.get(argument)}
        if topic == "argument":
            return name.lstrip("-").replace("-", "_") in chosen
        role = "draft" if "the draft model" in difference.subject else "target"
        return not _NAMING[role].isdisjoint(chosen)
    return one.python != other.python and topic in ("release", "version", "library", "file", "code")
