"""Single changes between two arms: all are found, any closed set of them is an arm, and what headers forbid is not."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_patches import selection
from sglang_patches.bench import arms, changes
from sglang_patches.bench.deltas import Order
from sglang_patches.bench.model import Arm
from sglang_patches.errors import PatchError
from sglang_patches.series import Patch, Series


def patch(name: str, default: str = "off", requires: Iterable[str] = (), conflicts: Iterable[str] = ()) -> Patch:
    return Patch(
        name=name, file=Path(name), header="", fields={}, default=default, requires=tuple(requires),  # type: ignore[arg-type]
        conflicts=tuple(conflicts), provides={}, pre_images={}, insertions={}, sha256="",
    )  # fmt: skip


SERIES = Series(
    "0", Path(), (patch("a", "on"), patch("b"), patch("c", "no-gpu"), patch("d", requires=["b"]), patch("e", "on"))
)


def no_gpu() -> bool:
    return False


def between(good: str, bad: str, series: Series = SERIES) -> changes.Changes:
    pair = [arms.parse(name, spec, series, gpu=no_gpu) for name, spec in (("good", good), ("bad", bad))]
    return changes.between(pair[0], pair[1], series, no_gpu)


def labels(found: changes.Changes) -> list[str]:
    return [change.label for change in found.list]


def test_every_kind_of_change_is_named() -> None:
    found = between(
        "env:KEPT=1,env:GONE=1,arg:--page-size 1,arg:--tp=2,arg:--same=3",
        "-a,+d,+b,env:KEPT=2,env:NEW=x\\,y,env:OFF=,arg:--page-size=2,arg:--flag,arg:--same=3",
    )
    assert labels(found) == [
        "-a", "+b", "+d", "env:KEPT=2", "without env:GONE", "env:NEW=x,y", "env:OFF= (unset)",
        "arg:--page-size=2", "without arg:--tp=2", "arg:--flag",
    ]  # fmt: skip
    assert found.needs[2] == (1,)
    assert found.labels([2, 0]) == "-a, +d"
    assert found.labels([]) == "nothing"


def test_arms_of_sets() -> None:
    found = between("env:A=1,arg:--x=1,arg:--y 2", "none,env:B=2,arg:--x=5,arg:--z=a\\,b")
    assert labels(found) == [
        "-a",
        "-c",
        "-e",
        "without env:A",
        "env:B=2",
        "arg:--x=5",
        "without arg:--y 2",
        "arg:--z=a,b",
    ]
    assert found.arm("s1", []) == Arm(
        name="s1", spec="env:A=1,arg:--x=1,arg:--y 2", environment={"A": "1"}, arguments=["--x=1", "--y", "2"]
    )
    some = found.arm("s2", [0, 4, 5, 7])
    assert some.patches == "-a"
    assert some.environment == {"A": "1", "B": "2"}
    assert some.arguments == ["--y", "2", "--x=5", "--z=a,b"]
    every = found.arm("s3", range(8))
    assert (every.patches, every.environment, every.arguments) == ("none", {"B": "2"}, ["--x=5", "--z=a,b"])
    for arm in (some, every):  # what is told can be typed
        assert arms.same(arms.parse("again", arm.spec, SERIES, gpu=no_gpu), arm)


def test_option_given_twice_is_one_change() -> None:
    found = between("arg:--lora a", "arg:--lora b,arg:--lora=c")
    assert labels(found) == ["arg:--lora b,arg:--lora=c"]
    arm = found.arm("s", [0])
    assert arm.arguments == ["--lora", "b", "--lora=c"]
    assert arms.same(arms.parse("again", arm.spec, SERIES, gpu=no_gpu), arm)


@pytest.mark.parametrize(("good", "bad"), [("default", ""), ("a,c,e", "default"), ("env:A=1,-a", "-a,env:A=1")])
def test_equal_arms_are_refused(good: str, bad: str) -> None:
    with pytest.raises(PatchError, match="good and bad are the same"):
        between(good, bad)


def test_two_interpreters_are_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    with pytest.raises(PatchError, match="two interpreters"):
        between("default", f"python:{python}")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Series, set[str], set[str]]:
    """A series with requirements and conflicts, and two selections that it allows."""
    names = [f"p{index}" for index in range(draw(st.integers(2, 5)))]
    patches = []
    for index, name in enumerate(names):
        others = st.sets(st.sampled_from(names[:index]), max_size=2) if index else st.just(set())
        requires = draw(others)
        patches.append(patch(name, "off", sorted(requires), sorted(draw(others) - requires)))
    series = Series("0", Path(), tuple(patches))
    allowed = [set(names) for names in subsets(names) if allows(series, names)]
    return series, draw(st.sampled_from(allowed)), draw(st.sampled_from(allowed))


def subsets(names: Iterable[str]) -> Iterable[tuple[str, ...]]:
    listed = list(names)
    return chain.from_iterable(combinations(listed, size) for size in range(len(listed) + 1))


def allows(series: Series, on: Iterable[str]) -> bool:
    names = set(on)
    try:
        selection.check(tuple(p for p in series.patches if p.name in names), series, "")
    except PatchError:
        return False
    return True


@given(worlds())
def test_closed_sets_are_exactly_those_that_the_series_allows(world: tuple[Series, set[str], set[str]]) -> None:
    series, before, after = world
    assume(before != after)
    found = between(",".join(sorted(before)) or "none", ",".join(sorted(after)) or "none", series)
    order = Order(found.needs)
    for subset in subsets(map(str, range(len(found.list)))):
        chosen = {int(index) for index in subset}
        on = before ^ {found.list[index].name for index in chosen}
        assert (order.closed(chosen) == chosen) == allows(series, on)
        if order.closed(chosen) == chosen:
            arm = found.arm("s", chosen)
            assert arms.on(arm, series, no_gpu) == on
            selection.select(series, arm.patches, no_gpu)
