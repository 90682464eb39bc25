"""A line chart as SVG, that takes its colours from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mbaas.analysis.quantity import Quantity
from mbaas.analysis.report.markup import Markup, element, joined, path_of

WIDTH, HEIGHT = 400.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 14.0, 50.0, 38.0

NEAR = 60.0
"""Labels of two marks that are closer stand one above the other."""


@dataclass(frozen=True)
class Line:
    """A line, and the band in which it may lie.

    Attributes:
        points: (x, value and interval), x ascending.
        kind: "main" or "other", which looks different.
        band: whether the interval is drawn.
    """

    points: Sequence[tuple[float, Quantity]]
    kind: str = "main"
    band: bool = True


@dataclass(frozen=True)
class Point:
    """Something measured: a value with its interval, and what it says when pointed at."""

    x: float
    y: Quantity
    said: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What is drawn.

    Attributes:
        name: for an id, unlike all others of the page.
        title: for those who do not see it.
        x: name of the horizontal axis; `ticks` are values with their labels.
        y: name of the vertical axis, which begins at 0.
        marks: vertical lines with a label, at most two.
        log: whether the horizontal axis is logarithmic.
    """

    name: str
    title: str
    x: str
    y: str
    ticks: Sequence[tuple[float, str]]
    lines: Sequence[Line]
    points: Sequence[Point] = ()
    marks: Sequence[tuple[float, str]] = ()
    log: bool = False


def nice_step(most: float, *, ticks: int) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten with which at most ``ticks`` steps lead to ``most``."""
    least = most / ticks
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def nice_ticks(most: float, *, ticks: int) -> list[float]:
    """From 0, equally far apart, up to the first that is not below ``most``."""
    step = nice_step(most, ticks=ticks)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def drawn(chart: Chart) -> Markup:
    """The chart as an ``svg`` element."""
    frame = _Frame.of(chart)
    parts = [*frame.grid(), *(frame.axis_name(name) for name in ("x", "y"))]
    parts += [frame.band(line) for line in chart.lines if line.band]
    parts += frame.vertical_marks()
    parts += [frame.line(line) for line in chart.lines]
    parts += [frame.point(point) for point in chart.points]
    name = f"chart-{chart.name}"
    return element(
        "svg",
        element("title", chart.title, id=name),
        *parts,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        class_="chart",
        role="img",
        aria_labelledby=name,
    )


@dataclass(frozen=True)
class _Frame:
    """Where things lie: x from ``first`` to ``last``, y from 0 to the last of ``heights``."""

    chart: Chart
    first: float
    last: float
    heights: Sequence[float]

    @classmethod
    def of(cls, chart: Chart) -> _Frame:
        xs = [x for line in chart.lines for x, _ in line.points] + [point.x for point in chart.points]
        tops = [(y.high if line.band else y.value) for line in chart.lines for _, y in line.points]
        tops += [point.y.high for point in chart.points]
        return cls(chart, min(xs), max(xs), nice_ticks(max(tops), ticks=5))

    def x(self, value: float) -> float:
        first, last = self.first, self.last
        if self.chart.log:
            value, first, last = map(math.log, (value, first, last))
        along = (value - first) / (last - first) if last > first else 0.5
        return LEFT + along * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.heights[-1] * (HEIGHT - TOP - BOTTOM)

    def grid(self) -> list[Markup]:
        floor = HEIGHT - BOTTOM
        parts = []
        for height in self.heights:
            y = self.y(height)
            parts.append(element("path", d=path_of([(LEFT, y), (WIDTH - RIGHT, y)]), class_="grid"))
            parts.append(element("text", f"{height:,g}", x=LEFT - 6, y=y + 4, class_="tick end"))
        for value, label in self.chart.ticks:
            if self.first <= value <= self.last:
                x = self.x(value)
                parts.append(element("path", d=path_of([(x, floor), (x, floor + 4)]), class_="grid"))
                parts.append(element("text", label, x=x, y=floor + 17, class_="tick mid"))
        return parts

    def axis_name(self, which: str) -> Markup:
        if which == "y":
            return element("text", self.chart.y, x=2, y=13, class_="axis")
        return element("text", self.chart.x, x=WIDTH - RIGHT, y=HEIGHT - 4, class_="axis end")

    def line(self, line: Line) -> Markup:
        return element("path", d=path_of([(self.x(x), self.y(q.value)) for x, q in line.points]), class_=line.kind)

    def band(self, line: Line) -> Markup:
        over = [(self.x(x), self.y(q.high)) for x, q in line.points]
        under = [(self.x(x), self.y(q.low)) for x, q in reversed(line.points)]
        return element("path", d=path_of([*over, *under], closed=True), class_="band")

    def vertical_marks(self) -> list[Markup]:
        parts = []
        placed = sorted((self.x(value), label) for value, label in self.chart.marks)
        for number, (x, label) in enumerate(placed):
            near_edge = NEAR / 2
            side = "start" if x < LEFT + near_edge else "end" if x > WIDTH - RIGHT - near_edge else "mid"
            above = 13 * number if x - placed[0][0] < NEAR else 0
            parts.append(element("path", d=path_of([(x, TOP - 6), (x, HEIGHT - BOTTOM)]), class_=f"mark-{label}"))
            parts.append(element("text", label, x=x, y=TOP - 10 - above, class_=f"tick {side}"))
        return parts

    def point(self, point: Point) -> Markup:
        x, y = self.x(point.x), self.y(point.y.value)
        low, high = self.y(point.y.low), self.y(point.y.high)
        bar = path_of([(x - 4, low), (x + 4, low)]) + path_of([(x, low), (x, high)])
        bar += path_of([(x - 4, high), (x + 4, high)])
        diamond = path_of([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], closed=True)
        shapes = [element("path", d=bar, class_="whisker"), element("path", d=diamond, class_="diamond")]
        return element("g", element("title", point.said), *shapes)


def charts_beside(*charts: str) -> Markup:
    """Figures in as many columns as there is room for."""
    return element("div", joined(charts), class_="beside")
