"""What the page shows of one result."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from sglang_patches.bench import findings, folder, words
from sglang_patches.bench.model import HIGHER_IS_BETTER, Result
from sglang_patches.bench.report import charts
from sglang_patches.bench.tables import FIGURES, Cell, Interval, Table, finite, number, said

_TELLING = ("SLOWER", "FASTER", "AMBIGUOUS", "SAME")
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass
class Section:
    """One result as the page shows it; every text is as found, the template escapes it.

    Attributes:
        verdict: (word, tone) of its most telling verdict; empty where it has none.
        facts: (label, text) pairs.
        code: (arm, what it adds, sentences on its code state).
        apart: (sentence, single differences) of arms' code states.
        warnings: what a reader must know before believing it.
        outcomes: (arm, patch, result, detail): what each patch did.
    """

    name: str
    kind: str
    where: str
    headline: str
    when: str = ""
    machine: str = ""
    command: str = ""
    how_to_read: str = ""
    verdict: tuple[str, str] = ("", "")
    tables: list[Table] = field(default_factory=list)
    charts: list[tuple[str, Markup]] = field(default_factory=list)
    plot: str = ""
    facts: list[tuple[str, str]] = field(default_factory=list)
    code: list[tuple[str, str, list[str]]] = field(default_factory=list)
    apart: list[tuple[str, list[str]]] = field(default_factory=list)
    outcomes: list[tuple[str, str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    turns: Table | None = None


def of(result: Result, where: Path) -> Section:
    """The section of a result that `folder.load` read from the folder `where`."""
    count = folder.count_samples(where)
    document = words.any_document(result)
    found = findings.tables(result)
    section = Section(
        name=result.name,
        kind=result.kind,
        where=str(where),
        headline=result.headline,
        when=result.when,
        machine=words.machine(document) if document else "",
        command=words.command(result.command),
        how_to_read=words.HOW_TO_READ[result.kind],
        verdict=_verdict(result, found),
        tables=found,
        charts=_charts(result),
        turns=_turns(result),
        outcomes=_outcomes(result),
    )
    section.plot, trouble = plot(where / folder.PLOT)
    section.facts = [
        ("raw samples", f"{count.total:,} ({words.samples(count.by_arm)})" if count.total else "none kept"),
        ("turns", str(len(result.turns) or "")),
        ("work", words.workload(result)),
        ("allowed", "; ".join(result.allowed) or "nothing"),
    ]
    for arm in result.arms:
        told = words.document_of(result, arm.name)
        section.code.append((f"{arm.name} ({arm.spec})", words.arm(arm), words.code(told) if told else []))
    if result.document:
        section.code.append(("the measuring process", "", words.code(result.document)))
    section.apart = [
        (f"A is {one.baseline}, B is {one.arm}: {one.said}", [str(entry) for entry in one.differences if entry.matters])
        for one in words.apart(result)
    ]
    section.warnings = findings.notes(result) + ([trouble] if trouble else [])
    noted = " ".join(section.warnings)
    if untold := [arm for arm in words.untold(result) if f"arm {arm}'s servers tell no provenance" not in noted]:
        section.warnings.append(f"no code state was told by: {', '.join(untold)}")
    section.warnings += [f"servers of one arm were of several patch sets: {entry}" for entry in words.unsteady(result)]
    if count.failed:
        section.warnings.append(f"{count.failed:,} requests failed")
    if count.unreadable:
        section.warnings.append(f"{count.unreadable:,} lines of samples.jsonl are no samples")
    return section


def _verdict(result: Result, found: list[Table]) -> tuple[str, str]:
    """Of the primary figure: its only one, or of several (effects, arms) a difference that is shown before none."""
    primary = str(result.analysis.get("primary", ""))
    rows = [row for table in found for row in table.rows if row and row[0].text == FIGURES.get(primary, primary)]
    if result.kind == "factorial" and found:
        rows = found[0].rows
    verdicts = [cell for row in rows for cell in row if cell.text in _TELLING and cell.tone]
    if not verdicts:
        return "", ""
    first = min(verdicts, key=lambda cell: _TELLING.index(cell.text))
    return first.text, first.tone


def plot(file: Path) -> tuple[str, str]:
    """(data URI of a PNG, trouble); both empty where there is no file."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return "", ""
    except OSError as error:
        return "", f"{file.name} cannot be read: {error.strerror}"
    if not data.startswith(_PNG):
        return "", f"{file.name} is no PNG"
    return f"data:image/png;base64,{base64.b64encode(data).decode()}", ""


def _charts(result: Result) -> list[tuple[str, Markup]]:
    """The turns' main figures: the one that a bisection was about, or speed and verify time."""
    told = [name for name in HIGHER_IS_BETTER if sum(name in turn.figures for turn in result.turns) > 1]
    about = [name for name in (result.analysis.get("metric"),) if name in told]
    wanted = about or [name for name in ("tokens_per_s", "verify_ms") if name in told] or told[:1]
    drawn = [(FIGURES.get(name, name), charts.turns(result.turns, name, FIGURES.get(name, name))) for name in wanted]
    return [(title, chart) for title, chart in [*drawn, *_grid(result.analysis)] if chart]


def _grid(analysis: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """Of rows with batch sizes (verify-step)."""
    rows = [row for rows in analysis.values() if isinstance(rows, list) for row in rows if isinstance(row, dict)]
    return grid(rows)


def grid(rows: list[dict[str, Any]]) -> list[tuple[str, Markup]]:
    """Milliseconds of a cycle over the batch size: a chart for each context and path, a line for each draft length."""
    drawn: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        batch = finite(row.get("batch_size"))
        value = finite(row.get("cycle"))
        if batch is None or value is None or value <= 0:
            continue
        title, line = "ms per cycle by batch size", str(row.get("mode", "all"))
        if "draft_tokens" in row:
            title = f"{title}, context {said('', row.get('context')).text}, {line}"
            line = f"{row['draft_tokens']} draft tokens" if row["draft_tokens"] else "no speculation"
        drawn.setdefault(title, {}).setdefault(line, {})[batch] = value
    return [(title, charts.lines(series, "batch size", title)) for title, series in drawn.items()]


def _turns(result: Result) -> Table | None:
    if not result.turns:
        return None
    figures = list(dict.fromkeys(name for turn in result.turns for name in turn.figures))
    columns = ["turn", "block", "arm", "ready after, s", *(FIGURES.get(name, name) for name in figures), "outputs"]
    rows = []
    for turn in result.turns:
        cells = [said("", turn.index), said("", turn.block), Cell(turn.arm), Cell(number(turn.ready_s), number=True)]
        cells += [said(name, turn.figures.get(name)) for name in figures]
        rows.append([*cells, Cell((turn.output_sha256 or "unknown")[:12])])
    return Table("", columns, rows)


def _outcomes(result: Result) -> list[tuple[str, str, str, str]]:
    """Of the last turn of each arm, whose counters have counted most."""
    last = {turn.arm: turn.outcomes for turn in result.turns}
    rows = []
    for arm, outcomes in last.items():
        for patch, told in outcomes.items():
            entry = told if isinstance(told, Mapping) else {"result": told}
            more = {name: value for name, value in entry.items() if name not in ("result", "detail")}
            detail = "; ".join(filter(None, (str(entry.get("detail", "")), said("", more).text if more else "")))
            rows.append((arm, patch, said("", entry.get("result")).text, detail))
    return rows


def interval_scale(table: Table) -> charts.Scale | None:
    """The scale of a table's bars; None where it has no interval."""
    found: list[Interval] = [cell.interval for row in table.rows for cell in row if cell.interval]
    return charts.scale(found, table.margin or 0.0) if found else None
