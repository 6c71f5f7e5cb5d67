"""What a result found, as tables: those that its kind is known for, and all else in its analysis as `tables` tells it.

An analysis that lacks what its kind usually writes is told by its names alone: nothing is left out, nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sglang_patches.bench.model import HIGHER_IS_BETTER, Result
from sglang_patches.bench.tables import Cell, Interval, Table, finite, generic, means, number, rows_table, said, words

#: A cycle, and its phases in the order in which they happen.
PHASES = ("cycle", "draft_decode", "verify", "decode", "sampling", "draft_extend", "host_gap")

_Rest = dict[str, Any]


def tables(result: Result) -> list[Table]:
    """What was found, most telling first."""
    known: Callable[[Result, _Rest], list[Table]] | None = _KNOWN.get(result.kind)
    rest = {name: value for name, value in result.analysis.items() if name != "notes" or not _are_notes(value)}
    found: list[Table] = []
    if known is not None:
        left = dict(rest)
        try:
            found = known(result, left)
            rest = left
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
            found = []
    return [*found, *generic(rest, means(result))]


def notes(result: Result) -> list[str]:
    """Sentences of the analysis on what else there is to know."""
    value = result.analysis.get("notes")
    return [*value] if isinstance(value, list) and _are_notes(value) else []


def _are_notes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _compared(result: Result, rest: _Rest) -> list[Table]:
    """Two arms: every figure, the primary one first."""
    compared, primary = rest.pop("comparisons"), rest.pop("primary", None)
    for name in ("a", "b", "margin", "confidence", "seed", "looks"):
        rest.pop(name, None)
    return generic(_first(compared, primary), means(result))


def _against_upstream(result: Result, rest: _Rest) -> list[Table]:
    """Each arm against the baseline."""
    compared, primary, baseline = rest.pop("comparisons"), rest.pop("primary", None), str(rest.pop("baseline"))
    for name in ("margin", "confidence", "seed", "looks"):
        rest.pop(name, None)
    of, found = means(result), []
    for arm, figures in compared.items():
        pair = {name: of[name] for name in (baseline, arm) if name in of}
        found += [
            replace(table, title=f"{arm} against {baseline}") for table in generic(_first(figures, primary), pair)
        ]  # fmt: skip
    return found


def _first(compared: Mapping[str, Any], primary: Any) -> dict[str, Any]:
    if not all(isinstance(entry, Mapping) for entry in compared.values()):
        raise TypeError(f"comparisons by figure were expected, not {compared!r}")
    return {**{name: entry for name, entry in compared.items() if name == primary}, **compared}


def _factorial(result: Result, rest: _Rest) -> list[Table]:
    """Effects on each figure, the primary one open; then the runs."""
    effects, primary = rest.pop("effects"), rest.pop("primary", "")
    order = sorted(effects, key=lambda name: (name != primary, list(HIGHER_IS_BETTER).index(name) if name in
                                              HIGHER_IS_BETTER else len(HIGHER_IS_BETTER)))  # fmt: skip
    found = [_effects(name, effects[name], folded=name != primary) for name in order]
    runs = rest.pop("runs", None)
    if isinstance(runs, Mapping) and runs:
        served = [
            {"arm": arm, **{name: "on" if on else "off" for name, on in run.items()}} for arm, run in runs.items()
        ]
        found.append(replace(rows_table("runs", served), folded=True))
    for name in ("margin", "confidence", "seed", "looks"):
        rest.pop(name, None)
    return found


def _effects(figure: str, of: Mapping[str, Any], folded: bool) -> Table:
    columns = ["", "verdict", "ratio", "interval", "alone", "kind", "cannot be told from", "smallest detectable"]
    rows = []
    for effect in of["effects"]:
        low, high = (
            finite(effect.get("low_adjusted", effect["low"])),
            finite(effect.get("high_adjusted", effect["high"])),
        )
        ratio = finite(effect["ratio"])
        rows.append([
            Cell(str(effect["name"])),
            said("verdict", effect.get("verdict")),
            said("ratio", ratio),
            Cell(_bounds(low, high), Interval(ratio, low, high), number=True),
            Cell(_bounds(finite(effect["low"]), finite(effect["high"])), number=True),
            said("kind", effect.get("kind")),
            said("aliases", effect.get("aliases") or "-"),
            said("smallest_detectable", effect.get("smallest_detectable")),
        ])  # fmt: skip
    told = [f"{words(name)} {said(name, of[name]).text}" for name in ("margin", "confidence") if name in of]
    if finite(of.get("residual")) is not None:
        told.append(f"noise {100 * of['residual']:.2g} % a turn, with {of.get('freedom')} degrees of freedom")
    if finite(of.get("drift")) is not None:
        told.append(f"drift {100 * of['drift']:+.2g} % a turn")
    note = f"interval: all effects' together (Bonferroni), alone: this one's; {'; '.join(told)}"
    return Table(words(figure), columns, rows, note, finite(of.get("margin")), folded)


def _bounds(low: float | None, high: float | None) -> str:
    return f"{'0' if low is None else number(low)} to {'∞' if high is None else number(high)}"


def _bisect(result: Result, rest: _Rest) -> list[Table]:
    """The changes to blame, bad against good, and every step that led there."""
    threshold = finite(rest.get("threshold"))
    found = []
    for name, title in (("suspects", "to blame"), ("checks", "whether each of them is needed")):
        if rest.get(name):
            found.append(rows_table(title, rest.pop(name)))
    ends = {name: rest.pop(name) for name in ("good", "bad", "rest", "healed") if isinstance(rest.get(name), dict)}
    found += [replace(table, title=f"{words(str(rest.get('metric', '')))} against good") for table in generic(ends, {})]
    found.append(rows_table("steps", rest.pop("steps")))
    return [replace(table, margin=threshold) for table in found]


def _verify_step(result: Result, rest: _Rest) -> list[Table]:
    """Phases of a cycle by draft tokens, context, batch and path; kernels of the cells that were profiled."""
    rows = rest.pop("rows")
    rest.pop("unit", None)
    phases = [name for name in PHASES if any(name in row for row in rows)]
    columns = ["draft tokens", "context", "batch", "path", *map(words, phases), "p10-p90", "floor", "decode steps"]
    columns += ["experts", "GPU busy", "graph share", "cycles"]
    # Results of earlier releases have no host's loop.
    timed = any(row.get("host_ms") for row in rows)
    columns += ["host loop"] if timed else []
    shown = []
    for row in rows:
        cells = [said("", row["draft_tokens"] or "none"), *(said("", row[name]) for name in ("context", "batch_size"))]
        cells.append(Cell(str(row["mode"])))
        cells += [_phase(row, name) for name in phases]
        cells.append(Cell(f"{number(row['p10'])}-{number(row['p90'])}" if "p10" in row else "-", number=True))
        cells += [said("", row.get(name)) for name in ("cycle_floor", "decode_steps", "experts_per_layer", "busy_ms")]
        cells += [said("", row.get("graph_share")), said("", row.get("cycles"))]
        shown.append([*cells, said("", row.get("host_ms"))] if timed else cells)
    note = (
        "medians in ms, in brackets how many times the floor; decode steps: the cycle over one step without "
        "speculation; experts: different ones a layer reads; GPU busy: ms in which the device did anything (profiler)"
        + ("; host loop: ms of a fixed loop of Python beside the cycles" if timed else "")
    )
    found = [Table("a cycle, in ms", columns, shown, note)]
    for name, title in (("kernels", "kernels of most time, of the cells that were profiled"), ("engines", "engines")):
        told = rest.pop(name, None) or []
        if isinstance(told, Mapping):
            told = [{name.removesuffix("s"): key, **one} for key, one in told.items()]
        if told:
            found.append(replace(rows_table(title, told), folded=True))
    return found


def _phase(row: Mapping[str, Any], name: str) -> Cell:
    value, floor = finite(row.get(name)), finite(row.get(f"{name}_floor"))
    if value is None:
        return Cell("-", number=True)
    return Cell(f"{value:.2f}" + (f" ({value / floor:.1f}x)" if floor else ""), number=True)


_KNOWN: dict[str, Callable[[Result, _Rest], list[Table]]] = {
    "ab": _compared,
    "compare-upstream": _against_upstream,
    "factorial": _factorial,
    "bisect": _bisect,
    "verify-step": _verify_step,
}
