"""What engines measured, by batch size and pinned accept length, and whether their answers are the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmark.spec_plan.engine import ARMS

Engine = dict[str, Any]
#: What others are compared to.
BASELINE = "none"


def speeds(engines: list[Engine], tokens: int) -> list[dict[str, Any]]:
    """A row for each batch size and pinned accept length: tokens per second by arm, and their ratio to ``none``.

    Args:
        engines: what `engine.measure` wrote, with the ``round`` it was measured in.
        tokens: of each answer.

    Returns: rows with ``batch_size``, ``accept_length`` (None where no arm speculates), ``<arm>`` (tokens per second,
        median of all repeats), ``<arm>_over_none`` (of the medians) and ``<arm>_least`` (the least ratio among rounds).
    """
    lengths = sorted({row["accept_length"] for one in engines for row in one["batches"]} - {None}) or [None]
    rows = []
    for size in dict.fromkeys(row["batch_size"] for one in engines for row in one["batches"]):
        for length in lengths:
            taken = _seconds(engines, size, length)
            row: dict[str, Any] = {"batch_size": size, "accept_length": length}
            for arm, rounds in taken.items():
                row[arm] = size * tokens / float(np.median(np.concatenate(list(rounds.values()))))
            for arm, rounds in taken.items():
                both = [number for number in rounds if arm != BASELINE and number in taken.get(BASELINE, {})]
                if both:
                    ratios = [np.median(taken[BASELINE][number]) / np.median(rounds[number]) for number in both]
                    row |= {f"{arm}_over_none": row[arm] / row[BASELINE], f"{arm}_least": float(min(ratios))}
            rows.append(row)
    return rows


def _seconds(engines: list[Engine], size: int, length: float | None) -> dict[str, dict[int, list[float]]]:
    """Seconds of a batch by arm and round; an arm that does not speculate has the same at every accept length."""
    taken: dict[str, dict[int, list[float]]] = {}
    for one in engines:
        for row in one["batches"]:
            if row["batch_size"] == size and row["accept_length"] in (None, length):
                taken.setdefault(one["arm"], {}).setdefault(one["round"], []).extend(row["seconds"])
    return taken


def break_even(engines: list[Engine], tokens: int) -> list[dict[str, Any]]:
    """The accept length at which each speculating arm gives as many tokens per second as ``none``.

    An answer takes a constant and its cycles, so seconds are a line in the number of cycles, through all answers at all
    accept lengths. Where it has the seconds of ``none``, so many cycles give `tokens` tokens.

    Returns: rows with ``batch_size``, and by arm ``<arm>`` (tokens a cycle) and ``<arm>_cycle_ms``, the line's slope.
        Left out is an arm that was measured at fewer than two accept lengths, or whose times scatter so much that the
        line falls or begins below 0. Cycles are those of the first request: others take a few more or less.
    """
    rows = []
    for size in dict.fromkeys(row["batch_size"] for one in engines for row in one["batches"]):
        row: dict[str, Any] = {"batch_size": size}
        plain = _seconds(engines, size, None).get(BASELINE)
        for arm in ARMS:
            batches = [
                batch for one in engines if one["arm"] == arm for batch in one["batches"] if batch["batch_size"] == size
            ]
            if plain is None or len({batch["accept_length"] for batch in batches}) < 2:
                continue
            passes = np.concatenate([batch["passes"] for batch in batches])
            slope, constant = np.polyfit(passes, np.concatenate([batch["seconds"] for batch in batches]), 1)
            over = float(np.median(np.concatenate(list(plain.values())))) - constant
            if slope > 0 and constant >= 0 and over > 0:
                row |= {arm: float(tokens * slope / over), f"{arm}_cycle_ms": float(slope * 1e3)}
        rows.append(row)
    return rows


def sameness(engines: list[Engine]) -> list[dict[str, Any]]:
    """Greedy answers of each engine against those of the first of ``none``, position by position.

    Up to the first difference of two answers both engines had the same tokens before each position, so their logprobs
    of one token differ by rounding alone (another kernel, or another shape of the same one): that is the ``noise``. A
    first difference is ``explained`` where, by ``none``, the two tokens lie no further apart than twice as much.

    Returns: rows with ``arm``, ``round``, ``answers``, ``equal`` (whole answers), ``noise_median`` and ``noise_most``
        (nats), and ``differences``: ``answer``, ``position``, ``none`` and ``other`` (tokens), ``gap`` (nats between
        them; None where the other is not one of the best that ``none`` told) and ``explained``.
    """
    reference = next((one for one in engines if one["arm"] == BASELINE and one["answers"]), None)
    if reference is None:
        return []
    return [_same(one, reference) for one in engines if one is not reference and one["answers"]]


def _same(one: Engine, reference: Engine) -> dict[str, Any]:
    noise: list[float] = []
    differences: list[dict[str, Any]] = []
    for number, (other, plain) in enumerate(zip(one["answers"], reference["answers"], strict=True)):
        pairs = list(zip(plain["tokens"], other["tokens"], strict=True))
        at = next((position for position, (a, b) in enumerate(pairs) if a != b), len(pairs))
        noise += [abs(a - b) for a, b in zip(plain["logprob"][:at], other["logprob"][:at], strict=True)]
        if at < len(pairs):
            best = dict(plain["best"][at])
            gap = best[pairs[at][0]] - best[pairs[at][1]] if pairs[at][1] in best else None
            told = {"answer": number, "position": at, "none": pairs[at][0], "other": pairs[at][1], "gap": gap}
            differences.append(told)
    most = max(noise, default=0.0)
    for told in differences:
        told["explained"] = told["gap"] is not None and told["gap"] <= 2 * most
    return {
        "arm": one["arm"],
        "round": one["round"],
        "answers": len(one["answers"]),
        "equal": len(one["answers"]) - len(differences),
        "noise_median": float(np.median(noise)) if noise else 0.0,
        "noise_most": float(most),
        "differences": differences,
    }


def tables(rows: list[dict[str, Any]], even: list[dict[str, Any]], same: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: speeds, accept lengths that break even, and answers."""
    lines: list[str] = []
    arms = [arm for arm in ARMS if any(arm in row for row in rows)]
    gains = [arm for arm in arms if any(f"{arm}_over_none" in row for row in rows)]
    if arms:
        heads = [*(f"{arm}, tok/s" for arm in arms), *(f"{arm} / none (least round)" for arm in gains)]
        lines += _head(["batch", "accept length", *heads])
    for row in rows:
        length = "-" if row["accept_length"] is None else f"{row['accept_length']:g}"
        cells = [str(row["batch_size"]), length, *(f"{row[arm]:.0f}" if arm in row else "-" for arm in arms)]
        for arm in gains:
            known = f"{arm}_over_none" in row
            cells.append(f"{row[f'{arm}_over_none']:.3f} ({row[f'{arm}_least']:.3f})" if known else "-")
        lines.append(_line(cells))
    told = [arm for arm in ARMS if any(arm in row for row in even)]
    if told:
        heads = [words for arm in told for words in (f"{arm} breaks even at", "its cycle, ms")]
        lines += ["", *_head(["batch", *heads])]
        for row in even:
            cells = [str(row["batch_size"])]
            for arm in told:
                cells += [f"{row[arm]:.2f}", f"{row[f'{arm}_cycle_ms']:.2f}"] if arm in row else ["-", "-"]
            lines.append(_line(cells))
    if same:
        heads = [
            "arm",
            "round",
            "answers as of none",
            "noise, nats: median",
            "most",
            "first differences explained by it",
        ]
        lines += ["", *_head(heads)]
        for row in same:
            explained = sum(told["explained"] for told in row["differences"])
            noise = [f"{row['noise_median']:.2g}", f"{row['noise_most']:.2g}"]
            cells = [row["arm"], str(row["round"]), f"{row['equal']} of {row['answers']}", *noise]
            lines.append(_line([*cells, f"{explained} of {len(row['differences'])}"]))
    return lines


def _line(cells: list[str]) -> str:
    return " | ".join(["", *cells, ""]).strip()


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]
