"""Checks of a whole series against the installed upstream."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import typer
import unidiff
from rich.markup import escape
from rich.table import Table

from sglang_patches import activate, editing, hunks
from sglang_patches.errors import PatchError
from sglang_patches.port.upstreamed import defines
from sglang_patches.series import Patch, Series, load, releases
from sglang_patches.upstream import Upstream, digest

_RUNTIME_IMPORT = re.compile(rb"\s*from sglang_patches\.runtime(?:\.(\w+))? import (\w+)")
_URL = re.compile(r"https://\S+")
_WHY = re.compile(r"ours|(?:ours|temporary until upstream|cannot go upstream): \S.*", re.DOTALL)


class Result(NamedTuple):
    """One check of one subject; `problem` is empty where it passed."""

    check: str
    subject: str
    problem: str


def run(upstream: Upstream, series: Series) -> Iterator[Result]:
    """Run every check; yields one result each."""
    yield from _files(series)
    for patch in series.patches:
        yield Result("header", patch.name, "; ".join(_header(patch, series)))
        yield Result("runtime code", patch.name, "; ".join(_runtime(patch)))
        yield Result("adds lines only", patch.name, _only_adds(patch))
        for path in patch.touches:
            yield Result("pre-image", f"{patch.name}: {path}", _pre_image(patch, path, upstream))
        for path, name in patch.adds:
            yield Result("upstream lacks what it adds", f"{patch.name}: {path} {name}", _there(upstream, path, name))
        yield Result("re-export is a no-op", patch.name, _re_export(patch, series, upstream))
    texts = _Texts(upstream)
    for kind, group in _groups(series):
        name = " + ".join(patch.name for patch in group)
        problems = texts.problems(group)
        yield Result(kind, name, "; ".join(problems))
        if kind != "pair" and not problems:
            for tool in ("git apply", "patch"):
                yield Result(f"{tool} agrees", name, _cross_check(tool, texts, group))


def report(upstream: Upstream, series: Series, as_json: bool) -> bool:
    """Print every failure and a count of each check; whether all passed."""
    results = list(run(upstream, series))
    failed = [result for result in results if result.problem]
    if as_json:
        document = {"release": series.release, "ok": not failed, "results": [result._asdict() for result in results]}
        typer.echo(json.dumps(document, indent=2))
        return not failed
    from sglang_patches.cli import console

    table = Table("Check", "Subject", "Result", title=f"{len(series.patches)} patches on sglang {series.release}")
    for check in dict.fromkeys(result.check for result in results):
        ours = [result for result in results if result.check == check]
        bad = [result for result in ours if result.problem]
        if not bad:
            table.add_row(check, f"{len(ours)}", "[green]passed[/green]")
        for result in bad:
            table.add_row(check, escape(result.subject), f"[red]{escape(result.problem)}[/red]")
    console().print(table)
    return not failed


def _files(series: Series) -> Iterator[Result]:
    listed = {"series"} | {f"{patch.name}.patch" for patch in series.patches}
    for file in sorted(series.folder.iterdir()):
        problem = "" if file.name in listed else f"{file} is not in the series: list it, or remove it"
        yield Result("files and series agree", file.name, problem)
    for one, other in itertools.combinations(series.patches, 2):
        if one.insertions == other.insertions:
            yield Result("no duplicates", f"{one.name}, {other.name}", "both patches insert the same lines")
    if os.environ.get("SGLANG_PATCHES_DIR"):
        return  # another series than the one this package's code is for
    package = Path(activate.__file__).parent
    lanes = [load(release, series.folder.parent) for release in releases(series.folder.parent)]
    used = {module for lane in lanes for patch in lane.patches for module in _runtime_modules(patch)}
    for module in sorted(package.glob("runtime/[a-z]*")):
        if module.suffix == ".py" or (module / "__init__.py").is_file():
            named = re.compile(rf"\b{module.stem}\b")
            others = (file for file in package.rglob("*.py") if file != module and module not in file.parents)
            alive = module.stem in used or any(named.search(file.read_text(encoding="utf-8")) for file in others)
            problem = "" if alive else "neither a patch of the series nor another module names it"
            yield Result("runtime code is used", module.name, problem)


def _header(patch: Patch, series: Series) -> Iterator[str]:
    if "TODO" in patch.header:
        yield "a TODO is left"
    if len(patch.summary) > 100:
        yield f"the first line of Description has {len(patch.summary)} characters, at most 100 fit tables"
    why = patch.field("Why")
    if not _WHY.fullmatch(why):
        yield f"Why is {why!r}, expected 'ours', 'temporary until upstream: URL' or 'cannot go upstream: REASON'"
    if why.startswith("temporary") and not _URL.search(why):
        yield "Why is 'temporary until upstream' without a link"
    try:
        day = date.fromisoformat(patch.field("Last-Update"))
        if day > date.today() + timedelta(days=1):  # written in a time zone ahead of this one
            yield f"Last-Update {day} is in the future"
    except ValueError:
        yield f"Last-Update is {patch.field('Last-Update')!r}, expected a date like 2026-01-31"
    forwarded = patch.field("Forwarded")
    if forwarded not in ("no", "not-needed") and not _URL.fullmatch(forwarded):
        yield f"Forwarded is {forwarded!r}, expected no, not-needed or a link"
    order = list(series.by_name)
    for other in patch.requires + patch.conflicts:
        left_out = other in patch.conflicts and other in series.left_out
        if (other not in series.by_name and not left_out) or other == patch.name:
            yield f"names {other!r} in Requires or Conflicts, which is no other patch of the series"
        elif other in patch.requires and order.index(other) > order.index(patch.name):
            yield f"requires {other}, which comes later in the series"
    for module, package in patch.provides.items():
        if module not in activate.ROOTS:
            yield f"provides {module}, expected one of {', '.join(activate.ROOTS)} (sglang_patches.activate.ROOTS)"
        if find_spec(package) is None:
            yield f"provides {module} as {package}, which is not installed"


def _runtime_modules(patch: Patch) -> set[str]:
    lines = (line for insertions in patch.insertions.values() for entry in insertions for line in entry.lines)
    found = (_RUNTIME_IMPORT.match(line) for line in lines)
    return {(match[1] or match[2]).decode() for match in found if match}


def _runtime(patch: Patch) -> Iterator[str]:
    for module in sorted(_runtime_modules(patch)):
        if find_spec(f"sglang_patches.runtime.{module}") is None:
            yield f"imports sglang_patches.runtime.{module}, which does not exist"
        if not module.startswith("_") and module != patch.name.replace("-", "_"):
            yield f"imports sglang_patches.runtime.{module}, the module of another patch"


def _only_adds(patch: Patch) -> str:
    """An independent reading of the diff, which must agree with ours."""
    parsed = unidiff.PatchSet.from_string(patch.file.read_bytes().decode())
    if sum(file.removed for file in parsed):
        return f"removes {sum(file.removed for file in parsed)} lines"
    theirs = {
        file.path: tuple(
            hunks.Insertion(hunk.source_start, tuple(line.value.rstrip("\n").encode() for line in hunk))
            for hunk in file
            if all(line.is_added for line in hunk)
        )
        for file in parsed
    }
    return "" if theirs == patch.insertions else "unidiff reads other insertions from it than we do"


def _pre_image(patch: Patch, path: str, upstream: Upstream) -> str:
    data = upstream.read(path)
    if data is None:
        return f"sglang {upstream.release} has no such file in {upstream.root}"
    found, expected = digest(data), patch.pre_images[path]
    return "" if found == expected else f"expected {expected}, found {found} in {upstream.path(path)}"


def _there(upstream: Upstream, path: str, name: str) -> str:
    try:
        found = defines(upstream.read(path) or b"", name)
    except (SyntaxError, ValueError) as error:
        return f"this interpreter does not read {path}: {error}"
    return f"sglang {upstream.release} has it: the patch adds nothing there" if found else ""


def _re_export(patch: Patch, series: Series, upstream: Upstream) -> str:
    try:
        exported = editing.export(series, upstream, patch.name)
    except PatchError as error:
        return str(error)
    same = exported == patch.file.read_bytes()
    return "" if same else f"the file differs from its re-export; run: sglang-patches refresh {patch.name}"


def _groups(series: Series) -> Iterator[tuple[str, tuple[Patch, ...]]]:
    """Every patch alone, every pair, and all, each with what it requires and without impossible combinations."""

    def closed(wanted: Iterable[Patch]) -> tuple[Patch, ...]:
        names: set[str] = set()
        queue = [patch.name for patch in wanted]
        while queue:
            name = queue.pop()
            if name in series.by_name and name not in names:
                names.add(name)
                queue += series[name].requires
        return tuple(patch for patch in series.patches if patch.name in names)

    def possible(group: tuple[Patch, ...]) -> bool:
        names = {patch.name for patch in group}
        return not any(other in names for patch in group for other in patch.conflicts)

    for patch in series.patches:
        yield "alone", closed([patch])
    for pair in itertools.combinations(series.patches, 2):
        if possible(closed(pair)):
            yield "pair", closed(pair)
    everything: tuple[Patch, ...] = ()
    for patch in series.patches:
        if possible(closed([*everything, patch])):
            everything = closed([*everything, patch])
    if everything:
        yield "all together", everything


class _Texts:
    """Patched files, each made and compiled once however many groups need it."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self._problems: dict[tuple[str, tuple[str, ...]], str] = {}

    def insertions(self, group: tuple[Patch, ...]) -> dict[str, hunks.Insertions]:
        paths = dict.fromkeys(path for patch in group for path in patch.touches)
        return {path: hunks.combine(p.insertions[path] for p in group if path in p.insertions) for path in paths}

    def problems(self, group: tuple[Patch, ...]) -> list[str]:
        found = []
        for path, insertions in self.insertions(group).items():
            key = path, tuple(patch.name for patch in group if path in patch.insertions)
            if key not in self._problems:
                self._problems[key] = self._compile(path, insertions)
            found += [self._problems[key]] if self._problems[key] else []
        return found

    def _compile(self, path: str, insertions: hunks.Insertions) -> str:
        try:
            text = hunks.apply(self.upstream.read(path) or b"", insertions, path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's own
                compile(text, path, "exec", dont_inherit=True)
        except (PatchError, SyntaxError, ValueError) as error:
            return f"{path} does not compile: {error}" if not isinstance(error, PatchError) else str(error)
        return ""


def _cross_check(tool: str, texts: _Texts, group: tuple[Patch, ...]) -> str:
    """Apply the group with an independent tool (a single patch as it is committed) and compare every byte."""
    insertions = texts.insertions(group)
    if len(group) == 1:
        diff = group[0].file.read_bytes()
    else:
        diff = b"".join(hunks.render(path, entry) for path, entry in insertions.items())
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for path in insertions:
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(texts.upstream.read(path) or b"")
        problem = apply_with(tool, diff, tree)
        if problem:
            return problem
        for path, entry in insertions.items():
            if (tree / path).read_bytes() != hunks.apply(texts.upstream.read(path) or b"", entry, path):
                return f"{tool} makes another {path} than we do"
    return ""


def apply_with(tool: str, diff: bytes, tree: Path) -> str:
    """Apply `diff` in `tree` with `git apply` or `patch`; returns what went wrong, or the empty string."""
    with tempfile.NamedTemporaryFile(suffix=".patch") as file:
        file.write(diff)
        file.flush()
        if tool == "git apply":
            done = editing.run_git(["apply", "--unidiff-zero", "-p1", "--whitespace=nowarn", file.name], tree)
        else:
            try:
                command = [
                    "patch",
                    "-p1",
                    "--batch",
                    "--fuzz=0",
                    "--binary",
                    "--no-backup-if-mismatch",
                    "-i",
                    file.name,
                ]
                done = subprocess.run(command, cwd=tree, capture_output=True)
            except FileNotFoundError:
                return "the command `patch` is not installed; install GNU patch"
    output = (done.stdout + done.stderr).decode(errors="replace").strip()
    return f"{tool} failed: {output}" if done.returncode else ""
