"""Whether upstream has by now what a patch adds.

Two sources. The patch's header may say so: `Adds: PATH NAME` names what upstream lacks and the patch gives it (a hook's
own lines rarely show that). And the inserted lines: what they define, assign, register or enter into a table under a
constant key counts as upstream's once the new file does the same in the same class or function, and the old one did
not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sglang_patches import hunks
from sglang_patches.port.place import is_import
from sglang_patches.port.scopes import Definition, Spot, own_names, parse, statements


class Upstreamed(NamedTuple):
    """What upstream has now: `what` in words, and the lines of the new file, 1-based, that show it."""

    what: str
    path: str
    first: int
    last: int


def declared(adds: Sequence[tuple[str, str]], old: dict[str, bytes], new: dict[str, bytes]) -> Iterator[Upstreamed]:
    """The header's `Adds` that are in the new release and were not in the old one; files by path."""
    for path, name in adds:
        if path not in new or (path in old and defines(old[path], name)):
            continue
        for node in defines(new[path], name)[:1]:
            yield _shown(name, path, node)


def by_lines(old: bytes, new: bytes, hunk: hunks.Insertion, spot: Spot, path: str) -> Upstreamed | None:
    """What this hunk adds at `spot` of the old file and the new file has there of its own; None where nothing."""
    if old == new or is_import(hunk):
        return None
    here, there = parse(old), parse(new)
    if not spot.decorates:
        keys = [key for node in statements(hunk.lines) for key in _keys(node)]
        had = {key for body in here.body(spot.scope) for node in _inside(body) for key in _keys(node)}
        # A parameter or loop variable that the hunk sets anew is nothing that upstream lacked.
        had |= {f"{name} =" for body in here.body(spot.scope) for name in own_names(body)}
        for wanted in keys:
            for body in there.body(spot.scope) if wanted not in had else ():
                for node in _inside(body):
                    if wanted in _keys(node):
                        return _shown(wanted, path, node)
    return _same_lines(old, new, hunk, spot, path)


def _shown(what: str, path: str, node: ast.AST) -> Upstreamed:
    first, last = getattr(node, "lineno", 1), getattr(node, "end_lineno", None) or 1
    return Upstreamed(what, path, first, min(last, first + 5))


def _same_lines(old: bytes, new: bytes, hunk: hunks.Insertion, spot: Spot, path: str) -> Upstreamed | None:
    """Whether the hunk's very lines are in the new file's scope, and were not in the old one's."""
    wanted = [line.strip() for line in hunk.lines if line.strip()]
    name = spot.decorates or spot.scope
    if not any(len(line) > 8 for line in wanted) or _at(old, name, wanted):
        return None
    first = _at(new, name, wanted)
    return Upstreamed("the same lines", path, first, first + len(wanted) - 1) if first else None


def _at(data: bytes, name: str, wanted: list[bytes]) -> int:
    """First line number of `wanted` within the definition `name` (the file for ''); 0 where it is not there."""
    lines = [line.strip() for line in hunks.split_lines(data)]
    ranges = [(scope.first, scope.last) for scope in parse(data).named(name)] if name else [(1, len(lines))]
    for first, last in ranges:
        for at in range(first - 1, last - len(wanted) + 1):
            if lines[at : at + len(wanted)] == wanted:
                return at + 1
    return 0


def defines(data: bytes, name: str) -> list[ast.AST]:
    """Statements that define `name`: a class, a function, or an assignment in the module, the class or its methods.

    Raises:
        SyntaxError, ValueError: `data` is not Python.
    """
    module = parse(data)
    found: list[ast.AST] = [scope.node for scope in module.named(name)]
    parent, _, last = name.rpartition(".")
    for body in module.body(parent):
        found += [node for node in ast.iter_child_nodes(body) if last in _targets(node)]
        if isinstance(body, ast.ClassDef):
            found += [node for node in ast.walk(body) if f"self.{last}" in _targets(node)]
    return found


def _targets(node: ast.AST) -> list[str]:
    """What an assignment assigns to, as source."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return []


def _inside(top: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope, without the insides of definitions in it."""
    queue = list(ast.iter_child_nodes(top))
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, Definition):
            queue += ast.iter_child_nodes(node)


def _keys(node: ast.AST) -> list[str]:
    """What a node adds, in words that are the same wherever the same is added."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [f"def {node.name}"]
    if isinstance(node, ast.ClassDef):
        return [f"class {node.name}"]
    if targets := _targets(node):
        return [f"{target} =" for target in targets]
    if isinstance(node, ast.Dict):
        return [_entry(key) for key in node.keys if isinstance(key, ast.Constant)]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        return [f"{ast.unparse(node.func)}({node.args[0].value!r}, ...)"]
    return []


def _entry(key: ast.Constant) -> str:
    return f"entry {key.value!r}"
