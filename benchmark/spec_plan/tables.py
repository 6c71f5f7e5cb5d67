"""What `summary.of` tells, in tables of Markdown."""

from __future__ import annotations

from typing import Any

from benchmark.spec_plan.engine import BASELINE, WHOLE, order

PER_SECOND = "per second"
#: What `summary.speeds` gives `by_host`.
BY_HOST = "per prefill"
_SHORT = {PER_SECOND: "tok/s", BY_HOST: "tok/prefill"}


def lines(result: dict[str, Any], *, differences: bool = True) -> list[str]:
    """Lines of Markdown of what `summary.of` returns; `differences`: each first difference of two answers, too."""
    unit = result.get("unit", PER_SECOND)
    speeds = _speed_lines(result["summary"], result["break_even"], result.get("over", BASELINE), _SHORT[unit])
    # Results of before answers of one token were timed do not say.
    parts = [[f"Tokens {unit} of {result.get('timed', WHOLE)}:"]] if speeds else []
    parts += [speeds]
    parts += [_answer_lines(result["answers"])]
    parts += [_difference_lines(result["answers"])] if differences else []
    parts += [_parting_lines(result["partings"])]
    found: list[str] = []
    for part in parts:
        found += [*([""] if found and part else []), *part]
    return found


def _speed_lines(rows: list[dict[str, Any]], even: list[dict[str, Any]], over: str, unit: str) -> list[str]:
    arms = order(name for row in rows for name in row)
    gains = [arm for arm in arms if any(f"{arm}_over_{over}" in row for row in rows)]
    if not arms:
        return []
    heads = [*(f"{arm}, {unit}" for arm in arms), *(f"{arm} / {over} (interval, rounds)" for arm in gains)]
    told = [arm for arm in gains if any(arm in row for row in even)]
    found = _head(["batch", "accept length", *heads, *(f"{arm} breaks even" for arm in told)])
    for row in rows:
        length = "-" if row["accept_length"] is None else f"{row['accept_length']:g}"
        cells = [str(row["batch_size"]), length, *(f"{row[arm]:.0f}" if arm in row else "-" for arm in arms)]
        cells += [_ratio(row.get(f"{arm}_over_{over}")) for arm in gains]
        at = next((one for one in even if one["batch_size"] == row["batch_size"]), {})
        found.append(_line([*cells, *(_even(at.get(arm)) for arm in told)]))
    return found


def _ratio(compared: dict[str, Any] | None) -> str:
    if compared is None:
        return "-"
    told = f"{compared['ratio']:.3f}"
    if compared["rounds"] < 2:
        return f"{told} (one round)"
    interval = f"{compared['low']:.3f} to {compared['high']:.3f}"
    return f"{told} ({interval}, {compared['rounds']}) {compared['verdict']}"


def _even(between: tuple[float | None, float | None] | None) -> str:
    if between is None:
        return "-"
    low, high = between
    if low is None:
        return f"below {high:g}"
    return f"above {low:g}" if high is None else f"{low:.2f}"


def _answer_lines(same: list[dict[str, Any]]) -> list[str]:
    if not same:
        return []
    found = _head(
        ["arm", "round", "answers as of none", "noise, nats: median", "most", "first differences explained by it"]
    )
    for row in same:
        explained = sum(told["explained"] for told in row["differences"])
        noise = [f"{row['noise_median']:.2g}", f"{row['noise_most']:.2g}"]
        cells = [row["arm"], str(row["round"]), f"{row['equal']} of {row['answers']}", *noise]
        found.append(_line([*cells, f"{explained} of {len(row['differences'])}"]))
    return found


def _difference_lines(same: list[dict[str, Any]]) -> list[str]:
    if not any(row["differences"] for row in same):
        return []
    found = _head(["arm", "round", "answer", "token at", "none's", "its own", "apart in none, nats"])
    for row in same:
        for told in row["differences"]:
            gap = "not among the best" if told["gap"] is None else f"{told['gap']:.3f}"
            cells = [told["answer"], told["position"], told["none"], told["other"]]
            found.append(_line([row["arm"], str(row["round"]), *map(str, cells), gap]))
    return found


def _parting_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    found = _head(["engines", "pairs", "whole answers equal", "tokens compared", "first differences per 1,000"])
    for row in rows:
        equal = f"{row['equal']} of {row['answers']}"
        cells = [" and ".join(row["arms"]), str(row["pairs"]), equal, str(row["tokens"]), f"{row['per_thousand']:.0f}"]
        found.append(_line(cells))
    return found


def _line(cells: list[str]) -> str:
    return " | ".join(["", *cells, ""]).strip()


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]
