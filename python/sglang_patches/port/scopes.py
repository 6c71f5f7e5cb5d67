"""Classes, functions and names of one Python file, for telling where in it a line is."""

from __future__ import annotations

import ast
import builtins
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# What an `elif`, an `else` or an `except` must follow.
_BRANCHES = (("if 0: pass\n", ""), ("try: pass\n", ""))


class Scope(NamedTuple):
    """A class or function: `first` is the line of its first decorator, `line` that of `class` or `def`, 1-based."""

    name: str
    first: int
    line: int
    last: int
    node: Definition


class Spot(NamedTuple):
    """Where an inserted line is, in terms that outlive line numbers.

    Attributes:
        scope: dotted name of the innermost class or function it is in; empty at module level.
        decorates: dotted name of the class or function it decorates, or empty.
    """

    scope: str
    decorates: str

    def __str__(self) -> str:
        return f"above {self.decorates}" if self.decorates else self.scope or "module level"


class Module:
    """One parsed file.

    Raises:
        SyntaxError, ValueError: it is not Python.
    """

    def __init__(self, data: bytes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's own
            self.tree = ast.parse(data)
        self.scopes = list(_scopes(self.tree, ""))

    def named(self, name: str) -> list[Scope]:
        """Every class or function of that dotted name: more than one where branches or overloads define it."""
        return [scope for scope in self.scopes if scope.name == name]

    def body(self, scope: str) -> list[ast.AST]:
        """The definitions of that dotted name; the module for the empty one."""
        return [entry.node for entry in self.named(scope)] if scope else [self.tree]

    def runs_at_import(self, scope: str) -> bool:
        """Whether code in `scope` runs as the module is imported: in the module itself, or in a class of it."""
        parts = scope.split(".") if scope else []
        around = [entry for size in range(len(parts)) for entry in self.named(".".join(parts[: size + 1]))]
        return all(isinstance(entry.node, ast.ClassDef) for entry in around)

    def bound(self, scope: str, after: int) -> set[str]:
        """Names that code behind line `after`, in `scope`, can read.

        The scope's own count if they are bound above; those of functions around it and of the module wherever they are,
        for they are bound by the time it runs.
        """
        names = {*dir(builtins), *own_names(self.tree, None if scope else after)}
        parts = scope.split(".") if scope else []
        for size in range(1, len(parts) + 1):
            innermost = size == len(parts)
            for entry in self.named(".".join(parts[:size])):
                if innermost or not isinstance(entry.node, ast.ClassDef):
                    names |= own_names(entry.node, after if innermost else None)
        return names


# As many as the patches touch and name in two releases: with fewer, those of the old one are parsed for every new one.
@lru_cache(maxsize=256)
def parse(data: bytes) -> Module:
    """`Module(data)`, remembered: releases share most files, and patches touch the same ones."""
    return Module(data)


def statements(lines: Sequence[bytes]) -> list[ast.AST]:
    """Nodes of a hunk's lines on their own: statements, branches, a decorator, entries of a table; else none."""
    text = textwrap.dedent(b"\n".join(lines).decode("utf-8", "replace"))
    for before, behind in (("", ""), ("", "\ndef _(): pass"), ("_ = {\n", "\n}"), ("_(\n", "\n)"), *_BRANCHES):
        try:
            tree = ast.parse(f"{before}{text}{behind}")
        except (SyntaxError, ValueError):
            continue
        return [node for node in ast.walk(tree) if getattr(node, "name", getattr(node, "id", "")) != "_"]
    return []


def read_by(nodes: Sequence[ast.AST], bodies: bool = True) -> set[str]:
    """Names that these nodes read; without `bodies`, only outside of functions' bodies, which run later."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    later = [] if bodies else [inner for node in functions for entry in node.body for inner in ast.walk(entry)]
    return {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node not in later
    }


def bound_by(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that imports among these nodes bind."""
    return {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}


def signature(node: ast.AST) -> str:
    """A function's parameters as source; a class's bases."""
    if isinstance(node, ast.ClassDef):
        return ", ".join(ast.unparse(base) for base in node.bases)
    return ast.unparse(node.args) if isinstance(node, _FUNCTIONS) else ""


def _scopes(tree: ast.AST, prefix: str) -> Iterator[Scope]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _DEFINITIONS):
            name = f"{prefix}{node.name}"
            first = min([node.lineno, *(entry.lineno for entry in node.decorator_list)])
            yield Scope(name, first, node.lineno, node.end_lineno or node.lineno, node)
            yield from _scopes(node, f"{name}.")
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _scopes(node, prefix)


def own_names(top: ast.AST, after: int | None = None) -> set[str]:
    """Names bound in a scope itself, down to line `after`; branches count, nested definitions' insides do not."""
    names: set[str] = set()
    queue = list(ast.iter_child_nodes(top))
    while queue:
        node = queue.pop()
        if after is not None and getattr(node, "lineno", 0) > after:
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        else:
            queue += ast.iter_child_nodes(node)
    return names
