"""Selections: what they mean, and what they say when they mean nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_patches.bench import arms
from sglang_patches.errors import PatchError
from sglang_patches.series import Series


def parse(spec: str, series: Series) -> arms.Arm:
    return arms.parse("a", spec, series, gpu=lambda: False)


def test_words_of_all_kinds(series: Series) -> None:
    spec = r"-clean-stop, env:NCCL_PROTO=LL,arg:--speculative-num-steps=2,arg:--json={\"a\":1\,2},env:EMPTY=,+oops"
    arm = parse(spec.replace(",+oops", "").replace('\\"', '"'), series)
    assert arm.patches == "-clean-stop"
    assert arm.environment == {"NCCL_PROTO": "LL", "EMPTY": ""}
    assert arm.arguments == ["--speculative-num-steps=2", '--json={"a":1,2}']
    assert arm.python == ""
    with pytest.raises(PatchError, match="oops"):
        parse("+oops", series)


def test_an_argument_of_several_values_is_split_as_a_shell_does(series: Series) -> None:
    assert parse("arg:--cuda-graph-bs 1 2 '3 4'", series).arguments == ["--cuda-graph-bs", "1", "2", "3 4"]
    assert parse("arg:--a=b c", series).arguments == ["--a=b c"]


@pytest.mark.parametrize(
    ("spec", "patches"),
    [
        ("", ""),
        ("default", ""),
        ("none", "none"),
        ("none,+provenance", "none,+provenance"),
        ("provenance", "provenance"),
    ],
)
def test_patch_words_make_the_value_of_the_variable(series: Series, spec: str, patches: str) -> None:
    assert parse(spec, series).patches == patches


def test_which_patches_are_on(series: Series) -> None:
    assert arms.on(parse("none,+provenance", series), series, lambda: False) == {"provenance"}


def test_equal_but_for_the_spelling(series: Series) -> None:
    assert arms.same(parse("default", series), arms.parse("b", "", series, gpu=lambda: False))
    assert not arms.same(parse("default", series), parse("none", series))


def test_an_interpreter_is_not_resolved(series: Series, tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert parse(f"python:{link}", series).python == str(link)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("env:1X=2", "env:NAME=VALUE"),
        ("env:X", "env:NAME=VALUE"),
        ("env:SGLANG_PATCHES=none", "words of their own"),
        ("env:X=1,env:X=2", "one value for X"),
        ("arg:speculative", "arg:--option=value"),
        ("arg:", "arg:--option=value"),
        ("arg:--port=1", "chosen anew for each server\n  remedy     leave it out"),
        ("python:/no/such/python", "executable"),
        ("python:/tmp", "executable"),
        ("file:x", "none, all, default"),
        ("+provenance,-provenance", "both on and off"),
    ],
)
def test_mistakes(series: Series, spec: str, said: str) -> None:
    with pytest.raises(PatchError) as error:
        parse(spec, series)
    assert said in str(error.value)


def test_two_arms_of_one_name(series: Series) -> None:
    with pytest.raises(PatchError, match="taken"):
        arms.parse("a", "none", series, taken=["a"])


@pytest.mark.parametrize(
    "spec",
    [
        "env:HF_TOKEN=hunter2", "arg:--api-key=hunter2", "arg:--api-key hunter2", "env:PLAIN=hf_hunter2hunter2",
        'arg:--json-model-override-args={"api_key": "hunter2"}', "env:PROXY=http://me:hunter2@host",
    ],
)  # fmt: skip
def test_a_secret_is_refused_and_not_shown(series: Series, spec: str) -> None:
    with pytest.raises(PatchError, match=r"nothing secret.*\n.*set it in the shell") as error:
        parse(spec, series)
    assert "hunter2" not in str(error.value)
    # What only has a value to mask inside JSON and is written otherwise is none.
    assert parse('arg:--speculative-x={"a":1}', series).arguments == ['--speculative-x={"a":1}']
