"""The charts of the report: split of an epoch, pipeline, what-if curves and measured curves.

The page and the files show the same matplotlib figures. The pipeline from storage to the training step is drawn as
boxes connected by pipes, each with an arrow. The arrow's width is the present flow, the pipe's width is the capacity of
the link alone. A link whose pipe is as narrow as its arrow sets the pace.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Polygon

from mbaas.base import units
from mbaas.model import words
from mbaas.model.curves import MeasuredCurve
from mbaas.model.pace import Epoch
from mbaas.model.quantity import BOUNDS, Quantity, spanning, stated
from mbaas.model.supply import ResourceTimes, resource_times
from mbaas.tools.analysis import plots
from mbaas.tools.analysis.measuring.verify import Check, EpochSplit
from mbaas.tools.analysis.report.studies import Study
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


LAYOUT_WIDE = Layout(tall=False, size=(1000, 164), box=(92, 72), gap=89.2, middle=108)
LAYOUT_TALL = Layout(tall=True, size=(330, 722), box=(126, 60), gap=72, middle=64)
"""Left to right on a desktop, top to bottom on a phone."""


def boxes_of(analysis: Analysis) -> list[Box]:
    """Return the six boxes from storage to the step."""
    rates, setup, reads = analysis.rates, analysis.setup, analysis.prediction.steady.reads
    where = f"on {units.counted(setup.nodes, 'node')}"
    workers = setup.nodes * setup.workers_of(rates.cores)
    shared = "one feed" if setup.sharing else "a feed each"
    batch_size = setup.batch_of(rates.batch_size)
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


PARTS = (("training", plots.GREY, ""), ("waiting for prep", plots.BLUE, "//"), ("waiting for reads", plots.RED, "xx"))
"""Parts of a trial's epoch: (name, colour, hatch pattern). Patterns make them distinguishable without colours."""

WIDE, NARROW = 976.0, 330.0
"""Page width in pixels on a desktop and on a phone."""

LEAST_LABEL = 0.09
"""Minimum share of its bar for a part to be labelled with a number."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of the page, also written to its own file.

    Attributes:
        name: file name without suffix.
        said: description for screen readers.
        narrow: the chart for a phone, if ``figure`` fills the width of the page.
    """

    name: str
    said: str
    figure: Figure
    narrow: Figure | None = None


@dataclass(frozen=True)
class Bar:
    """The epoch of one trial; ``parts`` are seconds in the order of `PARTS`."""

    name: str
    parts: tuple[Quantity, Quantity, Quantity]
    epoch_s: Quantity

    @property
    def shares(self) -> tuple[float, ...]:
        whole_s = sum(part.value for part in self.parts)
        return tuple(part.value / whole_s for part in self.parts)

    @property
    def said(self) -> str:
        return ", ".join(f"{units.percent(share)} {PARTS[part][0]}" for part, share in enumerate(self.shares))


def charts(analysis: Analysis, found: Sequence[Study]) -> Iterator[Chart]:
    """Draw all charts in file order; ``found`` are the studies of the analysis."""
    bars = bars_of(analysis)
    said = f"An epoch of one trial: {'; '.join(f'{bar.name}: {bar.said}' for bar in bars)}"
    yield Chart(name="split", said=said, figure=_split(bars, WIDE), narrow=_split(bars, NARROW))

    boxes, links = boxes_of(analysis), links_of(analysis)
    flow = f"{units.number(analysis.prediction.steady.trial_per_s.value)} samples/s flow in each trial"
    wide, narrow = (draw(boxes, links, layout) for layout in (LAYOUT_WIDE, LAYOUT_TALL))
    yield Chart(name="pipeline", said=f"From storage to the training step: {flow}", figure=wide, narrow=narrow)

    for study in found:
        said = f"{study.title}: predicted samples/s in each trial against {study.axis}"
        yield Chart(name=study.name, said=said, figure=_what_if(study))
    for name, title, thing, curve in (
        ("measured-prep", "Preparing, data in memory", "prep worker", analysis.rates.prep),
        ("measured-storage", "Reading cold storage", "reader", analysis.rates.storage),
    ):
        yield Chart(name=name, said=f"{title}: samples/s against {thing}s", figure=_measured(title, thing, curve))


def bars_of(analysis: Analysis) -> list[Bar]:
    """Return a bar for the predicted epoch, and two for the measured one if there is a split."""
    epoch, split = analysis.prediction.steady, analysis.split
    bars = [_bar(f"predicted, {units.seconds(epoch.epoch_s.value)}", epoch)]
    if split is not None:
        # The other bars count waits for other trials as prep stall: trials also wait for each other with data in
        # memory.
        live = (split.live_prep_stall_s.plus(split.live_peer_stall_s), split.live_fetch_stall_s)
        # loaders report waits; the rest of the time is training
        training_s = max(0.0, split.epoch_s.value - sum(part.value for part in live))
        bars.append(_bar(f"three runs compared, {units.seconds(split.epoch_s.value)}", split))
        bars.append(Bar("as loaders say while they run", (stated(training_s, unit="s"), *live), split.epoch_s))
    return bars


def _bar(name: str, found: Epoch | EpochSplit) -> Bar:
    return Bar(name, (found.compute_s, found.prep_stall_s, found.fetch_stall_s), found.epoch_s)


def _split(bars: Sequence[Bar], width: float) -> Figure:
    # name and shares of a bar are on one line above it if the figure is wide
    wide = width == WIDE
    # matplotlib does not wrap lines, so this does it for phones; "12 %" is kept together
    told = [[bar.said] if wide else textwrap.wrap(bar.said.replace(" %", "\u00a0%"), 46) for bar in bars]
    line, height, columns = 18.0, 34.0, 3 if wide else 2
    above = line * (1 if wide else 1 + max(map(len, told)))
    tops = [(above + height + 14) * number for number in range(len(bars))]
    size = (width, tops[-1] + above + height + line * (2 if wide else 3))
    figure, axes = plots.new_canvas(title="An epoch of one trial", size=size)
    for bar, top, texts in zip(bars, tops, told, strict=True):
        plots.write(axes, (1, top + 13), bar.name, strong=True)
        for number, text in enumerate(texts):
            at = (width - 1, top + 13) if wide else (1, top + 13 + line * (1 + number))
            plots.write(axes, at, text, side="right" if wide else "left")
        _draw_bar(axes, bar, width, middle=top + above + height / 2, height=height)
    for part, (name, *_) in zip(axes.containers, PARTS, strict=False):  # one legend entry for all bars
        part.set_label(name)
    plots.add_legend(figure, columns=columns)
    return figure


def _draw_bar(axes: Axes, bar: Bar, width: float, *, middle: float, height: float) -> None:
    left = 0.0
    for (_, colour, pattern), share in zip(PARTS, bar.shares, strict=True):
        part = share * width
        axes.barh(middle, part, height, left, color=colour, hatch=pattern, edgecolor=(plots.PAPER, 0.5), linewidth=0)
        if share >= LEAST_LABEL:
            # with a background, because a number is unreadable on a pattern
            label = {"boxstyle": "round,pad=0.3", "facecolor": plots.PAPER, "edgecolor": "none"}
            look: dict[str, Any] = {"color": plots.INK, "size": plots.TEXT, "weight": "bold", "bbox": label}
            axes.text(left + part / 2, middle, units.percent(share), ha="center", va="center_baseline", **look)
        left += part


def _what_if(study: Study) -> Figure:
    alone, shared = "a feed for each trial", "one feed for all"
    series = {"predicted": study.main}
    if study.other is not None:
        names = (shared, alone) if study.sharing else (alone, shared)
        series = dict(zip(names, (study.main, study.other), strict=True))
    # the current value comes first, as a solid line; if it is enough already, one line marks both
    marks = {"now": study.now}
    if study.enough is not None and study.enough != study.now:
        marks["enough"] = study.enough
    return plots.lines(
        {name: [(at, found.steady.trial_per_s) for at, found in along.points] for name, along in series.items()},
        title=study.title,
        x=study.axis,
        y="samples/s in each trial",
        measured=[(at, check.found, _remark(check)) for at, check in study.checks],
        marks=marks,
        log=study.log,
        tick=study.tick,
    )


def _remark(check: Check) -> str:
    return (
        f"{words.setting(check.parameter, check.value)}: measured {words.with_interval(check.found)}, predicted "
        f"{words.with_interval(check.predicted)} samples/s, {units.percent(check.error, signed=True)}"
    )


def _measured(title: str, thing: str, curve: MeasuredCurve) -> Figure:
    # the curve only bends at these counts, so no other points are needed
    bends = (count for count, _ in curve.fit.curve.knots if count < curve.most)
    counts = sorted({0.0, *bends, *(count for count, _ in curve.points)})
    return plots.lines(
        {"straight lines that predictions follow": [(count, curve.quantity(count)) for count in counts]},
        title=title,
        x=f"{thing}s",
        y="samples/s",
        measured=[
            (count, rate, f"{units.counted(round(count), thing)}: {words.with_interval(rate)} samples/s")
            for count, rate in curve.points
        ],
    )
