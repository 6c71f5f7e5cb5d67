"""Any analysis as tables, by its shape alone.

Every kind of result writes what it found as nested objects. Those that say a ratio with its bounds become rows with an
interval, lists of like objects become tables of their fields, and what is left is told by its names: nothing is left
out because this module does not know it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_patches.bench.model import Result

#: Of a figure: what people call it, and the factor from how it is kept.
FIGURES = {
    "tokens_per_s": "tokens/s",
    "ttft_ms_p50": "time to first token, ms (p50)",
    "ttft_ms_p95": "time to first token, ms (p95)",
    "ttft_ms_p99": "time to first token, ms (p99)",
    "tpot_ms_p50": "time per output token, ms (p50)",
    "tpot_ms_p95": "time per output token, ms (p95)",
    "tpot_ms_p99": "time per output token, ms (p99)",
    "verify_ms": "ms per verify cycle",
    "accept_length": "accept length, tokens",
    "graph_share": "share of passes in CUDA graphs",
}
TONES = {"FASTER": "good", "SLOWER": "bad", "SAME": "same", "AMBIGUOUS": "unclear"}
_ANSWERS = {"good": "good", "bad": "bad", "unclear": "unclear"}
_MIDDLES = ("ratio", "effect", "estimate", "value", "median")
_SHARES = {"smallest_detectable", "margin", "threshold", "confidence"}
# Relative difference above which its size tells no one anything: nearly every difference is below it.
_HUGE = 10.0
_ARMS = 8
_MORE = 200  # rows of one table; beyond, they are counted


@dataclass(frozen=True)
class Interval:
    """A ratio with its bounds; None is no bound."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Cell:
    """Text, or a number told as text; `tone`: good, bad, same, unclear, or empty."""

    text: str
    interval: Interval | None = None
    tone: str = ""
    number: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
        margin: relative difference up to which an interval counts as the same.
        folded: details, which a page shows when asked.
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    margin: float | None = None
    folded: bool = False


@dataclass
class _Rest:
    facts: list[list[Cell]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def generic(analysis: Mapping[str, Any], means: Mapping[str, Mapping[str, float]]) -> list[Table]:
    """Any analysis as tables, those with intervals first.

    Args:
        means: arm -> figure -> mean, shown beside the comparisons of that figure.
    """
    rest = _Rest()
    _walk("", analysis, means, rest)
    facts = [Table("", ["", ""], rest.facts)] if rest.facts else []
    return sorted([*facts, *rest.tables], key=lambda table: not _telling(table))


def _telling(table: Table) -> bool:
    return any(cell.interval for row in table.rows for cell in row)


def _walk(title: str, value: Mapping[str, Any], means: Mapping[str, Mapping[str, float]], rest: _Rest) -> None:
    compared = {name: entry for name, entry in value.items() if is_comparison(entry)}
    if compared:
        rest.tables.append(_rows(title, compared, means))
    for name, entry in value.items():
        inside = f"{title}: {words(name)}" if title else words(name)
        if name in compared:
            continue
        if isinstance(entry, Mapping) and entry and all(isinstance(one, Mapping) for one in entry.values()):
            if any(is_comparison(one) for one in entry.values()) or not _flat(entry.values()):
                _walk(inside, entry, means, rest)
            else:
                rest.tables.append(_rows(inside, entry, {}))
        elif isinstance(entry, Mapping) and entry:
            _walk(inside, entry, means, rest)
        elif isinstance(entry, Sequence) and not isinstance(entry, str) and entry:
            if all(isinstance(one, Mapping) for one in entry):
                rest.tables.append(rows_table(inside, entry))
            else:
                rest.facts.append([Cell(inside), Cell(said(name, entry).text)])
        else:
            rest.facts.append([Cell(inside), Cell(said(name, entry).text)])


def rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row each, a column a field; a ratio and its bounds share two."""
    return _rows(title, {str(index): row for index, row in enumerate(rows)}, {}, keyed=False)


def is_comparison(value: Any) -> bool:
    """Whether it says a middle and its bounds."""
    return isinstance(value, Mapping) and {"low", "high"} <= value.keys() and _middle(value) is not None


def _middle(value: Mapping[str, Any]) -> str | None:
    return next((name for name in _MIDDLES if name in value), None)


def _flat(rows: Any) -> bool:
    return not any(isinstance(cell, Mapping) for row in rows for cell in row.values())


def _rows(
    title: str,
    rows: Mapping[str, Mapping[str, Any]],
    means: Mapping[str, Mapping[str, float]],
    keyed: bool = True,
) -> Table:
    """One row an entry, a column a field; a middle and its bounds share two columns."""
    flat = {key: dict(_flatten(row)) for key, row in rows.items()}
    fields = list(dict.fromkeys(name for row in flat.values() for name in row))
    alike: dict[str, Any] = {}
    for name in set(fields) & {"margin", "confidence", "comparisons"}:  # options, told once where all rows agree
        seen = [row.get(name) for row in flat.values()]
        if all(one == seen[0] for one in seen):
            alike[name] = seen[0]
    fields = [name for name in fields if name not in alike and name != "higher_is_better"]
    arms = [arm for arm in means if any(key in means[arm] for key in flat)] if keyed else []
    with_interval = any(is_comparison(row) for row in flat.values())
    middle = next((name for row in flat.values() if is_comparison(row) for name in [_middle(row)]), None)
    if with_interval:
        fields = [name for name in fields if name not in ("low", "high", middle)]
    # What a narrow screen shows without scrolling: which row it is, the verdict, the interval.
    first = [] if keyed or not with_interval else fields[:1]
    first += [name for name in ("verdict", "answer") if name in fields and with_interval]
    fields = [name for name in fields if name not in first]
    columns = ([""] if keyed else []) + [words(name) for name in first]
    columns += [words(str(middle)), "interval"] if with_interval else []
    columns += arms + [words(name) for name in fields]
    out = []
    for key, row in list(flat.items())[:_MORE]:
        cells = [Cell(FIGURES.get(key, words(key)))] if keyed else []
        cells += [said(name, row.get(name)) for name in first]
        if with_interval:
            cells += _interval(row, str(middle))
        cells += [said(key, means[arm].get(key)) for arm in arms]
        out.append(cells + [said(name, row.get(name)) for name in fields])
    note = "; ".join(f"{words(name)} {said(name, alike[name]).text}" for name in sorted(alike))
    if len(flat) > _MORE:
        note = "; ".join(filter(None, (note, f"{len(flat) - _MORE} more rows are in result.json")))
    margin = next((row["margin"] for row in flat.values() if isinstance(row.get("margin"), int | float)), None)
    return Table(title, columns, out, note, margin)


def _flatten(row: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        inside = f"{under}{name}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{inside} ")
        else:
            yield inside, value


def _interval(row: Mapping[str, Any], middle: str) -> list[Cell]:
    if not is_comparison(row):
        return [Cell("-"), Cell("-")]
    value, low, high = (finite(row.get(name)) for name in (middle, "low", "high"))
    bounds = f"{'-∞' if low is None else number(low)} to {'∞' if high is None else number(high)}"
    interval = Interval(value, low, high) if middle == "ratio" else None
    return [said(middle, row.get(middle)), Cell(bounds, interval, number=True)]


def means(result: Result) -> dict[str, dict[str, float]]:
    """Arm -> figure -> `mean` over its turns; none where there are more arms than a table has room for."""
    if len(result.arms) > _ARMS:
        return {}
    out: dict[str, dict[str, float]] = {}
    for arm in result.arms:
        turns = [turn.figures for turn in result.turns if turn.arm == arm.name]
        figures = dict.fromkeys(name for turn in turns for name in turn)
        out[arm.name] = {
            name: mean([turn[name] for turn in turns if name in turn]) for name in figures
        }  # fmt: skip
    return {arm: figures for arm, figures in out.items() if figures}


def mean(values: Sequence[float]) -> float:
    """Geometric where all are positive, as ratios are means of; else arithmetic."""
    if all(value > 0 for value in values):
        return math.exp(sum(map(math.log, values)) / len(values))
    return sum(values) / len(values)


def finite(value: Any) -> float | None:
    """The number, None for what is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def words(name: str) -> str:
    """A field's name as people write it; names of other things (NCCL_PROTO=LL, patches) as they are."""
    if name == "comparisons":
        return "judged together"
    return FIGURES.get(name, name.replace("_", " ") if re.fullmatch("[a-z0-9_]+", name) else name)


def said(name: str, value: Any) -> Cell:
    """A value as a cell, by the name of its field."""
    if name == "verdict" and isinstance(value, str):
        return Cell(value, tone=TONES.get(value, ""))
    if name == "answer" and isinstance(value, str):
        return Cell(value, tone=_ANSWERS.get(value, ""))
    if name in _SHARES and finite(value) is not None:
        return Cell(f"{100 * value:.3g} %" if value <= _HUGE else percentage(value), number=True)
    if value is None:
        return Cell("-")
    if isinstance(value, bool):
        return Cell("yes" if value else "no")
    if isinstance(value, int | float):
        return Cell(number(value), number=True)
    if isinstance(value, Mapping):
        return Cell(", ".join(f"{words(str(key))} {said(str(key), entry).text}" for key, entry in value.items()) or "-")
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = [said("", entry).text for entry in value[:40]]
        return Cell((", ".join(shown) + (f", and {len(value) - 40} more" if len(value) > 40 else "")) or "none")
    return Cell(str(value))


def percentage(share: float) -> str:
    """A relative difference for people: 0.031 is `3.1 %`. What is beyond ten times the figure is said as just that."""
    if share > _HUGE:
        return f"> {100 * _HUGE:.0f} %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def unseen(what: str, share: float) -> str:
    """What of `what` (a plural) so few or so scattered turns would not find, as a clause."""
    if share > _HUGE:
        return f"even {what} of {100 * _HUGE:.0f} % would mostly go unseen"
    return f"{what} below {percentage(share)} would mostly go unseen"


def number(value: float) -> str:
    """With as many digits as tell: 0.9871, 94.13, 1,024."""
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size >= 15 or size < -6:
        return f"{value:.3g}"
    return f"{value:,.{max(0, 3 - size)}f}"
