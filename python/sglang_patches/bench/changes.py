"""The single changes that lead from one arm to another, and the arms that have only some of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_patches import selection
from sglang_patches.bench import arms
from sglang_patches.bench.model import Arm
from sglang_patches.errors import PatchError
from sglang_patches.series import Patch, Series


@dataclass(frozen=True)
class Change:
    """One thing in which the bad arm differs from the good one.

    Attributes:
        name: of the patch, the variable or the option.
        label: as it is written in a selection (`+oea-topk`, `env:NCCL_PROTO=LL`, `arg:--page-size=1`), or said.
    """

    kind: Literal["patch", "environment", "argument"]
    name: str
    label: str


@dataclass(frozen=True)
class Changes:
    """All changes between two arms.

    Attributes:
        list: patches in the order of the series, then variables, then arguments.
        needs: for each change, the indices of those without which the series does not allow it.
    """

    good: Arm
    bad: Arm
    series: Series
    list: tuple[Change, ...]
    needs: tuple[tuple[int, ...], ...]
    gpu: Callable[[], bool] = selection.has_gpu

    def labels(self, subset: Iterable[int]) -> str:
        """The changes as a list for people; `nothing` if there are none."""
        return ", ".join(self.list[index].label for index in sorted(subset)) or "nothing"

    def arm(self, name: str, subset: Iterable[int]) -> Arm:
        """The good arm with these changes, which must be closed under `needs`."""
        on = arms.on(self.good, self.series, self.gpu)
        environment = dict(self.good.environment)
        arguments = _options(self.good.arguments)
        theirs = _options(self.bad.arguments)
        patched = False
        for change in (self.list[index] for index in subset):
            if change.kind == "patch":
                on ^= {change.name}
                patched = True
            elif change.kind == "environment":
                environment.pop(change.name, None)
                if change.name in self.bad.environment:
                    environment[change.name] = self.bad.environment[change.name]
            else:
                arguments.pop(change.name, None)
                if change.name in theirs:
                    arguments[change.name] = theirs[change.name]
        words = _words(on, self.series, self.gpu) if patched else self.good.patches
        spec = [words] if words else []
        spec += [_escaped(f"python:{self.good.python}")] if self.good.python else []
        spec += [_escaped(f"env:{name}={value}") for name, value in environment.items()]
        spec += [_escaped(word) for given in arguments.values() for word in _argument_words(given)]
        return Arm(
            name=name,
            spec=",".join(spec) or "default",
            patches=words,
            environment=environment,
            arguments=[token for tokens in arguments.values() for token in tokens],
            python=self.good.python,
        )


def between(good: Arm, bad: Arm, series: Series, gpu: Callable[[], bool] = selection.has_gpu) -> Changes:
    """Every single change that leads from `good` to `bad`.

    Raises:
        PatchError: they do not differ, or in the interpreter, which is no change that could be left out of a set.
    """
    if good.python != bad.python:
        raise PatchError(
            f"the arms are served by two interpreters: {good.python or 'this one'} and {bad.python or 'this one'}\n"
            f"  expected   arms that differ in patches, environment and arguments, which can be changed one by one\n"
            f"  remedy     leave out python:, or compare the two with: sglang-patches bench ab"
        )
    before, after = arms.on(good, series, gpu), arms.on(bad, series, gpu)
    found = [
        Change("patch", patch.name, ("+" if patch.name in after else "-") + patch.name)
        for patch in series.patches
        if patch.name in before ^ after
    ]
    for name in dict.fromkeys([*good.environment, *bad.environment]):
        if good.environment.get(name) != bad.environment.get(name):
            found.append(Change("environment", name, _variable(name, bad.environment.get(name))))
    ours, theirs = _options(good.arguments), _options(bad.arguments)
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            label = _argument(theirs[name]) if name in theirs else f"without {_argument(ours[name])}"
            found.append(Change("argument", name, label))
    if not found:
        raise PatchError(
            f"good and bad are the same: {good.spec or 'default'} and {bad.spec or 'default'}\n"
            f"  remedy     name what differs, for example: --good default --bad '-pcie-nccl-allreduce'"
        )
    places = {change.name: index for index, change in enumerate(found) if change.kind == "patch"}
    needs = [
        tuple(places[name] for name in _needs(series[change.name], change.name in after, places, series, after))
        if change.kind == "patch"
        else ()
        for change in found
    ]
    return Changes(good, bad, series, tuple(found), tuple(needs), gpu)


def _needs(patch: Patch, turned_on: bool, changed: Iterable[str], series: Series, after: set[str]) -> list[str]:
    """Of the patches that change, those that must have changed before `patch` can.

    Both arms can be served, so whatever forbids a set forbids one change without one other: a patch on without the
    patch it requires, or off before those that require it; or on before the one it conflicts with is off.
    """
    if not turned_on:
        return [name for name in changed if patch.name in series[name].requires]
    conflicting = {*patch.conflicts, *(other.name for other in series.patches if patch.name in other.conflicts)}
    return [name for name in changed if name in patch.requires or (name in conflicting and name not in after)]


def _words(on: set[str], series: Series, gpu: Callable[[], bool]) -> str:
    """The value of SGLANG_PATCHES that selects exactly these."""
    if not on:
        return "none"
    usual = selection.defaults(series, gpu)
    names = [patch.name for patch in series.patches]
    return ",".join(
        [f"+{name}" for name in names if name in on - usual] + [f"-{name}" for name in names if name in usual - on]
    )


def _options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Option -> its words with all their values, in order; an option given twice has both."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name = word.partition("=")[0]
        found.setdefault(name, []).append(word)
    return found


def _variable(name: str, value: str | None) -> str:
    if value is None:
        return f"without env:{name}"
    return f"env:{name}={value}" if value else f"env:{name}= (unset)"


def _argument(words: Sequence[str]) -> str:
    return ",".join(_argument_words(words))


def _argument_words(words: Sequence[str]) -> list[str]:
    """One word of a selection for each time the option is given."""
    given: list[list[str]] = []
    for word in words:
        given += [[]] if word.startswith("--") or not given else []
        given[-1].append(word)
    # A selection takes `--option=value` as it is, and splits everything else as a shell does.
    return ["arg:" + (one[0] if len(one) == 1 else shlex.join(one)) for one in given]


def _escaped(word: str) -> str:
    return word.replace(",", "\\,")
