"""The charts of the report: split of an epoch, pipeline, what-if curves and measured curves.

The page and the files show the same matplotlib figures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mbaas.base import units
from mbaas.model import words
from mbaas.model.curves import MeasuredCurve
from mbaas.model.pace import Epoch
from mbaas.model.quantity import Quantity, stated
from mbaas.tools.analysis import plots
from mbaas.tools.analysis.measuring.verify import Check, EpochSplit
from mbaas.tools.analysis.report import pipeline
from mbaas.tools.analysis.report.studies import Study
from mbaas.tools.analysis.whole import Analysis

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

    boxes, links = pipeline.boxes_of(analysis), pipeline.links_of(analysis)
    flow = f"{units.number(analysis.prediction.steady.trial_per_s.value)} samples/s flow in each trial"
    wide, narrow = (pipeline.draw(boxes, links, layout) for layout in (pipeline.WIDE, pipeline.TALL))
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
