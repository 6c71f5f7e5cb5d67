"""Unified diffs that only insert lines: parse, merge, write.

Upstream files and patches are bytes throughout, and a line ends at `\\n` and nowhere else, as for git and patch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sglang_patches.errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


class Insertion(NamedTuple):
    """Lines (without their line feed) that go after line `after` of the upstream file; 0 is its beginning."""

    after: int
    lines: tuple[bytes, ...]


Insertions = tuple[Insertion, ...]


def parse_diff(lines: Sequence[bytes], where: str, first: int = 1) -> dict[str, Insertions]:
    """Read the diff part of a patch.

    Args:
        lines: the diff's lines without line feeds.
        where: the patch's file name, for messages.
        first: number of the first of these lines in that file, for messages.

    Returns:
        Upstream path (`sglang/...`) to its insertions, in the order of the diff.

    Raises:
        PatchError: anything but well-formed zero-context insertion hunks.
    """

    def corrupt(at: int, problem: str) -> PatchError:
        seen = lines[at].decode("utf-8", "replace") if at < len(lines) else "end of file"
        return PatchError(
            f"{where}:{first + at}: corrupt patch: {problem}\n"
            f"  seen       {seen!r}\n"
            f"  remedy     restore the file from version control, or re-export it: sglang-patches refresh NAME"
        )

    files: dict[str, Insertions] = {}
    at = 0
    while at < len(lines):
        if not lines[at].startswith(b"--- a/"):
            raise corrupt(at, "expected '--- a/PATH'")
        path = lines[at][len(b"--- a/") :].decode("utf-8", "replace")
        if at + 1 >= len(lines) or lines[at + 1] != b"+++ b/" + lines[at][len(b"--- a/") :]:
            raise corrupt(at + 1, f"expected '+++ b/{path}'")
        if path in files:
            raise corrupt(at, f"{path} appears twice")
        at += 2
        found: list[Insertion] = []
        added, previous = 0, -1
        while at < len(lines) and lines[at].startswith(b"@@"):
            match = _HUNK.fullmatch(lines[at])
            if match is None:
                raise corrupt(at, "expected '@@ -N,0 +M,K @@': patches only add lines, with no context")
            after, start, count = int(match[1]), int(match[2]), int(match[3] or 1)
            if after <= previous:
                raise corrupt(at, f"hunks must be in ascending order, the one before is at line {previous}")
            if start != after + 1 + added:
                raise corrupt(at, f"the new start line must be {after + 1 + added}")
            body = lines[at + 1 : at + 1 + count]
            for offset, line in enumerate(body):
                if not line.startswith(b"+"):
                    raise corrupt(at + 1 + offset, f"the hunk announces {count} added lines and has {offset}")
            if len(body) < count or count == 0:
                raise corrupt(len(lines), f"the hunk announces {count} added lines and has {len(body)}")
            found.append(Insertion(after, tuple(line[1:] for line in body)))
            added, previous = added + count, after
            at += 1 + count
        if not found:
            raise corrupt(at, f"{path} has no hunk")
        files[path] = tuple(found)
    return files


def split_lines(data: bytes) -> list[bytes]:
    """The lines of a file, without line feeds; an unterminated last line counts as a line."""
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return lines


def combine(groups: Iterable[Insertions]) -> Insertions:
    """Several patches' insertions into one file, as one patch.

    Positions refer to the upstream file, so that any subset combines; at the same line the order is that of `groups`.
    """
    at: dict[int, list[bytes]] = {}
    for group in groups:
        for insertion in group:
            at.setdefault(insertion.after, []).extend(insertion.lines)
    return tuple(Insertion(after, tuple(at[after])) for after in sorted(at))


def apply(upstream: bytes, insertions: Insertions, path: str) -> bytes:
    """The upstream file with `insertions` (ascending, one a line) put in.

    Raises:
        PatchError: a position beyond the file's end, or behind a last line that has no line feed.
    """
    lines = split_lines(upstream)
    terminated = upstream.endswith(b"\n") or not upstream
    last = len(lines) if terminated else len(lines) - 1
    out: list[bytes] = []
    done = 0
    for after, added in insertions:
        if after > last:
            raise PatchError(
                f"{path}: a hunk inserts after line {after}, but lines can be inserted after line {last} at most\n"
                f"  remedy     re-export the patch: sglang-patches edit NAME, then sglang-patches refresh NAME"
            )
        out += lines[done:after]
        out += added
        done = after
    out += lines[done:]
    return b"\n".join(out) + (b"\n" if terminated and out else b"")


def render(path: str, insertions: Insertions, upstream: bytes = b"", context: int = 0) -> bytes:
    """Write one file's part of a unified diff; `upstream` is needed only for `context` lines around each hunk."""
    lines = split_lines(upstream) if context else []
    hunks: list[list[Insertion]] = []
    for insertion in insertions:
        if context and hunks and insertion.after - hunks[-1][-1].after <= 2 * context:
            hunks[-1].append(insertion)
        else:
            hunks.append([insertion])
    out = [b"--- a/" + path.encode(), b"+++ b/" + path.encode()]
    added = 0
    for hunk in hunks:
        begin = max(0, hunk[0].after - context)
        end = min(len(lines), hunk[-1].after + context) if context else begin
        new = sum(len(insertion.lines) for insertion in hunk)
        old = end - begin
        out.append(b"@@ -%s +%s @@" % (_range(begin + (old > 0), old), _range(begin + 1 + added, old + new)))
        done = begin
        for after, inserted in hunk:
            out += [b" " + line for line in lines[done:after]] if context else []
            out += [b"+" + line for line in inserted]
            done = after
        out += [b" " + line for line in lines[done:end]]
        added += new
    return b"\n".join(out) + b"\n"


def _range(start: int, count: int) -> bytes:
    return b"%d" % start if count == 1 else b"%d,%d" % (start, count)
