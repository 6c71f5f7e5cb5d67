"""Finding results and rendering them to one HTML page that needs nothing but itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from sglang_patches.bench import folder
from sglang_patches.bench.report import charts, older, sections
from sglang_patches.bench.report.sections import Section
from sglang_patches.errors import PatchError
from sglang_patches.tune.moe import tables

#: Where results are looked for when none is named, below the working directory.
ROOTS = ("benchmark/results", "benchmark/allreduce/results", "benchmark/tiny_kimi/results")


@dataclass
class Found:
    """All results below some folders. `unread`: messages on what cannot be read; `skipped`: files of other kinds."""

    sections: list[Section] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def find(roots: Sequence[Path]) -> Found:
    """Read every result in these folders and files, newest first; what cannot be read does not stop the others.

    Raises:
        PatchError: a root does not exist.
    """
    found = Found()
    for root in roots:
        if not root.exists():
            raise PatchError(f"{root}: no such folder\n  remedy     name a result folder, or one that holds some")
        for place in _places(root):
            try:
                _read(place, found)
            except PatchError as error:
                found.unread.append(str(error))
    found.sections.sort(key=lambda section: section.name)
    found.sections.sort(key=lambda section: section.when, reverse=True)
    return found


def _read(place: Path, found: Found) -> None:
    if place.is_dir() or place.name == folder.RESULT:
        where = place if place.is_dir() else place.parent
        if not (where / folder.RESULT).exists():
            found.unfinished.append(str(where))
            return
        found.sections.append(sections.of(folder.load(where), where))
        return
    section = older.read(place)
    if section is None:
        found.skipped.append(str(place))
    else:
        found.sections.append(section)


def _places(root: Path) -> Iterator[Path]:
    """Result folders and JSON files at or below a root; nothing inside a result folder is another one."""
    if root.is_file():
        yield root
        return
    for name, inside, files in os.walk(root):
        inside[:] = sorted(entry for entry in inside if not entry.startswith("."))
        if folder.RESULT in files or "turns.jsonl" in files:
            inside.clear()
            yield Path(name)
        elif tables.RESULT in files:  # the tables below are what it tells
            inside.clear()
            yield Path(name, tables.RESULT)
        else:
            yield from (Path(name, file) for file in sorted(files) if file.endswith(".json"))


def render(found: Found, made: str = "") -> str:
    """The page.

    Args:
        made: when, for its foot; now if empty.
    """
    shown = [(f"{index}-{_slug(section.name)}", section) for index, section in enumerate(found.sections, 1)]
    return _template().render(shown=shown, found=found, made=made or datetime.now(UTC).isoformat(timespec="seconds"))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("sglang_patches.bench.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(bar=charts.bar, ends=charts.ends, scale_of=sections.interval_scale)
    environment.filters["wordiest"] = lambda text: max(map(len, text.split()), default=0)
    return environment.get_template("page.html.j2")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
