"""What engines measured, by batch size and pinned accept length, and whether their answers are the same."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.spec_plan.engine import AFTER_FIRST, BASELINE, WHOLE, decoding, order, split
from benchmark.spec_plan.tables import BY_HOST, lines
from sglang_patches.bench import statistics

Engine = dict[str, Any]
_SHARED = ("layers", "weights", "pair", "context")


def of(engines: list[Engine], tokens: int, over: str = BASELINE) -> dict[str, Any]:
    """All that is told of engines: ``timed``, ``headline``, ``summary``, ``break_even``, ``answers`` and ``partings``.

    ``over`` is the arm that the speeds of others are compared to. Raises ValueError as `timed` and `speeds` do.
    """
    rows = speeds(engines, tokens, over)
    told = {"timed": timed(engines), "headline": headline(rows, over), "summary": rows}
    told["break_even"] = break_even(rows) if over == BASELINE else []
    return {**told, "answers": sameness(engines), "partings": partings(engines)}


def timed(engines: list[Engine]) -> str:
    """What the rates of engines are of: `WHOLE` where answers of one token were not timed, as earlier results have it.

    Raises ValueError where some were and some were not, whose rates are not to be compared.
    """
    found = {AFTER_FIRST if "first_seconds" in row else WHOLE for one in engines for row in one["batches"]}
    if len(found) > 1:
        raise ValueError("some batches have `first_seconds` and some have not: measure again, into another file")
    return found.pop() if found else AFTER_FIRST


def headline(rows: list[dict[str, Any]], over: str = BASELINE) -> str:
    """The ratios to `over` in words: of each arm and accept length, at the smallest batch and the least of all."""
    said = []
    for arm in order(name for row in rows for name in row):
        name = f"{arm}_over_{over}"
        for length in dict.fromkeys(row["accept_length"] for row in rows if name in row):
            ratios = {row["batch_size"]: row[name] for row in rows if row["accept_length"] == length and name in row}
            first = ratios[min(ratios)]
            interval = f" ({first['low']:.3g} to {first['high']:.3g})" if first["rounds"] > 1 else ""
            least = min(ratios, key=lambda size: (round(ratios[size]["ratio"], 3), size))
            speculates = split(arm)[0].speculates
            at = f" and an accept length of {length:g}" if length is not None and speculates else ""
            said.append(
                f"{arm} gives {first['ratio']:.3f}{interval} times the tokens/s of {over} at batch {min(ratios)}{at}"
                + (f", {ratios[least]['ratio']:.3f} at batch {least}" if least != min(ratios) else "")
                + (f", the least of {len(ratios)} sizes" if len(ratios) > 1 else "")
            )
            if not speculates:
                break  # the same at every accept length
    return "; ".join(said)


def speeds(engines: list[Engine], tokens: int, over: str = BASELINE, *, by_host: bool = False) -> list[dict[str, Any]]:
    """A row for each batch size and pinned accept length: tokens per second by arm, and their ratio to `over`.

    Args:
        engines: what `engine.measure` wrote, with the ``round`` it was measured in.
        tokens: of each answer. Rates are of all but the first, which the prefill gives, in what an answer took more
            than one of a single token did; where none of these was timed (see `timed`), of all in all its time.
        over: the arm that others are compared to.
        by_host: tokens in the time of the answer of one token right before, and not per second. That is an eager
            prefill, which takes what the host takes at that moment. So where the host is the slower one a slow minute
            is in both and leaves the ratio; what an arm spares a prefill leaves it, too.

    Returns: rows with ``batch_size``, ``accept_length`` (None where no arm speculates), ``<arm>`` (tokens per second,
        median of all repeats) and ``<arm>_over_<over>``, a `statistics.Comparison` of rounds that have both arms: the
        geometric mean of their ratios, its interval and a verdict. Each interval is meant by itself: of 20 rows that
        say 95 % one is expected to be wrong.

    Raises ValueError where answers of one token took as long as the whole ones, or `by_host` and there are none, and
    as `timed` does.
    """
    counted = tokens - 1 if timed(engines) == AFTER_FIRST else tokens
    if by_host and counted == tokens:
        raise ValueError("no `first_seconds`, which tell how fast the host was: measure again")
    lengths = sorted({row["accept_length"] for one in engines for row in one["batches"]} - {None}) or [None]
    rows = []
    for size in dict.fromkeys(row["batch_size"] for one in engines for row in one["batches"]):
        for length in lengths:
            taken = _seconds(engines, size, length, by_host)
            row: dict[str, Any] = {"batch_size": size, "accept_length": length}
            for arm, rounds in taken.items():
                row[arm] = size * counted / float(np.median(np.concatenate(list(rounds.values()))))
            for arm, rounds in taken.items():
                both = sorted(set(rounds) & set(taken.get(over, {})))
                if arm != over and both:
                    rates = [
                        [1 / float(np.median(measured[number])) for number in both]
                        for measured in (taken[over], rounds)
                    ]
                    compared = statistics.compare(*rates, higher_is_better=True, figure=f"batches of {size} a second")
                    row[f"{arm}_over_{over}"] = compared.document()
            rows.append(row)
    return rows


def _seconds(
    engines: list[Engine], size: int, length: float | None, by_host: bool
) -> dict[str, dict[int, list[float]]]:
    """Seconds of a batch less its first tokens', by arm and round; `by_host`: as times those.

    An arm that does not speculate has the same at every accept length.
    """
    taken: dict[str, dict[int, list[float]]] = {}
    for one in engines:
        for row in one["batches"]:
            if row["batch_size"] == size and row["accept_length"] in (None, length):
                seconds = _decoding(row)
                if by_host:
                    seconds = [after / first for after, first in zip(seconds, row["first_seconds"], strict=True)]
                taken.setdefault(one["arm"], {}).setdefault(one["round"], []).extend(seconds)
    return taken


def _decoding(row: dict[str, Any]) -> list[float]:
    """Seconds by repeat, less those of the first token where that was timed."""
    if "first_seconds" not in row:
        return list(row["seconds"])
    pairs = zip(row["seconds"], row["first_seconds"], strict=True)
    return [decoding(row["batch_size"], seconds, first) for seconds, first in pairs]


def break_even(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The accept length at which each speculating arm gives as many tokens per second as ``none``.

    Never extrapolated: an answer's cycles are not all alike, and a line through two accept lengths far above says
    little.

    Args:
        rows: of `speeds`.

    Returns: rows with ``batch_size`` and by arm ``<arm>``: a pair of accept lengths that it lies between (between two
        that were measured the ratio is taken to be a line, so both are the same); (None, x) where the arm gains at all
        that were measured, the least being x; (x, None) where it gains at none, the greatest being x. By the middles
        of the ratios: whether a gain is one, its interval says.
    """
    told = []
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        row: dict[str, Any] = {"batch_size": size}
        # A plan that drafts nothing at a batch size has none.
        names = order(name for one in rows for name in one)
        for arm in (name for name in names if split(name)[0].speculates and not split(name)[0].planned):
            points = sorted(
                (one["accept_length"], one[f"{arm}_over_none"]["ratio"])
                for one in rows
                if one["batch_size"] == size and f"{arm}_over_none" in one
            )
            crossing = _crossing(points) if points else None
            if crossing is not None:
                row[arm] = crossing
        told.append(row)
    return [row for row in told if len(row) > 1]


def _crossing(points: list[tuple[float, float]]) -> tuple[float | None, float | None] | None:
    """None where the ratio falls below 1 again, so that chance is larger than what is looked for."""
    gains = [ratio >= 1 for _, ratio in points]
    if gains != sorted(gains):
        return None
    for (left, below), (right, above) in pairwise(points):
        if below < 1 <= above:
            at = left + (right - left) * (1 - below) / (above - below)
            return at, at
    return (None, points[0][0]) if gains[0] else (points[-1][0], None)


def partings(engines: list[Engine]) -> list[dict[str, Any]]:
    """How often greedy answers of two engines part, by pair of arms.

    Two answers are compared up to their first difference; after it they are answers to different texts. So the rate
    is that of a first difference at a token where none was before, and may be held against the rate of a pair of
    engines that serve alike.

    Returns: rows with ``arms`` (a pair, alphabetic), ``pairs`` (of engines), ``answers``, ``equal`` (whole answers),
        ``tokens`` (compared, the first different one included) and ``per_thousand`` (first differences).
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one, other in combinations([engine for engine in engines if engine["answers"]], 2):
        arms = (min(one["arm"], other["arm"]), max(one["arm"], other["arm"]))
        row = rows.setdefault(arms, {"arms": arms, "pairs": 0, "answers": 0, "equal": 0, "tokens": 0})
        row["pairs"] += 1
        for first, second in zip(one["answers"], other["answers"], strict=True):
            length = len(first["tokens"])
            at = _parts(first, second)
            row["answers"] += 1
            row["equal"] += at == length
            row["tokens"] += min(at + 1, length)
    for row in rows.values():
        row["per_thousand"] = 1000 * (row["answers"] - row["equal"]) / row["tokens"]
    return list(rows.values())


def _parts(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Position of the first token that differs; the length where none does."""
    pairs = zip(one["tokens"], other["tokens"], strict=True)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), len(one["tokens"]))


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
        at = _parts(plain, other)
        noise += [abs(a - b) for a, b in zip(plain["logprob"][:at], other["logprob"][:at], strict=True)]
        if at < len(plain["tokens"]):
            ours, theirs, best = plain["tokens"][at], other["tokens"][at], dict(plain["best"][at])
            gap = best[ours] - best[theirs] if theirs in best else None
            told = {"answer": number, "position": at, "none": ours, "other": theirs, "gap": gap}
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


def together(results: list[dict[str, Any]]) -> list[Engine]:
    """Engines of several results, each result with rounds of its own, so that their answers can be compared.

    Raises ValueError where other models or prompts were served, or answers have other lengths.
    """
    engines: list[Engine] = []
    served = [_served(result) for result in results]
    if any(one != served[0] for one in served):
        raise ValueError(f"other models or prompts: {served}")
    answers = [engine["answers"] for result in results for engine in result["engines"] if engine["answers"]]
    lengths = sorted({tuple(len(one["tokens"]) for one in told) for told in answers})
    if len(lengths) > 1:
        raise ValueError(f"answers of other numbers or lengths: {lengths}")
    for result in results:
        begun = 1 + max((one["round"] for one in engines), default=-1)
        engines += [{**one, "round": begun + one["round"]} for one in result["engines"]]
    return engines


def _served(result: dict[str, Any]) -> dict[str, Any]:
    """What two results must share for their answers to be of the same text, the drawing of all weights included."""
    told = {name: result["work"][name] for name in _SHARED}
    return {**told, "all_drawn": any(one.get("values_drawn") for one in result["engines"])}


def _read(file: Path) -> dict[str, Any]:
    """Raises ValueError where it is no result of `benchmark.spec_plan.run`."""
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(result, dict) or not {"work", "engines"} <= set(result):
        raise ValueError(f"{file}: no `work` and `engines`, so not what benchmark.spec_plan.run writes")
    if missing := {*_SHARED, "tokens"} - set(result["work"]):
        raise ValueError(f"{file}: of an earlier benchmark.spec_plan.run, without `{min(missing)}`: measure again")
    return result


def main() -> int:
    """Print the tables of one result, or how the answers of several compare.

    Returns the exit status: 0 told, 2 a file cannot be read or the results cannot be compared.
    """
    parser = argparse.ArgumentParser(description="Tables of what benchmark.spec_plan.run wrote, in Markdown.")
    parser.add_argument("file", type=Path, nargs="+", help="several: how often answers of all their engines part")
    what = "rates in the time of each answer's own one-token answer: for a host that is the slower one, and not steady"
    parser.add_argument("--by-host", action="store_true", help=what)
    given = parser.parse_args()
    files = given.file
    if given.by_host and len(files) > 1:
        parser.error(f"--by-host: of one file, not of {len(files)}")
    try:
        results = [_read(file) for file in files]
        engines = together(results)
        if len(results) == 1:
            over = results[0].get("over", BASELINE)
            tokens = results[0]["work"]["tokens"]
            told = {"over": over, **of(engines, tokens, over)}
            if given.by_host:
                told |= {"unit": BY_HOST, "summary": speeds(engines, tokens, over, by_host=True), "break_even": []}
        else:
            told = {"summary": [], "break_even": [], "answers": sameness(engines), "partings": partings(engines)}
    except ValueError as error:
        print(f"summary: {error}\n  remedy     files of benchmark.spec_plan.run that served the same", file=sys.stderr)
        return 2
    print("\n".join(lines(told)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
