"""Factors become arms that can be served, or an error that names what stands in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.sandbox import RELEASE, Sandbox

from sglang_patches import series
from sglang_patches.bench.design import fraction, full
from sglang_patches.bench.factors import Factor, make_arms, parse
from sglang_patches.bench.model import Arm
from sglang_patches.errors import PatchError
from sglang_patches.series import Series

PATH = "sglang/srt/one.py"


@pytest.fixture
def patches(tmp_path: Path) -> Series:
    """One patch on by default, one off, one that needs it, and one that excludes the first."""
    sandbox = Sandbox(tmp_path)
    sandbox.make()
    sandbox.add("one", {PATH: {1: "    return 'one'"}})
    sandbox.add("two", {PATH: {2: "# two"}}, "Default: off\n")
    sandbox.add("needs-two", {PATH: {3: "# three"}}, "Default: off\nRequires: two\n")
    sandbox.add("not-one", {PATH: {4: "# four"}}, "Default: off\nConflicts: one\n")
    return series.load(RELEASE, sandbox.lane.parent)


def arms_of(text: str, patches: Series, base: str = "default", of: int = 1) -> dict[str, Arm]:
    factors = parse(text, patches)
    design = fraction([factor.name for factor in factors], of)
    made = make_arms(factors, design, base, patches, gpu=lambda: False)
    return {arm.name: arm for arm in made}


def test_off_is_minus_for_a_patch_and_absence_for_a_word(patches: Series) -> None:
    found = arms_of(r"one, env:A=1,arg:--b={1\,2}", patches)
    assert list(found) == ["000", "100", "010", "110", "001", "101", "011", "111"]
    assert found["000"].patches == "default,-one"
    assert (found["000"].environment, found["000"].arguments) == ({}, [])
    assert found["111"].patches == "default,+one"
    assert (found["111"].environment, found["111"].arguments) == ({"A": "1"}, ["--b={1,2}"])
    assert (found["010"].environment, found["010"].arguments) == ({"A": "1"}, [])
    assert found["010"].spec == "default,-one,env:A=1"


def test_the_base_is_in_every_run(patches: Series) -> None:
    found = arms_of("two", patches, base="none,+one,env:A=1")
    assert [arm.patches for arm in found.values()] == ["none,+one,-two", "none,+one,+two"]
    assert all(arm.environment == {"A": "1"} for arm in found.values())
    assert [arm.patches for arm in arms_of("two", patches, base="").values()] == ["-two", "+two"]


def test_a_fraction_has_the_arms_of_its_runs(patches: Series) -> None:
    assert list(arms_of("one,two,env:A=1,env:B=1", patches, of=2)) == [
        "0000", "1001", "0101", "1100", "0011", "1010", "0110", "1111",
    ]  # fmt: skip


def test_a_factor_that_needs_another_is_refused_by_name_unless_the_base_has_it(patches: Series) -> None:
    with pytest.raises(PatchError) as error:
        arms_of("two,needs-two", patches)
    text = str(error.value)
    assert "no run with two off, needs-two on" in text
    assert "needs-two needs two" in text
    assert "--base" in text
    with pytest.raises(PatchError, match="needs-two needs two"):
        arms_of("needs-two", patches)
    assert len(arms_of("needs-two", patches, base="default,+two")) == 2


def test_factors_that_exclude_each_other_are_refused_by_name(patches: Series) -> None:
    with pytest.raises(PatchError, match=r"no run with one on, not-one on\n.*not-one cannot be on together with one"):
        arms_of("one,not-one", patches)
    with pytest.raises(PatchError, match="cannot be on together with one"):
        arms_of("not-one", patches)
    assert len(arms_of("not-one", patches, base="default,-one")) == 2


@pytest.mark.parametrize(
    ("text", "base", "message"),
    [
        ("one,three", "default", r"unknown patch: three\n  known      one, two"),
        ("+one", "default", r"factor '\+one': a factor is switched both on and off"),
        ("none", "default", "factor 'none'"),
        ("oops:1", "default", "'oops:1' in selection"),
        ("env:A=1", "env:A=1", "runs 0 and 1 would serve alike"),
        ("env:A=1,env:A=2", "default", "one value for A"),
        ("two", "one", "is not a selection"),
        ("one", "default,-one", "both on and off"),
    ],
)
def test_what_is_no_factor_is_named(patches: Series, text: str, base: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        arms_of(text, patches, base)


def test_names_take_no_account_of_case(patches: Series) -> None:
    assert parse("ONE, env:Ab=C", patches) == [Factor("one", True), Factor("env:Ab=C", False)]
    assert full(["one"]).runs == 2
