"""The table patch x release, and its place in docs/lanes.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from sglang_patches.errors import PatchError
from sglang_patches.port.carry import CARRIED, Hunk, Ported
from sglang_patches.port.lane import left_out

BEGIN, END = "<!-- port: from here to the end mark written by the command below -->", "<!-- port: end -->"
_COLOURS = {"clean": "green", "moved": "cyan", "upstreamed": "magenta", "conflict": "red", "target gone": "red"}

Columns = dict[str, Sequence[Ported]]


def cell(entry: Ported, without: dict[str, str]) -> str:
    """`clean`, `moved 2/7` (hunks that moved of all), `conflict 1/4`, with what else keeps the patch from running."""
    count = sum(hunk.outcome == entry.outcome for hunk in entry.hunks)
    said = entry.outcome if entry.outcome == "clean" else f"{entry.outcome} {count}/{len(entry.hunks)}"
    if entry.data is not None and not entry.missing and entry.patch.name in without:
        said += f"; {without[entry.patch.name].partition(',')[0]}"
    if entry.missing:
        said += "; code"
    return said


def table(source: str, columns: Columns) -> Table:
    """The matrix for a terminal."""
    made = Table("Patch", *columns, title=f"the patches on sglang {source}, carried to")
    for name in _names(columns):
        cells = []
        for ported in columns.values():
            without = left_out(ported)
            entry = next(entry for entry in ported if entry.patch.name == name)
            cells.append(f"[{_COLOURS[entry.outcome]}]{escape(cell(entry, without))}[/]")
        made.add_row(f"[bold]{name}[/bold]", *cells)
    return made


def markdown(source: str, columns: Columns) -> str:
    """The matrix and, hunk by hunk, what stands in the way."""
    first, last = next(iter(columns)), list(columns)[-1]
    to = first if first == last else f"{first}..{last}"
    out = [
        BEGIN,
        "",
        f"    sglang-patches port --dry-run --from {source} --to {to} --write docs/lanes.md",
        "",
        "| patch | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in _names(columns):
        cells = [
            cell(entry, left_out(ported)) for ported in columns.values() for entry in ported if entry.patch.name == name
        ]
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    whole = [
        f"{sum(entry.patch.name not in left_out(ported) for entry in ported)} of {len(ported)}"
        for ported in columns.values()
    ]
    out += [f"| **carried** | {' | '.join(whole)} |", "", "What stands in the way:", ""]
    for name in _names(columns):
        reasons = _reasons(name, columns)
        out += [
            f"- **{name}**",
            *(f"  - {reason} ({_spans(found, list(columns))})" for reason, found in reasons.items()),
        ][: None if reasons else 0]
    return "\n".join([*out, "", END])


def _reasons(name: str, columns: Columns) -> dict[str, list[str]]:
    """What is wrong with a patch, and the releases it is wrong for."""
    found: dict[str, list[str]] = {}
    for release, ported in columns.items():
        entry = next(entry for entry in ported if entry.patch.name == name)
        said = [_sentence(hunk, release) for hunk in entry.hunks if hunk.outcome not in CARRIED]
        said += [f"upstream has {shown.what}: `{shown.path}`" for shown in entry.upstreamed]
        said += [f"its code imports `{missing}`" for missing in entry.missing]
        for sentence in dict.fromkeys(said):
            found.setdefault(sentence, []).append(release)
    return found


def _sentence(hunk: Hunk, release: str) -> str:
    detail = hunk.detail.replace(f"sglang {release} has no {hunk.path}", "there is no such file")
    spot = f" {hunk.old_spot}" if hunk.old_spot else ""
    return f"{hunk.outcome}: `{hunk.path.removeprefix('sglang/srt/')}`{spot}: {detail}"


def _spans(found: list[str], releases: list[str]) -> str:
    """Releases as ranges: `0.5.17-0.5.19, 0.5.21`."""
    spans: list[list[str]] = []
    for release in found:
        if spans and releases.index(release) == releases.index(spans[-1][-1]) + 1:
            spans[-1].append(release)
        else:
            spans.append([release])
    return ", ".join(span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _names(columns: Columns) -> list[str]:
    return [entry.patch.name for entry in next(iter(columns.values()))]


def replace(file: Path, text: str) -> bool:
    """Put the matrix between the marks of `file`; whether that changed it.

    Raises:
        PatchError: the marks are not in the file.
        OSError: it cannot be read or written.
    """
    whole = file.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise PatchError(
            f"{file} has no place for the matrix\n"
            f"  expected   a line {BEGIN!r} and behind it a line {END!r}\n"
            f"  remedy     put the two lines where the matrix belongs"
        )
    if before + text + behind == whole:
        return False
    file.write_text(before + text + behind, encoding="utf-8")
    return True
