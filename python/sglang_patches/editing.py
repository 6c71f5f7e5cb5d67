"""Making and re-exporting patches: upstream's files with a patch applied, edited, and turned into hunks again."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from datetime import date
from pathlib import Path

from sglang_patches import hunks
from sglang_patches.errors import PatchError
from sglang_patches.series import Patch, Series, left_out_line, parse_patch
from sglang_patches.upstream import Upstream, digest

HEADER = "header"
_PRE_IMAGE_LINES = re.compile(r"(?:^Pre-Image: .*\n)+", re.MULTILINE)
_CONFLICT = re.compile(rb"(?:<{7}|>{7}|\|{7}) ")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@.*")


def check_out(upstream: Upstream, tree: Path, files: list[str], patch: Patch | None = None) -> list[Path]:
    """Write upstream's `files` and those of `patch`, with the patch (and no other) applied, into `tree`.

    Raises:
        PatchError: `tree` is not empty, upstream lacks a file, or it is not the one the patch was made against.
    """
    if tree.exists() and any(tree.iterdir()):
        raise PatchError(f"{tree} is not empty\n  remedy     name a new folder, or remove this one first")
    contents = {path: _upstream_file(upstream, path) for path in [*(patch.touches if patch else ()), *files]}
    written = []
    for path, data in contents.items():
        if patch and path in patch.insertions:
            if digest(data) != patch.pre_images[path]:
                raise PatchError(
                    f"{path}: {patch.name} was made against another file\n"
                    f"  expected   {patch.pre_images[path]}\n"
                    f"  found      {digest(data)}  (installed: sglang {upstream.release})\n"
                    f"  remedy     restore upstream: pip install --force-reinstall --no-deps sglang=={upstream.release}"
                )
            data = hunks.apply(data, patch.insertions[path], path)
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        written.append(target)
    return written


def draft_header(name: str) -> str:
    """A header to fill in; it does not pass `verify` as it is."""
    return (
        f"Description: TODO what {name} changes, in one line\n"
        " TODO the rest of it, indented by one space.\n"
        "Why: TODO temporary until upstream: URL | cannot go upstream: REASON | ours\n"
        "Forwarded: no\n"
        "Applied-Upstream: no\n"
        "Remove-When: TODO\n"
        "Default: off\n"
        f"Last-Update: {date.today().isoformat()}\n"
    )


def export(series: Series, upstream: Upstream, name: str, tree: Path | None = None) -> bytes:
    """The patch file for the edited `tree`, or, without one, for the patch as it is applied to upstream.

    The header is the committed one, or `tree`'s file `header`; its `Pre-Image` lines are rewritten.

    Raises:
        PatchError: a line of upstream was changed or removed, nothing was added, or the header is malformed.
    """
    patch = series.by_name.get(name)
    edited: dict[str, bytes] = {}
    header = patch.header if patch else ""
    if tree is not None:
        if not tree.is_dir():
            raise PatchError(f"{tree}: no such folder\n  remedy     make it with: sglang-patches edit {name} {tree}")
        for file in sorted(tree.rglob("*.py")):
            edited[file.relative_to(tree).as_posix()] = file.read_bytes()
        if (tree / HEADER).is_file():
            header = (tree / HEADER).read_text(encoding="utf-8")
        if not header:
            raise PatchError(
                f"{name} is not in the series for {series.release} and {tree / HEADER} does not exist\n"
                f"  remedy     begin with: sglang-patches new {name} DIR FILE..."
            )
    elif patch is not None:
        for path, insertions in patch.insertions.items():
            edited[path] = hunks.apply(_upstream_file(upstream, path), insertions, path)
    else:
        series[name]  # raises: unknown patch
    files: dict[str, tuple[bytes, hunks.Insertions]] = {}
    for path in sorted(edited):
        data = _upstream_file(upstream, path)
        committed = patch.insertions.get(path, ()) if patch else ()
        # The same text can often be inserted at more than one place; an unedited file keeps the place it has.
        if committed and hunks.apply(data, committed, path) == edited[path]:
            insertions = committed
        else:
            insertions = insertions_between(data, edited[path], path)
        _check_resolved(insertions, path)
        if insertions:
            files[path] = data, insertions
    if not files:
        raise PatchError(f"{tree}: no line was added to any file\n  remedy     edit the files, then run refresh again")
    return assemble(header, files, series.folder / f"{name}.patch")


def _check_resolved(insertions: hunks.Insertions, path: str) -> None:
    """Raise PatchError where a conflict mark is left, with which no process could import the file."""
    for line in (line for insertion in insertions for line in insertion.lines):
        if _CONFLICT.match(line):
            raise PatchError(
                f"{path}: a conflict is not resolved\n"
                f"  seen       {line.decode(errors='replace')}\n"
                f"  remedy     keep upstream's lines and the added ones between the marks, and remove the marks"
            )


def assemble(header: str, files: dict[str, tuple[bytes, hunks.Insertions]], file: Path) -> bytes:
    """A patch file of `header`, its `Pre-Image` lines rewritten, and of each upstream file's bytes and insertions.

    Raises:
        PatchError: the header is malformed; `file` names the patch.
    """
    diffs = b"".join(hunks.render(path, files[path][1]) for path in sorted(files))
    block = "".join(f"Pre-Image: {digest(files[path][0])} {path}\n" for path in sorted(files))
    header = header.rstrip("\n") + "\n"
    if _PRE_IMAGE_LINES.search(header):
        header = _PRE_IMAGE_LINES.sub(lambda _: block, header, count=1)
    else:
        header += block
    result = header.encode() + b"\n" + diffs
    parse_patch(result, file)
    return result


def write(series: Series, name: str, data: bytes) -> list[Path]:
    """Write a patch file, and list it in the series if it is new; returns the files that changed."""
    file = series.folder / f"{name}.patch"
    changed = []
    if not file.is_file() or file.read_bytes() != data:
        file.write_bytes(data)
        changed.append(file)
    if name not in series.by_name:
        listing = series.folder / "series"
        lines = listing.read_text(encoding="utf-8").splitlines()
        # A patch that `port` left out goes where it was in the other lane: patches behind it may require it.
        places = [at for at, line in enumerate(lines) if (match := left_out_line(line)) and match[1] == name]
        if places:
            lines[places[0]] = f"{name}.patch"
        else:
            lines.append(f"{name}.patch")
        listing.write_text("\n".join(lines) + "\n", encoding="utf-8")
        changed.append(listing)
    return changed


def insertions_between(old: bytes, new: bytes, path: str) -> hunks.Insertions:
    """The insertions that make `new` of `old`, by `git diff`, whose minimal difference has no deletion if one can do.

    Raises:
        PatchError: some line of `old` is missing or changed in `new`.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (("old", old), ("new", new)):
            Path(folder, name).write_bytes(data)
        options = ["--no-color", "--no-ext-diff", "--no-textconv", "--text", "--minimal", "-U0"]
        done = run_git(["diff", "--no-index", *options, "--", "old", "new"], Path(folder))
    if done.returncode > 1:
        raise PatchError(f"git diff failed on {path}: {done.stderr.decode(errors='replace').strip()}")
    found: list[hunks.Insertion] = []
    lines = iter(done.stdout.split(b"\n"))
    for line in lines:
        match = _HUNK.fullmatch(line)
        if match is None:
            continue
        after, removed, added = int(match[1]), int(match[2] or 1), int(match[3] or 1)
        body = [next(lines) for _ in range(removed + added)]
        if removed or any(entry[:1] != b"+" for entry in body):
            seen = body[0][1:].decode(errors="replace")
            raise PatchError(
                f"{path}:{after}: an upstream line was changed or removed: {seen.strip()!r}\n"
                f"  expected   added lines only, so that patches never carry upstream's text\n"
                f"  remedy     put the line back, and add what makes it moot: a decorator above the def, an early "
                f"return, a call that overrides the value after it is set"
            )
        found.append(hunks.Insertion(after, tuple(entry[1:] for entry in body)))
    return tuple(found)


def run_git(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`, outside of any repository and without the user's configuration.

    Raises:
        PatchError: git is not installed.
    """
    settings = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    try:
        return subprocess.run(["git", *arguments], cwd=folder, env={**os.environ, **settings}, capture_output=True)
    except FileNotFoundError:
        raise PatchError(
            "git is not installed\n  remedy     install git; editing and verifying patches needs it"
        ) from None


def _upstream_file(upstream: Upstream, path: str) -> bytes:
    data = upstream.read(path) if path.startswith("sglang/") and path.endswith(".py") else None
    if data is None:
        raise PatchError(
            f"sglang {upstream.release} has no file {path}\n"
            f"  expected   a path like sglang/srt/server_args.py, in {upstream.root}; patches cannot add files\n"
            f"  remedy     correct the path, or, if it is below a DIR given to refresh, give the folder that edit or "
            f"new wrote; new code belongs into python/sglang_patches/runtime/"
        )
    return data
