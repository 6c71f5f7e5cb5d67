"""plot.png of a result: ratios with their intervals, and the turns that they are of.

Drawn from the result alone, so that a plot can be made again from result.json. matplotlib is imported only here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from sglang_patches.bench.folder import PLOT, replace
from sglang_patches.bench.model import HIGHER_IS_BETTER, Result, Turn
from sglang_patches.errors import PatchError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: By verdict; told apart by colour-blind people too (Okabe and Ito), and the verdict stands beside it in words.
_COLOURS = {"FASTER": "#009E73", "SLOWER": "#D55E00", "SAME": "#0072B2", "AMBIGUOUS": "#777777"}
_ARMS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
# Beyond this the axis ends: an interval that one or two rounds leave open tells nothing by its length.
_WIDEST = 4.0
_FAR = 1e3 * _WIDEST  # where an open interval is drawn to, so that it leaves the axis

# Label, ratio, its intervals with the widest first (None: an open end), verdict.
_Row = tuple[str, float, list[tuple[float | None, float | None]], str]


def draw(result: Result, folder: Path) -> None:
    """Draw `folder`/plot.png, or say on standard error why not: a measurement is not lost for want of a library.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        figure = of(result)
    except PatchError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    save(figure, folder / PLOT, dpi=130)


def save(figure: Figure, file: Path, dpi: int) -> None:
    """Write a figure as PNG, replaced at once: drawn whole before the file is touched."""
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    replace(file, drawn.getvalue())


def of(result: Result) -> Figure:
    """The plot of a result of kind `ab`, `compare-upstream` or `factorial`.

    Raises:
        PatchError: matplotlib is not installed, or results of this kind have no plot.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PatchError(
            "matplotlib is not installed\n"
            "  remedy     pip install 'sglang-patches[bench]', then the same command again: it measures nothing anew"
        ) from None
    kinds = {"ab": _ab, "compare-upstream": _upstream, "factorial": _factorial}
    if result.kind not in kinds:
        raise PatchError(f"results of kind {result.kind} have no plot of this sort; expected {' or '.join(kinds)}")
    # Without pyplot: no window system, no state that outlives the call.
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.get_layout_engine().set(wspace=0.08)  # type: ignore[union-attr, call-arg]  # verdicts stand between the two
    kinds[result.kind](result, figure)
    return figure


def _ab(result: Result, figure: Figure) -> None:
    """Left: B / A of every figure. Right: the primary figure, turn by turn."""
    found: dict[str, dict[str, Any]] = result.analysis["comparisons"]
    primary = result.analysis["primary"]
    rows = [(_labelled(name), one["ratio"], [(one["low"], one["high"])], one["verdict"]) for name, one in found.items()]
    a, b = ({arm.name: arm for arm in result.arms}[result.analysis[side]] for side in ("a", "b"))
    figure.suptitle(fill(f"A = {a.spec or 'default'}   B = {b.spec or 'default'}", 130), fontsize=11, parse_math=False)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _forest(left, rows, result.analysis["margin"])
    _beside(left, "B / A, with its interval")
    for at, arm in enumerate((a, b)):
        turns = [turn for turn in result.turns if turn.arm == arm.name and primary in turn.figures]
        where, values = [turn.index for turn in turns], [turn.figures[primary] for turn in turns]
        right.plot(where, values, "os"[at], color=_ARMS[at], label="AB"[at], markersize=7)
    for pair in _blocks(result.turns, primary):
        right.plot([t.index for t in pair], [t.figures[primary] for t in pair], color="#bbbbbb", zorder=0)
    _by_turn(right, primary)


def _by_turn(axes: Axes, primary: str) -> None:
    axes.set_xlabel("turn, in the order served (lines join a round)")
    axes.set_ylabel(primary)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axes.legend(loc="best")
    axes.grid(True, alpha=0.2)


def _upstream(result: Result, figure: Figure) -> None:
    """Left: the primary figure of each arm against pristine. Right: that figure, turn by turn."""
    primary = result.analysis["primary"]
    found = {arm: of[primary] for arm, of in result.analysis["comparisons"].items() if primary in of}
    rows = [(arm, one["ratio"], [(one["low"], one["high"])], one["verdict"]) for arm, one in found.items()]
    figure.suptitle(f"{result.name}: {primary} against pristine upstream", fontsize=11, parse_math=False)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _forest(left, rows, result.analysis["margin"])
    _beside(left, "arm / pristine, with its interval")
    for at, arm in enumerate(result.arms):
        turns = [turn for turn in result.turns if turn.arm == arm.name and primary in turn.figures]
        where, values = [turn.index for turn in turns], [turn.figures[primary] for turn in turns]
        right.plot(where, values, "o", color=_ARMS[at % len(_ARMS)], label=arm.name, markersize=7)
    for block in _blocks(result.turns, primary):
        right.plot([t.index for t in block], [t.figures[primary] for t in block], color="#bbbbbb", zorder=0)
    _by_turn(right, primary)


def _factorial(result: Result, figure: Figure) -> None:
    """Left: all effects on the primary figure. Right: that figure in every run, round by round."""
    primary = result.analysis["primary"]
    found = result.analysis["effects"][primary]
    rows = [
        (
            "\nor ".join((one["name"], *one["aliases"])),
            one["ratio"],
            [(one["low_adjusted"], one["high_adjusted"]), (one["low"], one["high"])],
            one["verdict"],
        )
        for one in found["effects"]
    ]
    figure.set_size_inches(13, max(5.0, 1.5 + 0.42 * sum(1 + row[0].count("\n") for row in rows)))
    figure.suptitle(
        fill(f"{result.name}: effects on {primary}; {result.analysis['design']}", 140), fontsize=11, parse_math=False
    )
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _forest(left, rows, found["margin"])
    percent = f"{found['confidence']:.0%}"
    _beside(left, f"ratio, with its {percent} interval (thick: alone, thin: all together)")
    names = [arm.name for arm in result.arms]
    for at, block in enumerate(_blocks(result.turns, primary)):
        where, values = [names.index(turn.arm) for turn in block], [turn.figures[primary] for turn in block]
        colour, shift = _ARMS[at % len(_ARMS)], 0.08 * (at % 5 - 2)
        right.plot([x + shift for x in where], values, "o", color=colour, label=f"round {block[0].block}", alpha=0.8)
    right.set_xticks(range(len(names)), names, rotation=90 if len(names) > 8 else 0)
    right.set_xlabel("run: 1 where on, of\n" + "\n".join(result.analysis["factors"]), parse_math=False)
    right.set_ylabel(primary)
    right.legend(loc="best", fontsize=8)
    right.grid(True, axis="y", alpha=0.2)


def _forest(axes: Axes, rows: Sequence[_Row], margin: float) -> None:
    """Ratios with intervals, one row each from the top; what lies beyond the axis is an arrow at its end.

    A ratio out there is written beside its arrow, for no row may look as if nothing had been measured.
    """
    ends = [end for _, ratio, bounds, _ in rows for end in (ratio, *bounds[0]) if end]
    low, high = max(min(ends, default=1), 1 / _WIDEST), min(max(ends, default=1), _WIDEST)
    reach = 1.15 * max(1 - low, high - 1, 2 * margin)
    low, high = max(1 - reach, 0.8 / _WIDEST), 1 + reach
    axes.axvspan(1 - margin, 1 + margin, color="#0072B2", alpha=0.10, linewidth=0, label=f"within {margin:.1%} of 1")
    axes.axvline(1, color="black", linewidth=0.8)
    for at, (_, ratio, bounds, verdict) in enumerate(rows):
        colour = _COLOURS[verdict]
        for width, (begin, end) in zip((1.5, 4.5), bounds if len(bounds) > 1 else bounds * 2, strict=False):
            axes.plot([begin or 0, _FAR if end is None else end], [at, at], color=colour, linewidth=width,
                      solid_capstyle="butt")  # fmt: skip
        begin, end = bounds[0]
        if not low <= ratio <= high:
            text = f"{ratio:.3g}"
            below = ratio < low
            axes.annotate(
                text, (low if below else high, at), (10 if below else -10, 9), textcoords="offset points",
                ha="left" if below else "right", va="center", color=colour, fontsize=8,
            )  # fmt: skip
        else:
            axes.plot([ratio], [at], "o", color=colour, markersize=7)
        if ratio < low or (begin or 0) < low:
            axes.plot([low], [at], "<", color=colour, markersize=8, clip_on=False)
        if ratio > high or end is None or end > high:
            axes.plot([high], [at], ">", color=colour, markersize=8, clip_on=False)
        axes.annotate(
            f"{verdict}", (1, at), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            color=colour, va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows], fontsize=9, parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(True, axis="x", alpha=0.2)


def _beside(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, frameon=False)


def _labelled(figure: str) -> str:
    if figure not in HIGHER_IS_BETTER:
        return figure
    return f"{figure}\n({'higher' if HIGHER_IS_BETTER[figure] else 'lower'} is better)"


def _blocks(turns: Sequence[Turn], figure: str) -> list[list[Turn]]:
    """The turns of each block that have the figure, in the order served."""
    found: Mapping[int, list[Turn]] = {turn.block: [] for turn in turns}
    for turn in turns:
        if figure in turn.figures:
            found[turn.block].append(turn)
    return [block for block in found.values() if block]
