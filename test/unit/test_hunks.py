"""Parsing, merging and writing of insertion-only diffs, against git, patch and a naive reference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches import hunks
from sglang_patches.editing import insertions_between
from sglang_patches.errors import PatchError
from sglang_patches.hunks import Insertion
from sglang_patches.verify import apply_with

PATH = "sglang/x.py"
# Few distinct lines, so that repeated ones make positions ambiguous; some look like diff syntax.
LINES = st.sampled_from([b"", b"a", b"b", b"    return x", b"--- a/f", b"+++ b/f", b"@@ -1 +1 @@", b"\xc3\xa4", b"x\r"])
TEXTS = st.lists(LINES, max_size=12).map(tuple)


def text(lines: tuple[bytes, ...]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


@st.composite
def insertions(draw: st.DrawFn, size: int) -> hunks.Insertions:
    positions = sorted(draw(st.sets(st.integers(0, size), max_size=4)))
    return tuple(Insertion(at, tuple(draw(st.lists(LINES, min_size=1, max_size=3)))) for at in positions)


@st.composite
def cases(draw: st.DrawFn, patches: int) -> tuple[bytes, list[hunks.Insertions]]:
    lines = draw(TEXTS)
    return text(lines), [draw(insertions(len(lines))) for _ in range(patches)]


def naive(upstream: bytes, groups: list[hunks.Insertions]) -> bytes:
    """One bucket of added lines behind each upstream line, filled group by group."""
    lines = upstream.splitlines(keepends=True) if b"\r" not in upstream else text_lines(upstream)
    buckets: list[bytes] = [b""] * (len(lines) + 1)
    for group in groups:
        for after, added in group:
            buckets[after] += text(added)
    return buckets[0] + b"".join(line + bucket for line, bucket in zip(lines, buckets[1:], strict=True))


def text_lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


@given(cases(3))
def test_any_subset_merges_like_the_naive_reference(case: tuple[bytes, list[hunks.Insertions]]) -> None:
    upstream, groups = case
    for chosen in range(8):
        subset = [group for bit, group in enumerate(groups) if chosen >> bit & 1]
        assert hunks.apply(upstream, hunks.combine(subset), PATH) == naive(upstream, subset)


@given(cases(1))
def test_a_written_diff_reads_back(case: tuple[bytes, list[hunks.Insertions]]) -> None:
    _upstream, (group,) = case
    expected = {PATH: group} if group else {}
    data = hunks.render(PATH, group) if group else b""
    assert hunks.parse_diff(hunks.split_lines(data), "x.patch") == expected


@pytest.mark.parametrize("tool", ["git apply", "patch"])
@settings(max_examples=60, deadline=None)
@given(case=cases(2))
def test_git_and_patch_make_the_same_file(tool: str, case: tuple[bytes, list[hunks.Insertions]]) -> None:
    upstream, groups = case
    for subset in (groups, groups[:1]):
        merged = hunks.combine(subset)
        if not merged or (tool == "patch" and not upstream):
            continue  # `patch` takes an insertion into an empty file for the creation of one that exists
        for context in (0, 3):
            if context and b"\r" in upstream:
                continue
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, PATH)
                file.parent.mkdir()
                file.write_bytes(upstream)
                assert apply_with(tool, hunks.render(PATH, merged, upstream, context), Path(folder)) == ""
                assert file.read_bytes() == hunks.apply(upstream, merged, PATH)


@settings(max_examples=100, deadline=None)
@given(cases(1))
def test_re_exported_insertions_make_the_same_file(case: tuple[bytes, list[hunks.Insertions]]) -> None:
    upstream, (group,) = case
    edited = hunks.apply(upstream, group, PATH)
    assert hunks.apply(upstream, insertions_between(upstream, edited, PATH), PATH) == edited


@settings(max_examples=60, deadline=None)
@given(TEXTS.filter(len), st.data())
def test_re_export_refuses_a_removed_line(lines: tuple[bytes, ...], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(lines) - 1))
    with pytest.raises(PatchError, match="an upstream line was changed or removed"):
        insertions_between(text(lines), text(lines[:gone] + lines[gone + 1 :]), PATH)


DIFF = b"--- a/sglang/x.py\n+++ b/sglang/x.py\n@@ -1,0 +2,2 @@\n+one\n+two\n@@ -4,0 +7 @@\n+three\n"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"+two\n", b"", "x.patch:5: corrupt patch: the hunk announces 2 added lines and has 1"),
        (b"+two\n", b" two\n", "x.patch:5: corrupt patch: the hunk announces 2 added lines and has 1"),
        (b"+one\n", b"-one\n", "x.patch:4: corrupt patch: the hunk announces 2 added lines and has 0"),
        (b"+two\n", b"+two\n+more\n", "x.patch:6: corrupt patch: expected '--- a/PATH'"),
        (b"@@ -4,0 +7 @@", b"@@ -4 +7 @@", "x.patch:6: corrupt patch: expected '@@ -N,0 +M,K @@'"),
        (b"@@ -4,0 +7 @@", b"@@ -4,0 +6 @@", "x.patch:6: corrupt patch: the new start line must be 7"),
        (b"@@ -4,0 +7 @@", b"@@ -1,0 +4 @@", "x.patch:6: corrupt patch: hunks must be in ascending order"),
        (b"+three\n", b"", "x.patch:7: corrupt patch: the hunk announces 1 added lines and has 0"),
        (b"+++ b/sglang/x.py", b"+++ b/sglang/y.py", "x.patch:2: corrupt patch: expected '+++ b/sglang/x.py'"),
        (b"--- a/sglang/x.py", b"--- /dev/null", "x.patch:1: corrupt patch: expected '--- a/PATH'"),
        (DIFF, DIFF + DIFF, "x.patch:8: corrupt patch: sglang/x.py appears twice"),
        (DIFF, DIFF[:36], "corrupt patch: sglang/x.py has no hunk"),
        (b"+three\n", b"+three\n\\ No newline at end of file\n", "x.patch:8: corrupt patch: expected '--- a/PATH'"),
    ],
)
def test_refuses_anything_but_insertions(old: bytes, new: bytes, problem: str) -> None:
    assert old in DIFF
    with pytest.raises(PatchError) as caught:
        hunks.parse_diff(hunks.split_lines(DIFF.replace(old, new)), "x.patch")
    assert problem in str(caught.value)
    assert "remedy" in str(caught.value)


def test_refuses_a_position_beyond_the_file() -> None:
    with pytest.raises(PatchError, match="inserts after line 3, but lines can be inserted after line 2 at most"):
        hunks.apply(b"a\nb\n", (Insertion(3, (b"x",)),), PATH)


def test_refuses_to_insert_behind_an_unterminated_line() -> None:
    assert hunks.apply(b"a\nb", (Insertion(1, (b"x",)),), PATH) == b"a\nx\nb"
    with pytest.raises(PatchError, match="after line 1 at most"):
        hunks.apply(b"a\nb", (Insertion(2, (b"x",)),), PATH)
