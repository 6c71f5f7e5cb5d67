"""Tables for people, and the plot."""

from __future__ import annotations

from math import isinf
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column, Table

from sglang_patches.nccl.candidates import AS_IT_COMES
from sglang_patches.nccl.check import Result
from sglang_patches.nccl.tune import Measured
from sglang_patches.nccl.verdict import Entry, Verdict
from sglang_patches.student import Interval

_COLOURS = {"taken": "green", "not told": "yellow", "not taken": "red"}


def checked(result: Result) -> RenderableType:
    """The table *set / seen by process / taken by NCCL*, what NCCL chose, and what is wrong."""
    table = Table("Variable", "Set", "By", "Seen by process", "Taken by NCCL", "Verdict", title="NCCL settings")
    for row in result.rows:
        colour = _COLOURS[row.verdict]
        words = f"[{colour}]{row.verdict}[/{colour}]" + (f": {escape(row.why)}" if row.why else "")
        cells = (row.name, row.wanted or "-", row.by, row.seen, row.told or "not told by NCCL")
        table.add_row(*map(escape, cells), words)
    lines: list[RenderableType] = [table]
    versions = result.facts.get("versions", {})
    lines.append(escape(f"NCCL {versions.get('nccl', '-')}, torch {versions.get('torch', '-')}"))
    for choice in result.facts.get("choices", []):
        lines.append(
            f"all-reduce of {choice['size_bytes']} bytes: {choice['algorithm']}, {choice['protocol']}, "
            f"{choice['channels']} channels"
        )
    if result.settings.profile.why:
        lines.append(escape(f"profile {result.settings.profile.name}: {result.settings.profile.why}"))
    if result.problems:
        lines += [f"[red]{escape(problem)}[/red]" for problem in result.problems]
    else:
        told = "every variable that is set was seen by every process"
        lines.append(f"[green]{told}, none was refused, and the sums are right[/green]")
    return Lines(*lines)


def tuned(measured: Measured, verdict: Verdict) -> RenderableType:
    """Median microseconds by size, and below it the ratio to NCCL as it comes with its interval."""
    sizes = measured.plan.job.rows
    title = f"microseconds per all-reduce of rows x {measured.plan.job.hidden} {measured.plan.job.dtype}"
    table = Table(Column("Candidate", no_wrap=True), *map(str, sizes), "All sizes", "Rounds", title=title)
    for entry in verdict.entries:
        name = escape(entry.candidate.name)
        if verdict.winner and entry.candidate.name == verdict.winner.name:
            name = f"[bold green]{name}[/bold green]"
        found = entry.comparison
        if found is None:
            continue
        cells = [_cell(found.median.get(rows), found.ratio.get(rows), entry) for rows in sizes]
        overall = "1" if entry.candidate.name == AS_IT_COMES else _ratio(found.overall)
        table.add_row(name, *cells, overall, str(found.rounds))
    lines: list[RenderableType] = [table, "below each median: ratio to NCCL as it comes, interval (95 %)"]
    for entry in verdict.entries:
        if entry.comparison is None:
            lines.append(escape(f"{entry.candidate.name}: {entry.out}"[:600]))
    for name, rows in verdict.crossovers.items():
        lines.append(f"{name} is faster than NCCL up to {rows} rows")
    lines += [f"[yellow]{escape(note)}[/yellow]" for note in verdict.notes]
    lines.append(f"[bold]{escape(verdict.why)}[/bold]")
    return Lines(*lines)


def _cell(median: Interval | None, ratio: Interval | None, entry: Entry) -> str:
    if median is None or ratio is None:
        return "-"
    if entry.candidate.name == AS_IT_COMES:
        return f"{median.value:.1f}"
    colour = "green" if ratio.high < 1 else "red" if ratio.low > 1 else "dim"
    return f"{median.value:.1f}\n[{colour}]{_ratio(ratio)}[/{colour}]"


def _ratio(interval: Interval) -> str:
    if isinf(interval.high):
        return f"{interval.value:.2f} (one round)"
    return f"{interval.value:.2f} ({interval.low:.2f}-{interval.high:.2f})"


def plot(measured: Measured, verdict: Verdict, file: Path, subtitle: str) -> str:
    """Draw time against size for every candidate that has figures.

    Returns:
        Why there is no plot; empty if there is one.
    """
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6))
    shown = [entry for entry in verdict.entries if entry.comparison]
    for index, entry in enumerate(shown):
        assert entry.comparison is not None
        sizes = sorted(entry.comparison.median)
        style = _style(entry, verdict, index)
        middle = [entry.comparison.median[rows].value for rows in sizes]
        axes.plot(sizes, middle, marker="o", markersize=3, label=entry.candidate.name, **style)
        if entry.comparison.rounds > 1:  # one round alone has no interval
            low = [entry.comparison.median[rows].low for rows in sizes]
            high = [entry.comparison.median[rows].high for rows in sizes]
            axes.fill_between(sizes, low, high, alpha=0.15, color=style["color"], linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(measured.plan.job.rows, [str(rows) for rows in measured.plan.job.rows])
    axes.set_xlabel(f"rows of {measured.plan.job.hidden} x {measured.plan.job.dtype}")
    axes.set_ylabel("µs per all-reduce (median, 95 % interval)")
    axes.set_title(f"all-reduce, TP {measured.plan.job.world}\n{subtitle}", fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    new = file.with_name(f"{file.name}.new")  # as the results: a reader sees the former plot or all of this one
    figure.savefig(new, format="png", dpi=130)
    new.replace(file)
    pyplot.close(figure)
    return ""


def _style(entry: Entry, verdict: Verdict, index: int) -> dict[str, Any]:
    if entry.candidate.name == AS_IT_COMES:
        return {"color": "black", "linewidth": 2.5, "zorder": 5}
    if verdict.winner and entry.candidate.name == verdict.winner.name:
        return {"color": "tab:green", "linewidth": 2.5, "zorder": 4}
    line = ("-", "--", ":", "-.")[index // 10 % 4]
    return {"color": f"C{index % 10}", "linewidth": 1, "linestyle": line}
