"""Charts as SVG text, drawn twice: for a wide page and for a phone, so that letters keep their size
on both.

Hand-written, and not plotly's: the page is then some hundred kilobytes and not five megabytes,
needs no script to be read or printed, follows the reader's dark or light setting by CSS alone, and
every point of it can be reached with the keyboard and heard. What a library would add, zoom and
pan, these few curves do not need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gradfit.units import format_bytes, format_seconds

_FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "seconds": format_seconds,
    "": lambda number: f"{number:g}",
}
_WIDE, _NARROW = (880, 340), (340, 280)


@dataclass(frozen=True)
class Series:
    """A line. `kind` is its CSS class, which gives it its colour and dash."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    steps: bool = False  # a value holds until the next


@dataclass(frozen=True)
class Point:
    """A point one can hover over or tab to; `text` is what it then says. `kind` is its CSS
    class.
    """

    x: float
    y: float
    text: str
    kind: str = ""  # "chosen", or "measured", which is drawn as a square


@dataclass(frozen=True)
class Chart:
    """One chart; `summary` is its text alternative."""

    name: str
    title: str
    summary: str
    x_label: str
    y_label: str
    x_unit: str = "seconds"  # or "bytes", or "" for a plain number
    y_unit: str = "bytes"
    series: Sequence[Series] = ()
    points: Sequence[Point] = ()
    limit: tuple[float, str] | None = None
    y_from_zero: bool = True
    log: bool = False  # both axes; every number must be above 0


def draw(chart: Chart) -> str:
    """The chart as two SVG elements, one of which the page shows, and a legend."""
    sizes = ((_WIDE, "wide"), (_NARROW, "narrow"))
    drawn = "".join("".join(_svg(chart, size, name)) for size, name in sizes)
    legend = "".join(_legend(chart))
    return (
        f'<div class="chart" id="chart-{chart.name}">{drawn}<ul class="legend">{legend}</ul></div>'
    )


def _legend(chart: Chart) -> Iterator[str]:
    for series in chart.series:
        if series.name:
            yield _key(series.kind, series.name)
    for kind in dict.fromkeys(point.kind for point in chart.points if point.kind):
        yield _key(f"point {kind}", _POINTS.get(kind, "chosen, predicted"))
    if chart.limit is not None:
        yield _key("limit", chart.limit[1])


_POINTS = {"measured": "chosen, measured"}


def _key(kind: str, name: str) -> str:
    return f'<li><span class="key {kind}"></span>{escape(name)}</li>'


def _numbers_on(chart: Chart) -> tuple[list[float], list[float]]:
    """All that must be seen, along each axis."""
    places = [*_places_on(chart)]
    xs, ys = [x for x, _ in places], [y for _, y in places]
    return xs, ys if chart.limit is None else [*ys, chart.limit[0]]


def _places_on(chart: Chart) -> Iterator[tuple[float, float]]:
    for series in chart.series:
        yield from series.points
    for point in chart.points:
        yield point.x, point.y


class _Frame:
    """Where the axes lie, and how a number becomes a place."""

    def __init__(self, chart: Chart, size: tuple[int, int], most_x_ticks: int) -> None:
        self.width, self.height = size
        self.left, self.right, self.top, self.bottom = 64, 14, 26, 44
        xs, ys = _numbers_on(chart)
        low = 0.0 if chart.y_from_zero else min(ys)
        find = log_ticks if chart.log else ticks
        self.x_ticks = find(min(xs), max(xs), most_x_ticks, binary=chart.x_unit == "bytes")
        if not chart.x_unit:  # they are counted, and there is none between two
            self.x_ticks = [tick for tick in self.x_ticks if float(tick).is_integer()]
        self.y_ticks = find(low, max(ys), 6, binary=chart.y_unit == "bytes")
        self._x, self._y = (min(xs), max(xs)), (low, max(ys))
        self._scale: Callable[[float], float] = math.log if chart.log else float

    def x(self, number: float) -> float:
        return self.left + self._share(number, self._x) * (self.width - self.left - self.right)

    def y(self, number: float) -> float:
        return (
            self.height
            - self.bottom
            - self._share(number, self._y) * (self.height - self.top - self.bottom)
        )

    def _share(self, number: float, ends: tuple[float, float]) -> float:
        low, high = self._scale(ends[0]), self._scale(ends[1])
        return (self._scale(number) - low) / ((high - low) or 1.0)


def _svg(chart: Chart, size: tuple[int, int], variant: str) -> Iterator[str]:
    at = _Frame(chart, size, 8 if variant == "wide" else 4)
    edge = at.width - at.right
    ids = f"{chart.name}-{variant}"
    yield (
        f'<svg class="{variant}" viewBox="0 0 {at.width} {at.height}"'
        f' role="{"group" if chart.points else "img"}" aria-labelledby="{ids}-t {ids}-d"><title'
        f' id="{ids}-t">{escape(chart.title)}</title><desc'
        f' id="{ids}-d">{escape(chart.summary)}</desc><text class="axis" x="2"'
        f' y="12">{escape(chart.y_label)}</text><text class="axis" x="{(at.left + edge) / 2:.0f}"'
        f' y="{at.height - 6}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    yield from _ticks(chart, at)
    if chart.limit is not None:
        y = at.y(chart.limit[0])
        yield f'<line class="limit" x1="{at.left}" x2="{edge}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield from (_line(series, at) for series in chart.series)
    markers = sorted(chart.points, key=lambda point: bool(point.kind))
    yield from (_marker(point, at) for point in markers)
    yield "</svg>"


def _ticks(chart: Chart, at: _Frame) -> Iterator[str]:
    edge = at.width - at.right
    for y in at.y_ticks:
        yield (
            f'<line class="grid" x1="{at.left}" x2="{edge}" y1="{at.y(y):.1f}" y2="{at.y(y):.1f}"/>'
            f'<text class="tick" x="{at.left - 6}" y="{at.y(y) + 4:.1f}" text-anchor="end">'
            f"{escape(_FORMATS[chart.y_unit](y))}</text>"
        )
    for x in at.x_ticks:
        yield (
            f'<text class="tick" x="{at.x(x):.1f}" y="{at.height - at.bottom + 18}"'
            f' text-anchor="middle">{escape(_FORMATS[chart.x_unit](x))}</text>'
        )


def _marker(point: Point, at: _Frame) -> str:
    x, y, text = at.x(point.x), at.y(point.y), escape(point.text)
    if point.kind == "measured":
        shape = f'rect x="{x - 7:.1f}" y="{y - 7:.1f}" width="14" height="14"'
    else:
        shape = f'circle cx="{x:.1f}" cy="{y:.1f}" r="{8 if point.kind else 6}"'
    return (
        f'<{shape} class="{f"point {point.kind}".strip()}" tabindex="0" role="img"'
        f' aria-label="{text}"'
        f' data-text="{text}"><title>{text}</title></{shape.split(maxsplit=1)[0]}>'
    )


def _line(series: Series, at: _Frame) -> str:
    (first_x, first_y), *others = series.points
    line = f"M{at.x(first_x):.1f} {at.y(first_y):.1f}"
    if not series.steps:
        line += "".join(f"L{at.x(x):.1f} {at.y(y):.1f}" for x, y in others)
        return f'<path class="line {series.kind}" d="{line}"/>'
    line += "".join(f"H{at.x(x):.1f}V{at.y(y):.1f}" for x, y in others)
    area = f'<path class="area {series.kind}" d="{line}V{at.y(0.0):.1f}H{at.x(first_x):.1f}Z"/>'
    return f'{area}<path class="line {series.kind}" d="{line}"/>'


def ticks(low: float, high: float, most: int, *, binary: bool = False) -> list[float]:
    """Round numbers from at or above `low` to at or below `high`; bytes are round in powers of two.

    >>> ticks(0, 9.3, 6)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    >>> [int(t) // 2**20 for t in ticks(0, 900 * 2**20, 5, binary=True)]
    [0, 256, 512, 768]
    """
    span = high - low
    if not 0 < span < math.inf:
        return [low]
    step = 2.0 ** math.ceil(math.log2(span / most)) if binary else _round_step(span / most)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at or above this."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * f for f in (1, 2, 5, 10) if power * f >= rough * 0.999)


def log_ticks(low: float, high: float, most: int, *, binary: bool = False) -> list[float]:
    """Round numbers for a logarithmic axis: powers of two for bytes, else 1, 2, 5, 10, …; thinned
    to at most `most`.

    >>> log_ticks(0.3, 30, 6)
    [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    """
    numbers = _round_numbers(low, high, 2.0, (1,)) if binary else _round_numbers(low, high)
    within = [number for number in numbers if low <= number <= high]
    if len(within) < 2:
        return ticks(low, high, most, binary=binary)
    return within[:: -(-len(within) // most)]


def _round_numbers(
    low: float, high: float, base: float = 10.0, factors: Sequence[int] = (1, 2, 5)
) -> list[float]:
    """These multiples of the base's powers, from below `low` to above `high`."""
    log = math.log2 if base == 2.0 else math.log10
    powers = range(math.floor(log(low)), math.ceil(log(high)) + 1)
    return [factor * base**power for power in powers for factor in factors]
