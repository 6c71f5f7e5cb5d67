"""Small charts as inline SVG, drawn in the page's own colours so that they follow its light and dark theme.

A plot that the measuring command drew (plot.png) is shown besides; these need no plotting library to render a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from sglang_patches.bench.model import Turn
from sglang_patches.bench.tables import Interval, finite, number

_WIDE, _HIGH = 200, 22  # of an interval's bar
_SERIES = 8  # colours and marks that the page's style tells apart
_INSIDE = 6  # room at the ends, for dots and arrow heads


@dataclass(frozen=True)
class Scale:
    """A logarithmic scale that shows ratios from 1/most to most."""

    most: float

    def at(self, ratio: float) -> float:
        """Pixels from the left; beyond the scale, its end."""
        share = math.log(ratio) / math.log(self.most) if ratio > 0 else -1.0
        return _WIDE / 2 + (_WIDE / 2 - _INSIDE) * max(-1.0, min(1.0, share))

    def shows(self, ratio: float | None) -> bool:
        """Whether it lies on the scale."""
        return ratio is not None and 1 / self.most <= ratio <= self.most


def scale(intervals: Iterable[Interval], margin: float = 0.0) -> Scale:
    """One scale for all bars of a table: it holds every ratio, and bounds unless they are much wider than the rest."""
    middles, bounds = [math.log1p(margin), math.log(1.01)], []
    for interval in intervals:
        middles += [abs(math.log(x)) for x in (interval.value,) if x is not None and 0 < x < math.inf]
        bounds += [abs(math.log(x)) for x in (interval.low, interval.high) if x is not None and 0 < x < math.inf]
    usual = 4 * median(bounds) if bounds else 0.0
    wide = max([*middles, *(bound for bound in bounds if bound <= max(usual, *middles))])
    return Scale(math.exp(min(1.15 * wide, 50.0)))


def bar(interval: Interval, on: Scale, margin: float = 0.0, tone: str = "") -> Markup:
    """A ratio and its bounds; an end beyond the scale, or no bound, is an arrow head."""
    if interval.value is None:
        return Markup("")
    low = interval.low if interval.low is not None and interval.low > 0 else 0.0
    high = math.inf if interval.high is None else interval.high
    left, right, middle = on.at(low), on.at(high), on.at(interval.value)
    y = _HIGH / 2
    said = f"ratio {number(interval.value)}, interval {number(low)} to {number(high)}"
    parts = [f'<rect class="band" x="{on.at(1 - margin):.1f}" y="2" width="{_width(on, margin):.1f}" height="18"/>']
    parts.append(f'<line class="one" x1="{_WIDE / 2}" x2="{_WIDE / 2}" y1="0" y2="{_HIGH}"/>')
    parts.append(f'<line class="span" x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>')
    if low < 1 / on.most:
        parts.append(f'<path class="head" d="M{left - 5:.1f} {y}l6 -4v8z"/>')
    if high > on.most:
        parts.append(f'<path class="head" d="M{right + 5:.1f} {y}l-6 -4v8z"/>')
    parts.append(f'<circle class="dot" cx="{middle:.1f}" cy="{y}" r="4"/>')
    inside = Markup("".join(parts))  # numbers of ours alone
    shape = Markup('<svg class="bar {}" viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}</svg>')
    return shape.format(tone, _WIDE, _HIGH, said, said, inside)


def _width(on: Scale, margin: float) -> float:
    return max(0.0, on.at(1 + margin) - on.at(1 - margin))


def ends(on: Scale) -> Markup:
    """What the ends of a scale are, and that 1 is its middle."""
    shape = Markup('<span class="ends"><span>{}</span><span>1</span><span>{}</span></span>')
    return shape.format(number(1 / on.most), number(on.most))


def turns(taken: Sequence[Turn], figure: str, title: str) -> Markup:
    """One figure of every turn, in the order measured; blocks are shaded by turns, arms told by colour and mark."""
    points = [(turn, value) for turn in taken if (value := finite(turn.figures.get(figure))) is not None]
    if len(points) < 2:
        return Markup("")
    arms = list(dict.fromkeys(turn.arm for turn, _ in points))
    low, high = min(value for _, value in points), max(value for _, value in points)
    room = (high - low) * 0.08 or abs(high) * 0.02 or 1.0
    low, high = low - room, high + room
    wide, tall, left, top, bottom = 440, 190, 52, 8, 24
    first, last = min(turn.index for turn, _ in points), max(turn.index for turn, _ in points)
    step = (wide - left - 8) / (last - first + 1)

    def x(index: int) -> float:
        return left + (index - first + 0.5) * step

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * (tall - top - bottom)

    parts = []
    for count, block in enumerate(dict.fromkeys(turn.block for turn, _ in points)):
        inside = [turn.index for turn, _ in points if turn.block == block]
        if count % 2 == 0:
            begin, end = x(min(inside)) - step / 2, x(max(inside)) + step / 2
            shape = f'width="{end - begin:.1f}" height="{tall - top - bottom}"'
            parts.append(f'<rect class="block" x="{begin:.1f}" y="{top}" {shape}/>')
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{left}" x2="{wide - 8}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{left - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.10g}</text>')
    every = max(1, math.ceil(len(points) / 16))
    for turn, _ in points[::every]:
        parts.append(f'<text x="{x(turn.index):.1f}" y="{tall - 8}" text-anchor="middle">{turn.index}</text>')
    marks = [Markup(part) for part in parts]
    for turn, value in points:
        shape = Markup('<path class="mark c{}" d="{}"><title>turn {}, {}: {}</title></path>')
        series = arms.index(turn.arm) % _SERIES
        outline = mark(series, x(turn.index), y(value))
        marks.append(shape.format(series, outline, turn.index, turn.arm, number(value)))
    whole = Markup('<svg class="turns" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return whole.format(wide, tall, f"{title} of every turn", Markup("").join(marks)) + legend(arms)


def legend(arms: Sequence[str]) -> Markup:
    """Which mark is which arm; none where there are more arms than marks."""
    if len(arms) > _SERIES:
        return Markup('<p class="legend">{}</p>').format(f"{len(arms)} arms; hover over a mark for its name")
    entry = Markup('<span><svg viewBox="0 0 12 12"><path class="mark c{}" d="{}"/></svg> {}</span>')
    entries = [entry.format(series, mark(series, 6, 6), arm) for series, arm in enumerate(arms)]
    return Markup('<p class="legend">{}</p>').format(Markup(" ").join(entries))


def mark(series: int, x: float, y: float) -> str:
    """The outline of a series' mark: circle, square, triangle or diamond, so that colour is not all that tells."""
    at = f"M{x:.1f} {y:.1f}"
    shapes = (
        "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
        "m-4 -4h8v8h-8z",
        "m0 -5l5 9h-10z",
        "m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    )
    return at + shapes[series % len(shapes)]


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between the ends."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def lines(series: dict[str, dict[float, float]], x_name: str, y_name: str) -> Markup:
    """Lines over a few sizes, both axes logarithmic, values at their points.

    Args:
        series: name -> {size: value}, all positive.
    """
    series = {name: line for name, line in series.items() if line}
    sizes = sorted({size for line in series.values() for size in line})
    values = [value for line in series.values() for value in line.values()]
    if len(sizes) < 2 or min(values) <= 0 or not math.isfinite(max(values)):
        return Markup("")
    low, high = math.log(min(values)), math.log(max(values))
    room = 0.06 * (high - low) or 0.1
    low, high = low - room, high + room
    wide, tall, left, top, bottom = 440, 230, 46, 10, 34

    def x(size: float) -> float:
        return left + 12 + sizes.index(size) / (len(sizes) - 1) * (wide - left - 30)

    def y(value: float) -> float:
        return top + (high - math.log(value)) / (high - low) * (tall - top - bottom)

    parts = []
    for tick in _log_ticks(math.exp(low), math.exp(high)):
        parts.append(f'<line class="grid" x1="{left}" x2="{wide - 8}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{left - 5}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.10g}</text>')
    parts += [f'<text x="{x(size):.1f}" y="{tall - 18}" text-anchor="middle">{size:g}</text>' for size in sizes]
    marks = [Markup(part) for part in parts]
    axis = Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>')
    marks.append(axis.format((wide + left) // 2, tall - 3, x_name))
    for index, (name, line) in enumerate(series.items()):
        colour = index % _SERIES
        path = " ".join(f"{'L' if at else 'M'}{x(s):.1f} {y(line[s]):.1f}" for at, s in enumerate(sorted(line)))
        marks.append(Markup('<path class="line c{}" d="{}"/>').format(colour, path))
        for size, value in sorted(line.items()):
            shape = Markup('<path class="mark c{}" d="{}"><title>{}</title></path>')
            marks.append(shape.format(colour, mark(colour, x(size), y(value)), f"{name}, {size:g}: {number(value)}"))
    whole = Markup('<svg class="turns" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return whole.format(wide, tall, y_name, Markup("").join(marks)) + legend(list(series))


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
    inside = [tick for tick in found if low <= tick <= high]
    return inside if len(inside) > 1 else ticks(low, high)
