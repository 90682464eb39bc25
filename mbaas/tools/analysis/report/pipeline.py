"""The pipeline from storage to the training step: capacity and present flow of each link.

It is drawn as boxes connected by pipes, each with an arrow. The arrow's width is the present flow, the pipe's width is
the capacity of the link alone. A link whose pipe is as narrow as its arrow sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon

from mbaas.base import units
from mbaas.model import words
from mbaas.model.quantity import BOUNDS, Quantity, spanning
from mbaas.model.supply import ResourceTimes, resource_times
from mbaas.tools.analysis import plots
from mbaas.tools.analysis.whole import Analysis

MOST_ROOM = 4.0
"""Maximum width of a pipe relative to its arrow."""

ARROW_HALF_WIDTH = 5.0
"""Half the width of an arrow, in pixels."""

ARROW_HEAD = 15.0
"""Length in pixels of an arrow's head, which extends beyond its pipe."""

SETS_THE_PACE = "sets the pace"


@dataclass(frozen=True)
class Box:
    """A box of the drawing, with its name and two lines of text."""

    name: str
    about: tuple[str, str]


@dataclass(frozen=True)
class Link:
    """A link from one box to the next.

    Attributes:
        verb: label with the bounding resource: "storage gives".
        allowed: capacity in samples/s of each trial, counting only samples that take this link; None: no limit.
        share: share of all samples that take this link.
        room: capacity relative to the present flow.
        flows: whether any samples take this link; true even for an empty cache, which all samples pass.
        limit: whether the link sets the pace.
    """

    verb: str
    allowed: Quantity | None
    share: float
    room: float
    flows: bool
    limit: bool

    @property
    def bounded(self) -> bool:
        """Return whether the width of the pipe follows from a capacity."""
        return self.allowed is not None and self.share > 0

    @property
    def said(self) -> str:
        if not self.share:
            return "nothing" if self.flows else "not needed"
        return "no limit" if self.allowed is None else f"{units.number(self.allowed.value)}/s"

    @property
    def interval(self) -> str:
        """Return the interval of the capacity as text: "234–264"."""
        return words.between(self.allowed).replace(" to ", "–") if self.allowed is not None and self.share else ""


@dataclass(frozen=True)
class Layout:
    """Positions of a row of boxes, in pixels.

    ``box`` is the size of a box, ``gap`` the distance between two, and ``middle`` that of the centre line from the
    edge.
    """

    tall: bool  # also the index into `box` of its length along the row
    size: tuple[float, float]
    box: tuple[float, float]
    gap: float
    middle: float

    def at(self, along: float, across: float) -> tuple[float, float]:
        """Return the pixel at a distance along the row and a distance from its centre line."""
        return (self.middle + across, along) if self.tall else (along, self.middle + across)

    def begin(self, number: int) -> float:
        """Return the distance along the row at which a box begins."""
        return 1 + number * (self.box[self.tall] + self.gap)


WIDE = Layout(tall=False, size=(1000, 164), box=(92, 72), gap=89.2, middle=108)
TALL = Layout(tall=True, size=(330, 722), box=(126, 60), gap=72, middle=64)
"""Left to right on a desktop, top to bottom on a phone."""


def boxes_of(analysis: Analysis) -> list[Box]:
    """Return the six boxes from storage to the step."""
    rates, setup, reads = analysis.rates, analysis.setup, analysis.prediction.steady.reads
    where = f"on {units.counted(setup.nodes, 'node')}"
    workers = setup.nodes * setup.workers_of(rates.cores)
    shared = "one feed" if setup.sharing else "a feed each"
    batch_size = rates.batch_size if setup.batch_size is None else setup.batch_size
    return [
        Box("Storage", (f"{units.percent(reads.storage)} of", "samples")),
        Box("Cache", (f"{units.percent(reads.memory + reads.disk)} of", "samples")),
        Box("Prep", (units.counted(workers, "worker"), where)),
        Box("Staging", ("minibatches", "in memory")),
        Box("Trials", (units.counted(setup.trials, "trial"), shared if setup.trials > 1 else where)),
        Box("Step", (f"{batch_size:,} samples", "at a time")),
    ]


def links_of(analysis: Analysis) -> list[Link]:
    """Return the five links between the boxes, with their separate capacities in a steady epoch."""
    rates, setup, epoch = analysis.rates, analysis.setup, analysis.prediction.steady
    found = {bound: resource_times(rates, setup, steady=True, step=bound, prep=bound, supply=bound) for bound in BOUNDS}

    def link(
        verb: str,
        seconds: Callable[[ResourceTimes], float],
        names: tuple[str, ...],
        *,
        share: float = 1.0,
        flows: bool = True,
    ) -> Link:
        spent = {bound: seconds(at) for bound, at in found.items()}
        limited = min(spent.values()) > 0  # no time: unlimited, or unused
        # the seconds are a mean over all samples, though only ``share`` of the samples take this link
        allowed = spanning(*(share / spent[b] for b in BOUNDS), unit="samples/s") if limited else None
        room = 1 / (spent["value"] * epoch.trial_per_s.value) if limited else MOST_ROOM
        return Link(verb, allowed, share, room, flows, epoch.limit in names)

    # if two resources share a link, the slower one names it
    middle = found["value"]
    prep = "prep makes" if middle.prep["prep"] >= middle.prep["cores"] else "cores allow"
    compute = max(middle.compute, key=middle.compute.__getitem__)
    takes = {"step": "step takes", "accelerators": "accelerators take", "steps' cores": "cores allow"}
    stored, cached = epoch.reads.storage, epoch.reads.memory + epoch.reads.disk
    return [
        link("storage gives", lambda s: s.fetch["storage"], ("storage",), share=stored, flows=stored > 0),
        link("cache gives", _from_caches, ("memory", "disk"), share=cached),
        link(prep, lambda s: max(s.prep["prep"], s.prep["cores"]), ("prep", "cores")),
        link("network carries" if setup.nodes > 1 else "handed over", lambda s: s.prep["network"], ("network",)),
        link(takes[compute], lambda s: s.compute_s, tuple(takes)),
    ]


def _from_caches(found: ResourceTimes) -> float:
    return sum(seconds for name, seconds in found.fetch.items() if name != "storage")


def draw(boxes: list[Box], links: list[Link], layout: Layout) -> Figure:
    figure, axes = plots.new_canvas(title="From storage to the training step", size=layout.size)
    for number, part in enumerate(boxes):
        _draw_box(axes, part, layout.at(layout.begin(number), -layout.box[not layout.tall] / 2), layout.box)
    for number, link in enumerate(links):
        start = layout.begin(number) + layout.box[layout.tall]
        _draw_link(axes, link, layout, start)
        _write_link(axes, link, layout, start)
    return figure


def _draw_box(axes: Axes, part: Box, corner: tuple[float, float], size: tuple[float, float]) -> None:
    box = "round,pad=0,rounding_size=6"
    axes.add_patch(FancyBboxPatch(corner, *size, boxstyle=box, facecolor="none", edgecolor=plots.INK, linewidth=1.25))
    middle, third = corner[0] + size[0] / 2, corner[1] + size[1] / 3
    plots.write(axes, (middle, third), part.name, side="center", strong=True)
    for number, line in enumerate(part.about, start=1):
        plots.write(axes, (middle, third + 16 * number), line, side="center")


def _draw_link(axes: Axes, link: Link, layout: Layout, start: float) -> None:
    colour, neck, end = plots.RED if link.limit else plots.BLUE, start + layout.gap - ARROW_HEAD, start + layout.gap - 1
    # a link carries at least its flow, so only rounding could make the pipe narrower than the arrow
    half = ARROW_HALF_WIDTH * min(MOST_ROOM, max(1.0, link.room))
    pipe = [(start, -half), (neck, -half), (neck, half), (start, half)]
    axes.add_patch(
        Polygon(
            [layout.at(*corner) for corner in pipe],
            facecolor=(colour, 0.15) if link.bounded else "none",
            edgecolor=colour if link.limit else (colour, 0.6),
            linewidth=3 if link.limit else 1,
            linestyle="-" if link.bounded else (0, (4, 4)),
        )
    )
    if link.flows:
        upper = [(start, -ARROW_HALF_WIDTH), (neck, -ARROW_HALF_WIDTH), (neck, -2 * ARROW_HALF_WIDTH)]
        head = [*upper, (end, 0.0), *((along, -across) for along, across in reversed(upper))]
        axes.add_patch(Polygon([layout.at(*corner) for corner in head], facecolor=colour, linewidth=0))


def _write_link(axes: Axes, link: Link, layout: Layout, start: float) -> None:
    # "sets the pace" is written out, so that it does not depend on colour alone
    side: plots.Side = "left" if layout.tall else "center"
    x = start + layout.gap / 2
    # lines are stacked next to a vertical pipe, and placed above and below a horizontal one
    verb, said, interval, flag = (
        ((102, start + 20), (102, start + 38), (192, start + 38), (166, start + 57))
        if layout.tall
        else ((x, 48), (x, 65), (x, 157), (x, 19))
    )
    plots.write(axes, verb, link.verb, side=side)
    plots.write(axes, said, link.said, side=side, strong=True)
    plots.write(axes, interval, link.interval, side=side)
    if link.limit:
        box = "round,pad=0,rounding_size=12"
        corner = (flag[0] - 64, flag[1] - 12)
        axes.add_patch(FancyBboxPatch(corner, 128, 24, boxstyle=box, facecolor=plots.RED, linewidth=0))
        plots.write(axes, (flag[0], flag[1] + 5), SETS_THE_PACE, side="center", strong=True, colour=plots.PAPER)
