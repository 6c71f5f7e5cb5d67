"""A lane: the folder of one release, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_patches import editing, hunks, series, verify
from sglang_patches.errors import PatchError
from sglang_patches.port import place
from sglang_patches.port.carry import Carrier, Hunk, Ported, combined
from sglang_patches.upstream import Upstream

# A lane may leave patches out whose code other lanes use.
_ABOUT_ALL_LANES = ("runtime code is used",)


def left_out(ported: Sequence[Ported]) -> dict[str, str]:
    """Name and reason of each patch that cannot be in the lane.

    It was not carried, its code imports what the release lacks (a server would end with an ImportError, at once or once
    it gets there), or what it requires is left out.
    """
    known = {entry.patch.name for entry in ported}
    found: dict[str, str] = {
        entry.patch.name: entry.outcome if entry.data is None else f"its code imports {', '.join(entry.missing)}"
        for entry in ported
        if entry.data is None or entry.missing
    }
    while True:
        more = {
            entry.patch.name: f"requires {other}, which is left out"
            for entry in ported
            for other in entry.patch.requires
            if other in found and other in known and entry.patch.name not in found
        }
        if not more:
            return found
        found |= more


def check_free(folder: Path, release: str, force: bool) -> None:
    """Raise PatchError where the lane exists and must not be replaced."""
    if (folder / release).exists() and not force:
        raise PatchError(
            f"{folder / release} exists: a lane is not overwritten\n"
            f"  remedy     see what would change with --dry-run; replace it with --force; change one of its patches "
            f"with sglang-patches edit and refresh"
        )


def write(source: series.Series, upstream: Upstream, ported: Sequence[Ported], force: bool = False) -> Path:
    """Write the lane of `upstream` with every patch that was carried; returns its folder.

    It is written beside the others under a name that is no lane's, verified there as `sglang-patches verify` does, and
    renamed. So there is the old lane or the new one, never part of one.

    Raises:
        PatchError: the lane exists and `force` is not given, nothing was carried, or a check fails.
        OSError: the folder cannot be written.
    """
    folder = source.folder.parent
    target = folder / upstream.release
    check_free(folder, upstream.release, force)
    without = left_out(ported)
    if len(without) == len(ported):
        raise PatchError(
            f"no patch of {source.release} can be carried to {upstream.release}, so there is no lane to write\n"
            f"  remedy     see the reasons above; --work DIR writes the files to carry a patch by hand"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".port-") as scratch:
        # One folder deeper than a lane: whoever lists lanes meanwhile, or after a crash, does not see it.
        lane = Path(scratch, "new", upstream.release)
        lane.mkdir(parents=True)
        for entry in ported:
            if entry.patch.name not in without and entry.data is not None:
                (lane / entry.patch.file.name).write_bytes(entry.data)
        (lane / "series").write_text(_listing(source, upstream.release, ported, without), encoding="utf-8")
        made = series.load(upstream.release, lane.parent)
        failed = [
            result for result in verify.run(upstream, made) if result.problem and result.check not in _ABOUT_ALL_LANES
        ]
        if failed:
            problems = "\n             ".join(f"{entry.check}, {entry.subject}: {entry.problem}" for entry in failed)
            raise PatchError(
                f"the lane for {upstream.release} does not pass its checks, so it was not written\n"
                f"  seen       {problems}\n"
                f"  remedy     mend the patches of {source.release} first if `sglang-patches verify` fails there too"
            )
        aside = Path(scratch, "old")
        if target.exists():
            os.rename(target, aside)
        try:
            os.rename(lane, target)
        except BaseException:
            if aside.exists():
                os.rename(aside, target)
            raise
    return target


def _listing(source: series.Series, release: str, ported: Sequence[Ported], without: dict[str, str]) -> str:
    names = [entry.patch.name for entry in ported]
    lines = [
        f"# Patches on sglang {release}, in the order they apply. `sglang-patches verify` checks them.",
        f"# Carried from {source.release} by `sglang-patches port`.",
        *(f"# Left out: {name} ({without[name]})" if name in without else f"{name}.patch" for name in names),
        *(f"# Left out: {name} ({reason})" for name, reason in source.left_out.items() if name not in names),
    ]
    return "\n".join(lines) + "\n"


def write_work(carrier: Carrier, ported: Sequence[Ported], folder: Path) -> dict[Path, str]:
    """Write what is needed to finish by hand each patch that is left out: `folder`/NAME with header and files.

    The files are the new release's with every hunk that has a place; the others are between git's conflict marks. Where
    that release is installed, `sglang-patches refresh NAME folder/NAME` makes the patch of them.

    Returns:
        Each patch's folder, and in words what is to be done there first.

    Raises:
        PatchError: a folder exists and is not empty.
        OSError: it cannot be written.
    """
    without = left_out(ported)
    wanted = {folder / entry.patch.name: entry for entry in ported if entry.patch.name in without}
    for tree in wanted:
        if tree.exists() and any(tree.iterdir()):
            raise PatchError(f"{tree} is not empty\n  remedy     name a new folder, or remove this one first")
    for tree, entry in wanted.items():
        tree.mkdir(parents=True, exist_ok=True)
        (tree / editing.HEADER).write_text(entry.patch.header.rstrip("\n") + "\n", encoding="utf-8")
        for path in dict.fromkeys(hunk.new_path for hunk in entry.hunks):
            ours = [hunk for hunk in entry.hunks if hunk.new_path == path]
            new = carrier.new.read(path)
            if new is not None:
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(_with_marks(carrier, entry.patch.name, new, ours))
    return {tree: _to_do(carrier, entry, without[entry.patch.name]) for tree, entry in wanted.items()}


def _to_do(carrier: Carrier, entry: Ported, reason: str) -> str:
    if entry.upstreamed:
        return "take out what upstream has now, or leave the patch out"
    gone = sorted({hunk.new_path for hunk in entry.failed if carrier.new.read(hunk.new_path) is None})
    said = [f"find a place for what it adds to {path}, which is gone" for path in gone]
    if any(hunk.new_path not in gone for hunk in entry.failed):
        said.insert(0, "resolve the conflict marks")
    return "; ".join(said) or f"its files are whole, but {reason}"


def _with_marks(carrier: Carrier, name: str, new: bytes, ours: Sequence[Hunk]) -> bytes:
    """The new release's file with the hunks of `ours` that have a place, and the others between conflict marks."""
    path, new_path = ours[0].path, ours[0].new_path
    old = carrier.old.read(path) or b""
    base, label = f"sglang {carrier.old.release}", f"sglang {carrier.new.release}"
    lost: list[hunks.Insertion] = []
    marked = [combined(ours)]
    for hunk in ours:
        if hunk.after is not None:
            continue
        # What git would merge without a conflict was not believed: it must not get into the file unmarked.
        after = place.merge(old, new, hunk.hunk.after)
        if after is None:
            lost.append(hunk.hunk)
        else:
            marks = [f"<<<<<<< {name}", f"||||||| {base}", "=======", f">>>>>>> {label}"]
            first, *rest = (mark.encode() for mark in marks)
            marked.append((hunks.Insertion(after, (first, *hunk.hunk.lines, *rest)),))
    new = hunks.apply(new, hunks.combine(marked), new_path)
    if not lost:
        return new
    with tempfile.TemporaryDirectory() as scratch:
        for file, data in (("ours", hunks.apply(old, tuple(lost), path)), ("base", old), ("theirs", new)):
            Path(scratch, file).write_bytes(data)
        labels = ["-L", name, "-L", base, "-L", label]
        arguments = ["merge-file", "-p", "--quiet", "--diff3", *labels, "ours", "base", "theirs"]
        return editing.run_git(arguments, Path(scratch)).stdout
