"""The section of a `benchmark.spec_plan` result: tokens per second by arm, and where greedy answers part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_patches.bench.tables import Cell, Interval, Table, number

Data = Mapping[str, Any]

_TONES = {"FASTER": "good", "SLOWER": "bad", "SAME": "same", "AMBIGUOUS": "unclear"}
_OVER = "_over_"
# Timed, prefill included, where a result does not say what was.
_WHOLE = "whole answers"


def fits(data: Data) -> bool:
    """Whether it is one, of the format that has intervals."""
    return {"engines", "summary", "break_even", "partings"} <= data.keys()


def tables(data: Data) -> list[Table]:
    """Speeds, partings of answers, single differences and engines.

    Args:
        data: what `benchmark.spec_plan.run` wrote; see `benchmark.spec_plan.summary`.
    """
    # Results of before arms could be compared to another one do not say which.
    found = [_speeds(data["summary"], data["break_even"], data.get("over", "none"), data.get("timed", _WHOLE))]
    found.append(_partings(data["partings"]))
    found += [_differences(data["answers"]), _engines(data["engines"])]
    return [table for table in found if table.rows]


def _speeds(rows: list[Data], even: list[Data], over: str, timed: str) -> Table:
    arms = list(dict.fromkeys(name for row in rows for name in row if f"{name}{_OVER}{over}" in row))
    crossing = {row["batch_size"]: row for row in even}
    columns = ["batch", "accept length", f"{over}, tok/s"]
    for arm in arms:
        columns += [f"{arm}, tok/s", f"{arm} / {over}", "interval", "rounds"]
        columns += [f"{arm} breaks even"] if any(arm in row for row in even) else []
    told = []
    for row in rows:
        length = "-" if row["accept_length"] is None else number(row["accept_length"])
        cells = [Cell(str(row["batch_size"]), number=True), Cell(length, number=True)]
        cells.append(Cell(number(row[over]) if over in row else "-", number=True))
        for arm in arms:
            cells += [
                Cell(number(row[arm]) if arm in row else "-", number=True),
                *_ratio(row.get(f"{arm}{_OVER}{over}")),
            ]
            if any(arm in one for one in even):
                cells.append(Cell(_even(crossing.get(row["batch_size"], {}).get(arm)), number=True))
        told.append(cells)
    note = "ratios are geometric means over the rounds; each interval is of 95 %, by itself"
    return Table(f"tokens per second of a batch: {timed}", columns, told, note)


def _ratio(compared: Data | None) -> list[Cell]:
    if compared is None:
        return [Cell("-")] * 3
    rounds = Cell(str(compared["rounds"]), number=True)
    if compared["rounds"] < 2:
        return [Cell(number(compared["ratio"]), number=True), Cell("one round: none"), rounds]
    bounds = Interval(compared["ratio"], compared["low"], compared["high"])
    text = f"{number(compared['low'])} to {number(compared['high'])} {compared['verdict']}"
    return [Cell(number(compared["ratio"]), number=True), Cell(text, bounds, _TONES[compared["verdict"]], True), rounds]


def _even(between: list[float | None] | None) -> str:
    if between is None:
        return "-"
    low, high = between
    if low is None or high is None:
        return f"below {high:g}" if low is None else f"above {low:g}"
    return number(low)


def _partings(rows: list[Data]) -> Table:
    columns = ["engines", "pairs", "whole answers equal", "tokens compared", "first differences per 1,000"]
    told = [
        [
            Cell(" and ".join(row["arms"])), Cell(str(row["pairs"]), number=True),
            Cell(f"{row['equal']} of {row['answers']}", number=True), Cell(f"{row['tokens']:,}", number=True),
            Cell(number(row["per_thousand"]), number=True),
        ]
        for row in rows
    ]  # fmt: skip
    note = (
        "answers are compared up to their first difference; a pair without speculation tells how often chance does it"
    )
    return Table("greedy answers of two engines", columns, told, note)


def _differences(rows: list[Data]) -> Table:
    columns = ["arm", "round", "answer", "token at", "none's", "its own", "apart in none, nats", "noise, most"]
    told = []
    for row in rows:
        for one in row["differences"]:
            gap = "not among the best" if one["gap"] is None else f"{one['gap']:.3f}"
            tone = "" if one["explained"] else "bad"
            cells = [Cell(row["arm"]), *(Cell(str(one[name]), number=True) for name in ("answer", "position"))]
            cells.insert(1, Cell(str(row["round"]), number=True))
            cells += [Cell(str(one[name]), number=True) for name in ("none", "other")]
            told.append([*cells, Cell(gap, None, tone, True), Cell(f"{row['noise_most']:.3f}", number=True)])
    note = "a difference within twice the most noise of a logprob is rounding's"
    return Table("first differences from the first engine of none", columns, told, note, folded=True)


def _engines(rows: list[Data]) -> Table:
    columns = ["arm", "round", "GPU", "start, s"]
    told = [
        [Cell(row["arm"]), *(Cell(str(row[name]), number=True) for name in ("round", "gpu", "start_seconds"))]
        for row in rows
    ]
    return Table("engines", columns, told, folded=True)
