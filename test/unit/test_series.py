"""Reading a series and its headers, and what that refuses."""

from __future__ import annotations

from hashlib import sha256

import pytest

from sglang_patches.errors import PatchError
from sglang_patches.hunks import Insertion
from sglang_patches.series import Patch, load, load_patch

from .sandbox import FILES, RELEASE, Sandbox, lines

PATH = "sglang/srt/one.py"


def test_reads_every_field(sandbox: Sandbox) -> None:
    header = (
        "Default: no-gpu\nBug: https://example.org/1\nBug: https://example.org/2\nRequires: a, b\nConflicts: c\n"
        "Provides: sgl_kernel = sgl_kernel_cpu\nLossless: no\nAdds: sglang/srt/one.py One.three\n"
    )
    file = sandbox.add("full", {PATH: {1: "    # x", 5: "    # y"}}, header)
    file.write_text(file.read_text().replace("Test patch full\n", "Test patch full\n More of it.\n"))
    patch = load(RELEASE, sandbox.lane.parent)["full"]
    assert patch.summary == "Test patch full"
    assert patch.field("Description") == "Test patch full\nMore of it."
    assert patch.fields["Bug"] == ["https://example.org/1", "https://example.org/2"]
    assert (patch.default, patch.requires, patch.conflicts) == ("no-gpu", ("a", "b"), ("c",))
    assert patch.adds == ((PATH, "One.three"),)
    assert patch.provides == {"sgl_kernel": "sgl_kernel_cpu"}
    assert not patch.lossless
    assert patch.pre_images == {PATH: sha256(FILES[PATH].encode()).hexdigest()}
    assert patch.insertions == {PATH: (Insertion(1, (b"    # x",)), Insertion(5, (b"    # y",)))}
    assert patch.sha256 == sha256(file.read_bytes()).hexdigest()


def corrupt(sandbox: Sandbox, old: str, new: str) -> str:
    file = sandbox.lane / "p.patch"
    if not file.exists():
        sandbox.add("p", {PATH: {1: "    # x"}})
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(PatchError) as caught:
        load_patch(file)
    first, *rest = str(caught.value).splitlines()
    assert rest[-1].startswith("  remedy     restore the file from version control")
    return first.removeprefix(str(file))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Default: on", "Default: maybe", ":1: corrupt patch: Default is 'maybe', expected one of: on, off, no-gpu"),
        ("Default: on\n", "", ":1: corrupt patch: missing header field: Default"),
        ("Default: on", "Default: on\nLossless: yes", "Lossless is 'yes', expected 'no', or no such field"),
        ("Why: ours", "Wy: ours", ":2: corrupt patch: unknown field 'Wy'; known: "),
        ("Why: ours", "Why: ours\nWhy: ours", ":3: corrupt patch: Why appears twice"),
        ("Why: ours", "Why ours", ":2: corrupt patch: 'Why ours' is neither 'Field: value' nor a continuation"),
        ("Description", " Description", ":1: corrupt patch: a continuation line with no field before it"),
        ("Pre-Image: ", "Pre-Image: 12", ":1: corrupt patch: Pre-Image is '12"),
        (f" {PATH}\n\n", " sglang/other.py\n\n", f"names sglang/other.py, the diff touches {PATH}; one Pre-Image"),
        ("+    # x\n", "+    # x", "the file does not end with a line feed; is it truncated?"),
        ("+    # x\n", "", "the hunk announces 1 added lines and has 0"),
        ("Why: ours", "Why: ours\nProvides: a b", ":1: corrupt patch: Provides is 'a b', expected 'MODULE = PACKAGE'"),
    ],
)
def test_refuses_corrupt_patches(sandbox: Sandbox, old: str, new: str, problem: str) -> None:
    assert problem in corrupt(sandbox, old, new)


def test_refuses_a_release_without_a_lane(sandbox: Sandbox) -> None:
    with pytest.raises(PatchError) as caught:
        load("0.5.22", sandbox.lane.parent)
    assert str(caught.value) == lines(
        "no patches for SGLang 0.5.22",
        "  installed  sglang 0.5.22",
        f"  lanes      0.5.23 (in {sandbox.lane.parent})",
        "  remedy     install a release with a lane: pip install 'sglang==0.5.23'; "
        "carry the patches to this one: sglang-patches port --to 0.5.22; "
        "or run upstream without patches: SGLANG_PATCHES=none",
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("gone.patch", "gone.patch: no such patch, but "),
        ("p.patch", "p.patch is listed twice"),
        ("p", "'p' is not a patch file name"),
        ("Upper.patch", "'Upper' is not a name for a patch"),
        ("../p.patch", "'../p' is not a name for a patch"),
    ],
)
def test_refuses_a_series_that_does_not_name_patches(sandbox: Sandbox, line: str, problem: str) -> None:
    sandbox.add("p", {PATH: {1: "    # x"}})
    with (sandbox.lane / "series").open("a") as series:
        series.write(f"\n# a comment\n{line}  # another\n")
    with pytest.raises(PatchError) as caught:
        load(RELEASE, sandbox.lane.parent)
    assert problem in str(caught.value)


def test_unknown_patch(sandbox: Sandbox) -> None:
    sandbox.add("p", {PATH: {1: "    # x"}})
    series = load(RELEASE, sandbox.lane.parent)
    assert isinstance(series["p"], Patch)
    with pytest.raises(PatchError, match="unknown patch: q\n  known      p "):
        series["q"]
