"""What a patch's own code imports of upstream and a release lacks: hooks may carry where their code cannot run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import sglang_patches
from sglang_patches import lane
from sglang_patches.port.scopes import own_names, parse
from sglang_patches.port.wheels import Wheel
from sglang_patches.series import Patch

_PACKAGE = Path(sglang_patches.__file__).parent


def missing(patch: Patch, release: Wheel, package: Path = _PACKAGE) -> list[str]:
    """Imports of upstream in `runtime/<patch>` that fail on `release`: `sglang.srt.x` or `sglang.srt.x: name`.

    Imports under `TYPE_CHECKING` and within `try` are left out: they may fail; so are files that the release's adapter
    says are not reached.
    """
    not_reached = lane.of(release.release).not_reached
    module = package / "runtime" / patch.name.replace("-", "_")
    files = sorted(module.rglob("*.py")) if module.is_dir() else [module.with_suffix(".py")]
    lacking = [
        said
        for file in files
        if file.is_file() and file.relative_to(package / "runtime").as_posix() not in not_reached
        for name in _imports(file)
        if (said := _lacks(name, release)) is not None
    ]
    return sorted(set(lacking))


def adapter_missing(release: Wheel, module: str = "") -> list[str]:
    """Imports of upstream that fail on `release` in its lane adapter, inherited methods included.

    Args:
        module: of the adapter; the release's own by default.
    """
    kind = type(lane.of(release.release)) if not module else import_module(module).Lane
    code: dict[str, ast.AST] = {}
    for base in reversed(kind.__mro__[:-1]):
        (body,) = (
            node
            for node in ast.parse(Path(inspect.getfile(base)).read_bytes()).body
            if isinstance(node, ast.ClassDef) and node.name == base.__name__
        )
        code |= {node.name: node for node in body.body if isinstance(node, ast.FunctionDef)}
    # Other classes beside the adapter's own are its helpers.
    helpers = ast.parse(Path(inspect.getfile(kind)).read_bytes()).body
    code |= {f"{node.name}()": node for node in helpers if isinstance(node, ast.ClassDef) and node.name != "Lane"}
    found = (_lacks(name, release) for node in code.values() for name in _of(node))
    return sorted({said for said in found if said is not None})


@lru_cache(maxsize=256)
def _imports(file: Path) -> tuple[tuple[str, str], ...]:
    return tuple(_of(ast.parse(file.read_bytes())))


def _of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of upstream below `node`; the name is empty for `import module`."""
    if isinstance(node, ast.Try) or (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
        return
    if isinstance(node, ast.Import):
        yield from ((entry.name, "") for entry in node.names if entry.name.partition(".")[0] == "sglang")
    elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "sglang":
        yield from ((node.module or "", entry.name) for entry in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _of(child)


def _lacks(wanted: tuple[str, str], release: Wheel) -> str | None:
    module, name = wanted
    path = module.replace(".", "/")
    package = release.read(f"{path}/__init__.py")
    data = package if package is not None else release.read(f"{path}.py")
    if data is None:
        # A folder without __init__.py is a package as well; only files in it can be imported from it.
        inside = name and (release.read(f"{path}/{name}.py") or release.read(f"{path}/{name}/__init__.py"))
        return None if inside else module
    if (
        not name
        or release.read(f"{path}/{name}.py") is not None
        or release.read(f"{path}/{name}/__init__.py") is not None
    ):
        return None
    try:
        names = own_names(parse(data).tree)
    except (SyntaxError, ValueError):
        return None  # for a newer Python than this one: nothing can be said
    return None if names & {name, "*", "__getattr__"} else f"{module}: {name}"
