"""Draws places as boxes, and links as pipes with a stream in them.

The stream is what flows now; the pipe is what that part could carry by itself. Where both are as wide, that part sets
the pace. There is a wide picture, and a tall one for narrow screens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbaas.analysis import words
from mbaas.analysis.quantity import Quantity
from mbaas.analysis.report.amounts import between
from mbaas.analysis.report.markup import Markup, element, joined, path_of

MOST_ROOM = 4.0
"""Pipes are drawn at most so many times as wide as the stream."""

STREAM = 5.0
"""Half the width of the stream."""

ARROW = 15.0
"""Length of the head of a stream, which comes out of its pipe."""

SETS_THE_PACE = "sets the pace"

FLAG = 112.0
"""Width of what says so."""


@dataclass(frozen=True)
class Place:
    """A box: its name, and two lines about it."""

    name: str
    lines: tuple[str, str]


@dataclass(frozen=True)
class Link:
    """From one place to the next.

    Attributes:
        verb: what bounds it, and does: "storage gives".
        allowed: samples/s in each trial that it could carry, of those that it has to bring; None: it has no limit.
        share: of all samples that this part has to bring.
        room: how many times as many of them it could carry.
        flows: whether samples come this way; through an empty cache all of them do.
        limit: whether it sets the pace.
    """

    verb: str
    allowed: Quantity | None
    share: float
    room: float
    flows: bool
    limit: bool

    @property
    def bounded(self) -> bool:
        """Whether its pipe has a width."""
        return self.allowed is not None and self.share > 0

    @property
    def said(self) -> str:
        """What stands at the pipe."""
        if not self.share:
            return "nothing" if self.flows else "not needed"
        return "no limit" if self.allowed is None else f"{words.number(self.allowed.value)}/s"

    @property
    def interval(self) -> str:
        """Below it."""
        return between(self.allowed).replace(" to ", "–") if self.allowed is not None and self.share else ""


@dataclass(frozen=True)
class Wide:
    """From left to right."""

    name = "wide"
    size = (1000.0, 164.0)
    box = (92.0, 72.0)
    gap = (1000.0 - 2 - 6 * 92) / 5
    middle = 108.0

    def corner(self, number: int) -> tuple[float, float]:
        return 1 + number * (self.box[0] + self.gap), self.middle - self.box[1] / 2

    def span(self, number: int) -> tuple[float, float]:
        """Where a link begins and ends."""
        start = self.corner(number)[0] + self.box[0]
        return start, start + self.gap

    def at(self, along: float, across: float) -> tuple[float, float]:
        """A point of a link, by how far along it is and how far from its middle."""
        return along, self.middle + across

    def words(self, number: int, link: Link) -> Markup:
        x = sum(self.span(number)) / 2
        parts = [
            element("text", link.verb, x=x, y=48, class_="small mid"),
            element("text", link.said, x=x, y=65, class_="value mid"),
            element("text", link.interval, x=x, y=157, class_="small mid"),
        ]
        return joined([*parts, *_flag(x - FLAG / 2, 8, link)])


@dataclass(frozen=True)
class Tall:
    """From top to bottom."""

    name = "tall"
    size = (330.0, 6 * 60 + 5 * 72 + 2.0)
    box = (126.0, 60.0)
    gap = 72.0
    middle = 64.0

    def corner(self, number: int) -> tuple[float, float]:
        return 1, 1 + number * (self.box[1] + self.gap)

    def span(self, number: int) -> tuple[float, float]:
        """Where a link begins and ends."""
        start = self.corner(number)[1] + self.box[1]
        return start, start + self.gap

    def at(self, along: float, across: float) -> tuple[float, float]:
        """A point of a link, by how far along it is and how far from its middle."""
        return self.middle + across, along

    def words(self, number: int, link: Link) -> Markup:
        y, _ = self.span(number)
        value = element("tspan", link.said, class_="value")
        interval = [element("tspan", link.interval, dx=8, class_="small")] if link.interval else []
        parts = [
            element("text", link.verb, x=102, y=y + 20, class_="small"),
            element("text", value, *interval, x=102, y=y + 38),
        ]
        return joined([*parts, *_flag(102, y + 46, link)])


def picture(places: list[Place], links: list[Link], layout: Wide | Tall, title: str) -> Markup:
    """An ``svg`` element; ``title`` is for those who do not see it."""
    width, height = layout.size
    shapes = [_box(place, layout.corner(number), layout.box) for number, place in enumerate(places)]
    for number, link in enumerate(links):
        half = STREAM * min(MOST_ROOM, max(1.0, link.room))
        limit = " limit" if link.limit else ""
        shapes.append(_along(layout, number, _pipe(half), f"pipe{limit}{'' if link.bounded else ' open'}"))
        if link.flows:
            shapes.append(_along(layout, number, _stream, f"stream{limit}"))
        shapes.append(layout.words(number, link))
    name = f"picture-{layout.name}"
    return element(
        "svg",
        element("title", title, id=name),
        *shapes,
        viewBox=f"0 0 {width:g} {height:g}",
        class_=f"pipeline {layout.name}",
        role="img",
        aria_labelledby=name,
    )


Outline = Callable[[float, float], list[tuple[float, float]]]
"""From where something begins and ends to its corners: (along, across)."""


def _pipe(half: float) -> Outline:
    return lambda start, end: [(start, -half), (end - ARROW, -half), (end - ARROW, half), (start, half)]


def _stream(start: float, end: float) -> list[tuple[float, float]]:
    neck = end - ARROW
    upper = [(start, -STREAM), (neck, -STREAM), (neck, -2 * STREAM), (end - 1, 0.0)]
    return upper + [(along, -across) for along, across in reversed(upper[:-1])]


def _along(layout: Wide | Tall, number: int, outline: Outline, kind: str) -> Markup:
    corners = [layout.at(*corner) for corner in outline(*layout.span(number))]
    return element("path", d=path_of(corners, closed=True), class_=kind)


def _box(place: Place, corner: tuple[float, float], size: tuple[float, float]) -> Markup:
    x, y = corner
    middle, third = x + size[0] / 2, size[1] / 3
    lines = [
        element("text", place.name, x=middle, y=y + third, class_="name mid"),
        *(
            element("text", line, x=middle, y=y + third + 16 * number, class_="small mid")
            for number, line in enumerate(place.lines, start=1)
        ),
    ]
    return joined([_rectangle((x, y, *size), "box", rx=6), *lines])


def _rectangle(where: tuple[float, float, float, float], kind: str, **more: float) -> Markup:
    x, y, width, height = where
    return element("rect", x=x, y=y, width=width, height=height, class_=kind, **more)


def _flag(x: float, y: float, link: Link) -> list[Markup]:
    """The limiting link says so, in words and by its shape."""
    if not link.limit:
        return []
    return [
        _rectangle((x, y, FLAG, 22), "flag", rx=11),
        element("text", SETS_THE_PACE, x=x + FLAG / 2, y=y + 15, class_="flag-text mid"),
    ]
