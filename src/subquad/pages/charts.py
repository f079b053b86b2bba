"""Charts as SVG: lines and points on linear or logarithmic axes, drawn to be read at any width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 92, 14, 44
_TITLE, _CHARACTER, _GAP = 20, 7, 7
"""What the title of the upright axis takes, a character of a number at it, and what lies between number and axis."""

MOST_NAMED_BARS = 24
"""Of a bar chart: with more of them, not each has its number below it."""


@dataclass(frozen=True)
class Series:
    """A line or a cloud of points; `colour` is a CSS class of the page. `tips` says what hovering shows.

    Dots of lines have a radius of `dot`.
    """

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str]
    dot: float = 2.6


@dataclass(frozen=True)
class Axis:
    """What an axis says and how it counts."""

    title: str
    log: bool = False
    whole: bool = False


def line_chart(series: Sequence[Series], x: Axis, y: Axis, *, width: int = 520, height: int = 320) -> Markup:
    """Lines with a dot a value and their names at their right ends."""
    frame = _Frame(series, x, y, width, height)
    parts = [frame.axes()]
    ends = []
    for one in series:
        places = [frame.place(*point) for point in one.points]
        path = " ".join(f"{'L' if k else 'M'}{px:.1f} {py:.1f}" for k, (px, py) in enumerate(places))
        dots = "".join(_dot(px, py, one.dot, tip) for (px, py), tip in zip(places, one.tips, strict=True))
        parts.append(f'<g class="series {one.colour}"><path class="line" d="{path}"/>{dots}</g>')
        ends.append(places[-1])
    for one, (px, py), level in zip(
        series, ends, spread_apart([py for _, py in ends], 13, _TOP + 4, height - _BOTTOM), strict=True
    ):
        parts.append(_name(one, frame.right + 10, level, (px, py)))
    return _svg(width, height, f"{y.title} against {x.title}", parts)


def point_chart(series: Sequence[Series], x: Axis, y: Axis, *, width: int = 520, height: int = 320) -> Markup:
    """Points with their names beside them."""
    frame = _Frame(series, x, y, width, height)
    parts = [frame.axes()]
    places = [frame.place(*point) for one in series for point in one.points[:1]]
    levels = _beside(places)
    for k, one in enumerate(series):
        (px, py), tip = places[k], one.tips[0]
        parts.append(f'<g class="series {one.colour}">{_dot(px, py, 5, tip)}</g>')
        parts.append(_name(one, px + 9, levels[k], None))
    return _svg(width, height, f"{y.title} against {x.title}", parts)


def bar_chart(bars: Series, x: Axis, y: Axis, *, width: int = 680, height: int = 260) -> Markup:
    """A bar from 0 for each point, which stand one apart."""
    places = [px for px, _ in bars.points]
    # room for a whole bar at either end, and for the level that all stand on
    edges = Series("", "", [(min(places) - 0.6, 0.0), (max(places) + 0.6, 0.0)], [])
    frame = _Frame([bars, edges], x, y, width, height)
    if min(py for _, py in bars.points) >= 0:
        # bars stand on the axis itself
        frame.y_range = 0.0, frame.y_range[1]
    if len(places) <= MOST_NAMED_BARS:
        frame.x_ticks = places
    parts = [frame.axes()]
    for (px, py), tip in zip(bars.points, bars.tips, strict=True):
        left, top = frame.place(px - 0.36, max(py, 0.0))
        right, bottom = frame.place(px + 0.36, min(py, 0.0))
        size = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{max(bottom - top, 0.5):.1f}"'
        parts.append(f'<g class="series {bars.colour}"><rect class="bar" {size} {_tip(tip)}/></g>')
    return _svg(width, height, f"{y.title} against {x.title}", parts)


class _Frame:
    """Where numbers stand: the plotting area, its scales and ticks."""

    def __init__(self, series: Sequence[Series], x: Axis, y: Axis, width: int, height: int) -> None:
        self.x, self.y = x, y
        self.left, self.right, self.top, self.bottom = _LEFT, width - _RIGHT, _TOP, height - _BOTTOM
        points = [point for one in series for point in one.points]
        self.x_ticks, self.x_range = ticks_of([px for px, _ in points], x)
        self.y_ticks, self.y_range = ticks_of([py for _, py in points], y)
        # long numbers take room from the plot, and not from the title beside them
        longest = max(map(len, tick_texts(self.y_ticks)), default=0)
        self.left = max(_LEFT, _TITLE + _GAP + math.ceil(_CHARACTER * longest))

    def place(self, px: float, py: float) -> tuple[float, float]:
        """Where a value stands on the picture."""
        across, up = _share(px, self.x_range, self.x.log), _share(py, self.y_range, self.y.log)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def axes(self) -> str:
        """Grid, ticks and titles."""
        parts = []
        for tick, text in zip(self.y_ticks, tick_texts(self.y_ticks), strict=True):
            _, py = self.place(self.x_range[0], tick)
            parts.append(f'<path class="grid" d="M{self.left} {py:.1f}H{self.right}"/>')
            parts.append(f'<text class="tick" x="{self.left - _GAP}" y="{py + 4:.1f}" text-anchor="end">{text}</text>')
        for tick, text in zip(self.x_ticks, tick_texts(self.x_ticks), strict=True):
            px, _ = self.place(tick, self.y_range[0])
            parts.append(f'<path class="grid" d="M{px:.1f} {self.bottom}v5"/>')
            parts.append(f'<text class="tick" x="{px:.1f}" y="{self.bottom + 18}" text-anchor="middle">{text}</text>')
        middle = (self.left + self.right) / 2
        parts.append(f'<path class="axis" d="M{self.left} {self.bottom}H{self.right}"/>')
        below = f'x="{middle}" y="{self.bottom + 37}"'
        beside = f'transform="translate(12 {(self.top + self.bottom) / 2}) rotate(-90)"'
        for place, axis in ((below, self.x), (beside, self.y)):
            parts.append(f'<text class="title" {place} text-anchor="middle">{escape(axis.title)}</text>')
        return "".join(parts)


def ticks_of(values: Sequence[float], axis: Axis) -> tuple[list[float], tuple[float, float]]:
    """Ticks at round numbers, and a range that holds all values."""
    low, high = min(values), max(values)
    if axis.log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1,) if last - first > 2 else (1, 2, 5) if last - first > 1 else (1, 2, 3, 5, 7)
        ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in steps]
        span = (high / low) ** 0.04 if high > low else 1.5
        low, high = low / span, high * span
        inside = [tick for tick in ticks if low <= tick <= high]
        # of values that lie close together an axis would have no number, or one
        return inside if len(inside) > 1 else _round_numbers(low, high, axis), (low, high)
    if high == low:
        low, high = low - 1, high + 1
    margin = 0.04 * (high - low)
    return _round_numbers(low, high, axis, margin), (low - margin, high + margin)


def _round_numbers(low: float, high: float, axis: Axis, margin: float = 0.0) -> list[float]:
    """About four numbers between two, or as far as `margin` beyond them."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    step = max(step, 1.0) if axis.whole else step
    return [step * k for k in range(math.ceil((low - margin) / step), math.floor((high + margin) / step) + 1)]


def _share(value: float, span: tuple[float, float], log: bool) -> float:
    low, high = span
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def spread_apart(levels: Sequence[float], gap: float, top: float, bottom: float) -> list[float]:
    """Levels, counted downwards, moved apart so that names do not overlap, in the order given."""
    order = sorted(range(len(levels)), key=lambda k: levels[k])
    placed: dict[int, float] = {}
    last = -math.inf
    for k in order:
        last = placed[k] = max(levels[k], last + gap, top)
    # what has run out at the bottom pushes back up
    limit = float(bottom)
    for k in reversed(order):
        limit = placed[k] = min(placed[k], limit)
        limit -= gap
    return [placed[k] for k in range(len(levels))]


def _beside(places: Sequence[tuple[float, float]], width: float = 80, gap: float = 13) -> list[float]:
    """Levels of names beside points, moved down where one would stand on another name or on another point."""
    levels: dict[int, float] = {}
    for k in sorted(range(len(places)), key=lambda k: places[k][1]):
        px, level = places[k]
        names = [levels[other] for other in levels if abs(places[other][0] - px) < width]
        points = [y for other, (x, y) in enumerate(places) if other != k and 0 < x - px < width]
        for taken in sorted(names + points):
            if abs(taken - level) < gap:
                level = taken + gap
        levels[k] = level
    return [levels[k] for k in range(len(places))]


def _name(one: Series, px: float, level: float, end: tuple[float, float] | None) -> str:
    """The name of a series, led to by a thin line where it had to move away or the series ends before the others."""
    leader = ""
    if end is not None and (abs(end[1] - level) > 3 or px - end[0] > 40):
        leader = f'<path class="leader" d="M{end[0] + 3:.1f} {end[1]:.1f}L{px - 2:.1f} {level:.1f}"/>'
    text = one.label if len(one.label) <= 14 else f"{one.label[:13]}…"
    whole = f"<title>{escape(one.label)}</title>"
    name = f'<text class="name" x="{px:.1f}" y="{level + 4:.1f}">{whole}{escape(text)}</text>'
    return f'<g class="series {one.colour}">{leader}{name}</g>'


def _dot(px: float, py: float, radius: float, tip: str) -> str:
    return f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{radius}" {_tip(tip)}/>'


def _tip(text: str) -> str:
    """The attribute that page.js shows."""
    return f'data-tip="{escape(text)}"'


def tick_texts(values: Sequence[float]) -> list[str]:
    """Numbers at an axis: with four digits, or as many as tell them apart."""
    for digits in range(4, 17):
        texts = [_tick_text(value, digits) for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def _tick_text(value: float, digits: int) -> str:
    if abs(value) >= 1000:
        return f"{value / 1000:.{max(digits, 6)}g}k"
    return f"{value:.{digits}g}"


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> Markup:
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")
