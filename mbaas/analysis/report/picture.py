"""The pipeline as a picture: what could flow from each place to the next, and what does.

Every place is drawn as a box, every link as a pipe with a stream in it. The stream is what flows now; the pipe is what
that part could carry by itself. Where both are as wide, that part sets the pace. There is a wide picture and a tall one
for narrow screens, of the same links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mbaas.analysis import words
from mbaas.analysis.quantity import Quantity, spanning
from mbaas.analysis.rates import Rates
from mbaas.analysis.report.amounts import between
from mbaas.analysis.report.markup import Markup, element, joined, path_of
from mbaas.analysis.report.tables import details, table
from mbaas.analysis.setup import Setup
from mbaas.analysis.stages import Stages, stages
from mbaas.analysis.whatif import BOUNDS
from mbaas.analysis.whole import Analysis

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
        allowed: samples/s in each trial that it could carry, of those that come this way; None: it has no limit.
        share: of all samples that come this way.
        room: how many times the samples that come this way it could carry.
        limit: whether it sets the pace.
    """

    verb: str
    allowed: Quantity | None
    share: float
    room: float
    limit: bool

    @property
    def said(self) -> str:
        """What stands at the pipe."""
        if not self.share:
            return "not needed"
        return "no limit" if self.allowed is None else f"{words.number(self.allowed.value)}/s"

    @property
    def interval(self) -> str:
        """Below it."""
        return between(self.allowed).replace(" to ", "–") if self.allowed is not None and self.share else ""


def places_of(rates: Rates, setup: Setup, reads: tuple[float, float]) -> list[Place]:
    """From storage to the step; ``reads`` are the shares of samples from storage and from caches."""
    stored, cached = reads
    each = "" if setup.nodes == 1 else " a node"
    where = "on 1 node" if setup.nodes == 1 else f"on {setup.nodes:,} nodes"
    shared = "one feed" if setup.sharing else "a feed each"
    batch_size = rates.batch_size if setup.batch_size is None else setup.batch_size
    return [
        Place("Storage", (f"{words.share(stored)} of", "samples")),
        Place("Cache", (f"{words.share(cached)} of", "samples")),
        Place("Prep", (f"{words.counted(setup.workers_of(rates.cores), 'worker')}{each}", where)),
        Place("Staging", ("minibatches", "in memory")),
        Place("Trials", (words.counted(setup.trials, "trial"), shared if setup.trials > 1 else where)),
        Place("Step", (f"{batch_size:,} samples", "at a time")),
    ]


def links_of(analysis: Analysis) -> list[Link]:
    """The five links between the six places, in a steady epoch."""
    rates, setup, epoch = analysis.rates, analysis.setup, analysis.prediction.steady
    found = dict(
        zip(BOUNDS, (stages(rates, setup, steady=True, step=b, prep=b, supply=b) for b in BOUNDS), strict=True)
    )

    def link(verb: str, seconds: Callable[[Stages], float], names: tuple[str, ...], share: float = 1.0) -> Link:
        spent = {bound: seconds(at) for bound, at in found.items()}
        limited = min(spent.values()) > 0
        allowed = spanning(*(share / spent[b] for b in ("value", "low", "high")), unit="samples/s") if limited else None
        room = 1 / (spent["value"] * epoch.trial_per_s.value) if limited else MOST_ROOM
        return Link(verb, allowed, share, room, epoch.limit in names)

    middle = found["value"]
    prep = "prep makes" if middle.prep["prep"] >= middle.prep["cores"] else "cores allow"
    compute = max(middle.compute, key=middle.compute.__getitem__)
    takes = {"step": "step takes", "accelerators": "accelerators take", "steps' cores": "cores allow"}
    cached = epoch.reads.memory + epoch.reads.disk
    return [
        link("storage gives", lambda s: s.fetch["storage"], ("storage",), epoch.reads.storage),
        link("cache gives", lambda s: s.fetch_s - s.fetch["storage"], ("memory", "disk"), cached),
        link(prep, lambda s: max(s.prep["prep"], s.prep["cores"]), ("prep", "cores")),
        link("network carries" if setup.nodes > 1 else "handed over", lambda s: s.prep["network"], ("network",)),
        link(takes[compute], lambda s: s.compute_s, tuple(takes)),
    ]


def pipeline(analysis: Analysis) -> Markup:
    """Both pictures, what they show in words, and the same as a table."""
    epoch = analysis.prediction.steady
    links = links_of(analysis)
    reads = (epoch.reads.storage, epoch.reads.memory + epoch.reads.disk)
    places = places_of(analysis.rates, analysis.setup, reads)
    flow = f"{words.number(epoch.trial_per_s.value)} samples/s"
    said = (
        f"The stream is what flows now: {flow} in each trial. A pipe is what its part could carry by itself, as the "
        "number at it says, and what was measured leaves open below it. Where the stream fills its pipe, that part "
        f"sets the pace. Pipes are drawn at most {MOST_ROOM:g} times as wide as the stream."
    )
    if all(reads):
        said += " Storage and cache take turns: each is asked for its share of the samples, one after the other."
    return joined(
        [
            element(
                "figure",
                _picture(
                    places, links, _Wide(), f"Pipeline from storage to the training step; {flow} flow in each trial"
                ),
                _picture(places, links, _Tall(), f"Pipeline from top to bottom; {flow} flow in each trial"),
                element("figcaption", said),
            ),
            details("The picture as a table", _table(places, links)),
        ]
    )


@dataclass(frozen=True)
class _Wide:
    """From left to right."""

    name = "wide"
    size = (1000.0, 160.0)
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
            element("text", link.verb, x=x, y=56, class_="small mid"),
            element("text", link.said, x=x, y=74, class_="value mid"),
            element("text", link.interval, x=x, y=147, class_="small mid"),
        ]
        return joined([*parts, *_flag(x - FLAG / 2, 16, link)])


@dataclass(frozen=True)
class _Tall:
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


def _picture(places: list[Place], links: list[Link], layout: _Wide | _Tall, title: str) -> Markup:
    width, height = layout.size
    shapes = [_box(place, layout.corner(number), layout.box) for number, place in enumerate(places)]
    for number, link in enumerate(links):
        half = STREAM * min(MOST_ROOM, max(1.0, link.room))
        limit = " limit" if link.limit else ""
        is_open = link.allowed is None or not link.share
        shapes.append(_along(layout, number, _pipe(half), f"pipe{limit}{' open' if is_open else ''}"))
        if link.share:
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


def _along(layout: _Wide | _Tall, number: int, outline: Outline, kind: str) -> Markup:
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


def _table(places: list[Place], links: list[Link]) -> Markup:
    rows = []
    for number, link in enumerate(links):
        said = f"{link.verb} {link.said}" if link.allowed is not None and link.share else link.said
        busy = f"{words.share(min(1.0, 1 / link.room))}" if link.allowed is not None and link.share else "–"
        rows.append(
            (
                f"{places[number].name} to {places[number + 1].name}",
                said,
                link.interval or "–",
                busy,
                SETS_THE_PACE if link.limit else "",
            )
        )
    heads = ("from, to", "could carry, in each trial", "between", "of that is used", "pace")
    return table("What each part could carry", heads, rows, numbers=(2, 3))
