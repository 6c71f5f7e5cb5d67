"""Where one inserted hunk belongs in another release of its file.

First by git's three-way merge of the file: upstream's old text is the base, the hunk one side, upstream's new text the
other. Where that conflicts, or puts the hunk into another class or function than before although the old one is still
there, by the enclosing class and function: a decorator goes above the same definition, an import of patch code behind
upstream's imports, anything else beside the same neighbouring line of the same function.
"""

from __future__ import annotations

import ast
import difflib
import re
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from sglang_patches import editing, hunks
from sglang_patches.errors import PatchError
from sglang_patches.port.scopes import Module, Scope, Spot, parse

How = Literal["unchanged", "merge", "imports", "scope"]

_MARK = b"# sglang-patches port: the hunk goes here #"
_IMPORT = re.compile(rb"\s*(?:from sglang_patches\.runtime(?:\.\w+)? import |import sglang_patches\.runtime)|\s*$")
_DEFINES = re.compile(rb"\s*(?:async\s+def|def|class)\s")
_TELLING = re.compile(rb"\w{3}")


class Found(NamedTuple):
    """A place: the hunk goes after line `after` of the new file, at `spot`, found in way `how`."""

    after: int
    spot: Spot
    how: How


class Lost(NamedTuple):
    """No place: the reason, whether what it was in is gone, and the line of the new file to look at (0: none)."""

    reason: str
    gone: bool = False
    near: int = 0


def spot_of(module: Module, lines: list[bytes], hunk: hunks.Insertion) -> Spot:
    """Where the hunk is once inserted into the file of `lines`, which `module` is the parse of.

    Told by place and indentation: parsing every file with every hunk takes ten times as long.
    """
    code = next((line for line in hunk.lines if line.strip()), b"")
    indent = len(code) - len(code.lstrip())
    # A decorator with its own definition decorates that one, not what comes behind it.
    decorator = code.lstrip().startswith(b"@") and not any(_DEFINES.match(line) for line in hunk.lines)
    inner: Scope | None = None
    for scope in module.scopes:
        if decorator and scope.first - 1 <= hunk.after < scope.line:
            return Spot(scope.name.rpartition(".")[0], scope.name)
        within = scope.line <= hunk.after < scope.last
        # Behind its last line, only what is indented deeper than its `def` belongs to it.
        ends = scope.last <= hunk.after and indent > scope.node.col_offset
        if within or (ends and not any(line.strip() for line in lines[scope.last : hunk.after])):
            inner = scope  # scopes come outer first
    return Spot(inner.name if inner else "", "")


def find(old: bytes, new: bytes, hunk: hunks.Insertion) -> Found | Lost:
    """The place of `hunk`, made for `old`, in `new`.

    Raises:
        SyntaxError, ValueError: one of the files is not Python.
    """
    before = spot_of(parse(old), hunks.split_lines(old), hunk)
    if old == new:
        return Found(hunk.after, before, "unchanged")
    there = parse(new)
    lines = hunks.split_lines(new)
    merged = merge(old, new, hunk.after)
    if merged is not None:
        spot = spot_of(there, lines, hunk._replace(after=merged))
        same = spot == before and _same_definition(before, parse(old), hunk.after, there, merged)
        if same or not _still_there(before, there):
            return Found(merged, spot, "merge")
    found = _by_scope(old, new, hunk, before)
    if isinstance(found, Lost):
        return found
    spot = spot_of(there, lines, hunk._replace(after=found))
    if spot != before:
        return Lost(f"beside the same lines it would be at {spot}, not {before}", near=found)
    return Found(found, spot, "imports" if is_import(hunk) else "scope")


@lru_cache(maxsize=4096)
def merge(old: bytes, new: bytes, after: int) -> int | None:
    """Where git's three-way merge carries an insertion behind line `after` of `old`; None where it conflicts.

    A mark is merged, not the hunk's text, so that a hunk whose lines occur elsewhere has one place and no other.
    """
    with tempfile.TemporaryDirectory() as folder:
        marked = hunks.apply(old, (hunks.Insertion(after, (_MARK,)),), "old")
        for name, data in (("ours", marked), ("base", old), ("theirs", new)):
            Path(folder, name).write_bytes(data)
        done = editing.run_git(["merge-file", "-p", "--quiet", "ours", "base", "theirs"], Path(folder))
    if done.returncode < 0 or done.returncode > 127:
        raise PatchError(f"git merge-file failed: {done.stderr.decode(errors='replace').strip()}")
    if done.returncode:
        return None
    return done.stdout.split(b"\n").index(_MARK)


def is_import(hunk: hunks.Insertion) -> bool:
    """Whether the hunk only imports patch code."""
    return all(_IMPORT.match(line) for line in hunk.lines)


def _still_there(spot: Spot, module: Module) -> bool:
    name = spot.decorates or spot.scope
    return not name or bool(module.named(name))


def _same_definition(spot: Spot, here: Module, after: int, there: Module, merged: int) -> bool:
    """Whether the places are in the same one of the definitions of that name, of which there are as many as before.

    Where upstream defines a function twice now, git puts the hunk into one of them, and the other goes without.
    """
    name = spot.decorates or spot.scope
    ours, theirs = here.named(name), there.named(name)
    if len(ours) == len(theirs):
        return not ours or _which(ours, after) == _which(theirs, merged)
    return len(list(filter(_first_of_its_name, ours))) == len(list(filter(_first_of_its_name, theirs)))


def _which(scopes: list[Scope], after: int) -> int:
    return max((at for at, scope in enumerate(scopes) if scope.first - 1 <= after), default=0)


def _first_of_its_name(scope: Scope) -> bool:
    """Not a setter, or a signature for type checkers: they come beside the function of the same name."""
    told = (ast.unparse(entry).rpartition(".")[2] for entry in scope.node.decorator_list)
    return not {"setter", "deleter", "overload"} & set(told)


def _by_scope(old: bytes, new: bytes, hunk: hunks.Insertion, spot: Spot) -> int | Lost:
    here, there = parse(old), parse(new)
    if is_import(hunk) and not spot.scope:
        return _behind_imports(there)
    name = spot.decorates or spot.scope
    if not name:
        return _beside(old, new, hunk, (1, len(hunks.split_lines(old))), (1, len(hunks.split_lines(new))))
    ours, theirs = here.named(name), there.named(name)
    if not theirs:
        return _gone(name, there)
    if len(ours) != len(theirs):
        return Lost(f"{name} is defined {len(theirs)} times, before {len(ours)}", near=theirs[0].line)
    at = next((at for at, scope in enumerate(ours) if scope.first - 1 <= hunk.after <= scope.last), None)
    if at is None:
        return Lost(f"it is not beside the only {name}", near=theirs[0].line)
    if spot.decorates:
        return _above(old, new, hunk.after, ours[at], theirs[at])
    return _beside(old, new, hunk, (ours[at].first, ours[at].last), (theirs[at].first, theirs[at].last))


def _gone(name: str, there: Module) -> Lost:
    parent = name
    while parent := parent.rpartition(".")[0]:
        if around := there.named(parent):
            return Lost(f"{name} is gone ({parent} is still there)", gone=True, near=around[0].line)
    last = name.rpartition(".")[2]
    alike = [scope for scope in there.scopes if scope.name.rpartition(".")[2] == last]
    hint = f"; now there: {', '.join(scope.name for scope in alike[:3])}" if alike else ""
    return Lost(f"{name} is gone{hint}", gone=True, near=alike[0].line if alike else 0)


def _behind_imports(module: Module) -> int | Lost:
    """The line behind the last import before the first definition."""
    last = 0
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            break
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node.end_lineno or node.lineno
    return last or Lost("the file has no imports before its first definition")


def _above(old: bytes, new: bytes, after: int, ours: Scope, theirs: Scope) -> int | Lost:
    """A decorator's place: first of all, last of all, or above the decorator it was above."""
    if after == ours.first - 1:
        return theirs.first - 1
    if after == ours.line - 1:
        return theirs.line - 1
    follows = hunks.split_lines(old)[after].strip()
    alike = [
        at
        for at, line in enumerate(hunks.split_lines(new)[theirs.first - 1 : theirs.line - 1])
        if line.strip() == follows
    ]
    if len(alike) == 1:
        return theirs.first - 1 + alike[0]
    return Lost(f"the decorators of {theirs.name} are others", near=theirs.first)


def _beside(
    old: bytes, new: bytes, hunk: hunks.Insertion, ours: tuple[int, int], theirs: tuple[int, int]
) -> int | Lost:
    """The place beside the line that was above or below, within lines `ours` and `theirs` (first, last; 1-based)."""
    before = hunks.split_lines(old)[ours[0] - 1 : ours[1]]
    behind = hunks.split_lines(new)[theirs[0] - 1 : theirs[1]]
    base = theirs[0] - 1
    at = hunk.after - (ours[0] - 1)  # lines of `before` above the hunk
    line_of = _alignment(before, behind)
    above = next((n for n in range(at - 1, -1, -1) if before[n].strip()), None)
    below = next((n for n in range(at, len(before)) if before[n].strip()), None)
    after = line_of.get(above) if above is not None else None
    until = line_of.get(below) if below is not None else None
    if above is not None and below is not None and after is not None and until is not None:
        fresh = [line for line in behind[after + 1 : until] if line.strip()]
        if fresh:
            return Lost(f"upstream put {len(fresh)} lines where it goes: before or behind them?", near=base + after + 1)
        return base + min(after + 1 + (at - 1 - above), until)
    near = base + (after + 1 if after is not None else until if until is not None else _nearest(line_of, at))
    if above is not None and after is not None and _sure(before, above, behind, after):
        blank = next((gap for gap, line in enumerate(behind[after + 1 :]) if line.strip()), len(behind) - after - 1)
        return base + after + 1 + min(at - 1 - above, blank)
    if below is not None and until is not None and _sure(before, below, behind, until):
        blank = next((gap for gap in range(until) if behind[until - 1 - gap].strip()), until)
        return base + until - min(below - at, blank)
    return Lost("the lines above and below it are others", near=near)


def _sure(before: list[bytes], here: int, behind: list[bytes], there: int) -> bool:
    """Whether two equal lines are the same one: it has words, and it is the only such line or its neighbours agree."""
    if not _TELLING.search(behind[there]):
        return False
    around = [
        (before[here + step], behind[there + step])
        for step in (-1, 1)
        if 0 <= here + step < len(before) and 0 <= there + step < len(behind)
    ]
    return behind.count(behind[there]) == 1 or any(one == other and one.strip() for one, other in around)


def _alignment(before: list[bytes], behind: list[bytes]) -> dict[int | None, int]:
    """Index in `before` to index in `behind`, of lines that are the same."""
    matcher = difflib.SequenceMatcher(None, before, behind, autojunk=False)
    return {
        start + offset: other + offset for start, other, size in matcher.get_matching_blocks() for offset in range(size)
    }


def _nearest(line_of: dict[int | None, int], at: int) -> int:
    known = [key for key in line_of if key is not None and key < at]
    return line_of[max(known)] + 1 if known else 0
