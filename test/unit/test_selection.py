"""`SGLANG_PATCHES` and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.errors import PatchError
from sglang_patches.selection import select
from sglang_patches.series import Series, load

from .sandbox import Sandbox, lines

ON, OFF, CPU = "on-one", "off-two", "cpu-three"


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    made = Sandbox(tmp_path_factory.mktemp("selection"))
    made.make()
    path = "sglang/srt/one.py"
    made.add(ON, {path: {0: "# 1"}})
    made.add(OFF, {path: {0: "# 2"}}, "Default: off\n")
    made.add(CPU, {path: {0: "# 3"}}, "Default: no-gpu\n")
    return load("0.5.23", made.lane.parent)


def names(series: Series, text: str, gpu: bool = True) -> list[str]:
    return [patch.name for patch in select(series, text, lambda: gpu)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [ON]),
        ("  ", [ON]),
        ("none", []),
        (" NONE ", []),
        ("all", [ON, OFF, CPU]),
        ("default", [ON]),
        (OFF, [OFF]),
        (f"{CPU},{ON}", [ON, CPU]),
        (f"{CPU} , {CPU},", [CPU]),
        (f"+{OFF}", [ON, OFF]),
        (f"-{ON},+{CPU}", [CPU]),
        (f"-{OFF}", [ON]),
        (f"+ {OFF}", [ON, OFF]),
        (f"none,+{OFF}", [OFF]),
        (f"all,-{OFF}", [ON, CPU]),
        (f"default,-{ON}", []),
        (OFF.upper(), [OFF]),
    ],
)
def test_grammar(series: Series, text: str, expected: list[str]) -> None:
    assert names(series, text) == expected


def test_no_gpu_patches_are_on_without_a_gpu(series: Series) -> None:
    assert names(series, "", gpu=False) == [ON, CPU]
    assert names(series, f"-{CPU}", gpu=False) == [ON]
    assert names(series, OFF, gpu=False) == [OFF]


def test_asks_for_a_gpu_only_if_the_answer_matters(series: Series) -> None:
    def asked() -> bool:
        raise AssertionError("probed")

    assert select(series, "all", asked)
    assert not select(series, "none", asked)


@given(st.sets(st.sampled_from([ON, OFF, CPU])), st.sets(st.sampled_from([ON, OFF, CPU])), st.booleans())
def test_changes_against_sets(series: Series, plus: set[str], minus: set[str], gpu: bool) -> None:
    minus = minus - plus
    base = {ON} if gpu else {ON, CPU}
    text = ",".join([*(f"+{name}" for name in plus), *(f"-{name}" for name in minus)])
    assert set(names(series, text, gpu)) == (base | plus) - minus


def refusal(series: Series, text: str) -> str:
    with pytest.raises(PatchError) as caught:
        names(series, text)
    return str(caught.value)


def test_unknown_names_list_the_known_ones(series: Series) -> None:
    for text in ("typo,on-one,wrong", "+typo,-wrong"):
        assert refusal(series, text) == lines(
            "unknown patch: typo, wrong",
            "  known      on-one, off-two, cpu-three (release 0.5.23)",
            "  remedy     correct the name; `sglang-patches list` shows what each patch does",
        )


@pytest.mark.parametrize(
    "text", ["on-one,+off-two", "+off-two,none", "none,on-one", "all,none", "none,all,+off-two", ",,", " , "]
)
def test_lists_and_changes_do_not_mix(series: Series, text: str) -> None:
    assert refusal(series, text) == lines(
        f"SGLANG_PATCHES={text!r} is not a selection",
        "  expected   none, all, a list (a,b), or changes (+a,-b) to the defaults or to a first word "
        "none, all or default",
        "  remedy     either list exactly the patches that should be on, or only changes",
    )


def test_on_and_off_at_once(series: Series) -> None:
    assert refusal(series, "+off-two,-off-two") == lines(
        "SGLANG_PATCHES='+off-two,-off-two' switches off-two both on and off", "  remedy     keep one of the two"
    )


def test_conflicts_and_requirements(sandbox: Sandbox) -> None:
    path = "sglang/srt/one.py"
    sandbox.add("base", {path: {0: "# 1"}})
    sandbox.add("enemy", {path: {0: "# 2"}}, "Default: off\nConflicts: base\n")
    sandbox.add("child", {path: {0: "# 3"}}, "Default: off\nRequires: base\n")
    sandbox.add("orphan", {path: {0: "# 4"}}, "Default: off\nRequires: base, gone\n")
    series = load("0.5.23", sandbox.lane.parent)
    assert names(series, "+child") == ["base", "child"]
    assert refusal(series, "+enemy") == lines(
        "conflicting patches: enemy cannot be on together with base",
        "  selected   base, enemy (SGLANG_PATCHES=+enemy)",
        "  remedy     switch one of them off: add -enemy or -base to SGLANG_PATCHES",
    )
    assert refusal(series, "child") == lines(
        "missing required patch: child needs base",
        "  selected   child (SGLANG_PATCHES=child)",
        "  remedy     switch base on as well, or child off",
    )
    assert refusal(series, "base,orphan") == lines(
        "missing required patch: orphan needs gone",
        "  selected   base, orphan (SGLANG_PATCHES=base,orphan)",
        "  remedy     the series for 0.5.23 has no gone: switch orphan off",
    )
