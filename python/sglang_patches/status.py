"""What the selection comes to in this environment, and the patched tree as files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from sglang_patches import activate, cache, import_path, provenance, selection
from sglang_patches.errors import PatchError
from sglang_patches.overlay import Overlay
from sglang_patches.series import Patch, Series
from sglang_patches.upstream import Upstream, digest

_COLOURS = {"applied": "green", "off": "dim", "not needed": "dim", "mismatch": "bold red", "inactive": "bold red"}


def states(upstream: Upstream, series: Series, text: str | None = None) -> list[tuple[Patch, str, str]]:
    """(patch, state, detail) of every patch. `text` is the selection; by default that of this process's environment.

    States: `applied`, `off`, `not needed` (for machines without a GPU, and this may have one), `mismatch` (a pre-image
    differs), `inactive` (selected, but this interpreter did not process `sglang_patches.pth`).

    Raises:
        PatchError: the selection is unusable.
    """
    text = os.environ.get(selection.VARIABLE, "") if text is None else text
    on = {patch.name for patch in selection.select(series, text)}
    active = activate.finder() is not None
    rows = []
    for patch in series.patches:
        differing = [path for path, sha in patch.pre_images.items() if digest(upstream.read(path) or b"") != sha]
        detail = f"differs from the pre-image: {', '.join(differing)}" if differing else ""
        if patch.name in on:
            state = "mismatch" if differing else "applied" if active else "inactive"
        elif patch.default == "no-gpu" and f"-{patch.name}" not in text and selection.has_gpu():
            state, detail = "not needed", detail or "for machines without a GPU"
        else:
            state = "off"
        rows.append((patch, state, detail))
    return rows


def report(upstream: Upstream, series: Series, as_json: bool) -> bool:
    """Print the state of every patch; whether all selected ones apply."""
    rows = states(upstream, series)
    ok = all(state not in ("mismatch", "inactive") for _, state, _ in rows)
    patch_set = provenance.patch_set(upstream.release, tuple(p for p, state, _ in rows if state == "applied"))
    document: dict[str, Any] = {
        "release": upstream.release,
        "lane": str(series.folder),
        "root": upstream.root,
        "selection": os.environ.get(selection.VARIABLE, ""),
        "active": activate.finder() is not None,
        "cache": cache.folder(),
        "import_path": import_path.exposed(os.environ),
        "id": patch_set["id"],
        "patches": [{"name": patch.name, "state": state, "detail": detail} for patch, state, detail in rows],
    }
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return ok
    from sglang_patches.cli import console

    table = Table("Patch", "State", "Detail", title=f"patch set {patch_set['id']} on sglang {upstream.release}")
    for patch, state, detail in rows:
        table.add_row(f"[bold]{patch.name}[/bold]", f"[{_COLOURS[state]}]{state}[/]", escape(detail))
    out = console()
    out.print(table)
    selected = document["selection"] or "(unset: each patch's default)"
    where = {
        "lane": f"{series.release} ({series.folder})",
        "selection": selected,
        "upstream": f"{upstream.root}/sglang",
        "cache": document["cache"],
    }
    out.print(escape("\n".join(f"{name:<10} {value}" for name, value in where.items())))
    for folder, reason in document["import_path"].items():
        out.print(
            escape(
                f"`python -m` started here looks for modules in {folder} first, and {reason}: start a server by "
                "`sglang-patches launch` or with PYTHONSAFEPATH=1, and keep that folder off PYTHONPATH"
            ),
            style="bold yellow",
        )
    if any(state == "inactive" for _, state, _ in rows):
        out.print(
            "[bold red]Python started without processing sglang_patches.pth, so no patch is applied:[/] install this "
            "distribution into the environment (PYTHONPATH is not enough) and start Python without -S."
        )
    return ok


def build_tree(upstream: Upstream, on: tuple[Patch, ...], directory: Path) -> dict[str, Any]:
    """Write the whole `sglang` package with `on` applied to `directory`; returns (and writes) the patch set.

    Raises:
        PatchError: a pre-image differs, or `directory` is a file or not empty.
        OSError: it cannot be written.
    """
    overlay = Overlay(upstream, on)
    patched = {}
    for path in overlay.by_path:
        patched[path] = overlay.patched(path, overlay.check(path, upstream.read(path), upstream.path(path)))
    if directory.exists() and not directory.is_dir():
        raise PatchError(f"{directory} is a file\n  remedy     name a new folder")
    if directory.exists() and any(directory.iterdir()):
        raise PatchError(f"{directory} is not empty\n  remedy     name a new folder, or remove this one first")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(os.path.join(upstream.root, "sglang"), directory / "sglang", ignore=ignored)
    for path, data in patched.items():
        (directory / path).write_bytes(data)
    state = provenance.patch_set(upstream.release, on)
    (directory / "sglang-patches.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return state
