"""Draws bars with their figures, and makes SVG files that are readable on light and dark pages.

The house's chart style applies (`mbaas.tools.analysis.plots`), and the report's function makes the SVG
(`mbaas.tools.analysis.report.page`). A chart is as wide as a phone, so text stays readable there. On a wide page it is
enlarged by a quarter. Each bar has its name and figures on the line above, so no text depends on the length of a bar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mbaas.tools.analysis import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 440.0
"""Width of a chart, in its own pixels."""

ENLARGED = 1.25
"""Pixels of a wide page for a pixel of a chart."""

MARGIN = 18.0
TITLE, HEADING, NAME, BAR, GAP = 24.0, 22.0, 18.0, 10.0, 9.0
"""Heights of the parts of a chart."""

COMPACT = 20.0
"""Height of a row of `waits`, whose names are next to the bars."""

COMPACT_NAME, COMPACT_FIGURE = 128.0, 92.0
"""Widths of the columns left and right of the bars of `waits`."""

RATIO = 50.0
"""Width of the column of ratios."""

Kind = Literal["mbaas", "other", "bound"]

COLOURS: Mapping[Kind, str] = {"mbaas": plots.BLUE, "other": plots.GREY, "bound": plots.PAPER}
"""Colours of bars. A bound is an outline. Blue and grey differ in brightness, too."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar and the line above it.

    Attributes:
        figure: the value with its unit.
        ratio: the value relative to a bar of the same panel, at the end of the line.
        name: start of the line.
        beside: a text before the figure, such as a paper's result.
    """

    name: str
    value: float
    figure: str
    kind: Kind
    ratio: str = ""
    beside: str = ""


@dataclass(frozen=True)
class Panel:
    """Bars with one scale below a heading."""

    heading: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Wait:
    """A row of `waits`: the median and the longest wait, in seconds."""

    name: str
    median_s: float
    longest_s: float


def bars(title: str, panels: Sequence[Panel], *, source: str) -> Figure:
    """Draw panels of bars below each other, with the source in small letters at the bottom."""
    rows = sum(len(panel.bars) for panel in panels)
    height = 2 * MARGIN + TITLE + len(panels) * (HEADING + GAP) + rows * (NAME + BAR + GAP) + NAME
    figure, axes = _new(title, height, source)
    top = MARGIN + TITLE + GAP
    for panel in panels:
        plots.write(axes, (MARGIN, top + 12), panel.heading)
        top += HEADING
        most = max(bar.value for bar in panel.bars)
        has_ratios = any(bar.ratio for bar in panel.bars)
        for bar in panel.bars:
            _line(axes, top, bar, has_ratios=has_ratios)
            _rectangle(axes, MARGIN, top + NAME, (WIDTH - 2 * MARGIN) * bar.value / most, bar.kind)
            top += NAME + BAR + GAP
        top += GAP
    return figure


def waits(title: str, heading: str, rows: Sequence[Wait], *, source: str) -> Figure:
    """Draw a bar to the median and a line to the longest wait of each row."""
    height = 2 * MARGIN + TITLE + GAP + HEADING + GAP + len(rows) * COMPACT + GAP + NAME
    figure, axes = _new(title, height, source)
    top = MARGIN + TITLE + GAP
    plots.write(axes, (MARGIN, top + 12), heading)
    top += HEADING + GAP
    left = MARGIN + COMPACT_NAME
    scale = (WIDTH - MARGIN - COMPACT_FIGURE - left) / max(row.longest_s for row in rows)
    for row in rows:
        middle = top + COMPACT / 2
        plots.write(axes, (MARGIN, middle + 4), row.name, colour=plots.INK)
        axes.plot([left, left + scale * row.longest_s], [middle, middle], color=plots.GREY, linewidth=2, zorder=0)
        _rectangle(axes, left, middle - BAR / 2, max(1.0, scale * row.median_s), "mbaas")
        text = f"{row.median_s:.2g} / {row.longest_s:.2g} s"
        plots.write(axes, (WIDTH - MARGIN, middle + 4), text, side="right")
        top += COMPACT
    return figure


def framed(figure: Figure, title: str, *, source: str) -> Figure:
    """Add the title and the source above a chart of `mbaas.tools.analysis.plots`, and return it."""
    (axes,) = figure.axes
    width, height = figure.bbox.width, figure.bbox.height
    above = MARGIN + TITLE + NAME
    size = (width + 2 * MARGIN, height + above + MARGIN)
    figure.set_size_inches(size[0] / 72, size[1] / 72)
    left, bottom, across, up = axes.get_position().bounds
    corner = ((left * width + MARGIN) / size[0], (bottom * height + MARGIN) / size[1])
    axes.set_position((*corner, across * width / size[0], up * height / size[1]))
    for legend in figure.legends:
        legend.set_bbox_to_anchor((MARGIN / size[0], MARGIN / size[1]), transform=figure.transFigure)
    strong: dict[str, Any] = {"color": plots.INK, "size": plots.TEXT + 2, "weight": "bold"}
    for down, text, look in ((14.0, title, strong), (14 + NAME, source, {"color": plots.SOFT, "size": plots.TEXT})):
        figure.text(MARGIN / size[0], 1 - (MARGIN + down) / size[1], text, **look)
    return figure


def svg(figure: Figure, *, name: str, said: str, margin: float = 0.0) -> str:
    """Return a figure as an SVG file with real text and a background, light or dark as its page.

    Args:
        name: name of the chart.
        said: description for screen readers.
        margin: room around a figure that has none.
    """
    from mbaas.tools.analysis.report.page import inline

    width, height = (float(side) + 2 * margin for side in (figure.bbox.width, figure.bbox.height))
    size = f'width="{ENLARGED * width:g}" height="{ENLARGED * height:g}" xmlns="http://www.w3.org/2000/svg"'
    place = f"{0 - margin:g} {0 - margin:g} {width:g} {height:g}"
    paper = f'<rect x="{0 - margin:g}" y="{0 - margin:g}" width="{width:g}" height="{height:g}" rx="6"'
    text = str(inline(figure, name=name, said=said)).replace("<svg ", f"<svg {size} ", 1)
    text = re.sub('viewBox="[^"]*"', f'viewBox="{place}"', text, count=1)
    return text.replace("</title>", f'</title><style>{_style()}</style>{paper} style="fill: var(--paper)"/>', 1) + "\n"


def _new(title: str, height: float, source: str) -> tuple[Figure, Axes]:
    figure, axes = plots.new_canvas(title=title, size=(WIDTH, height))
    plots.write(axes, (MARGIN, MARGIN + 14), title, strong=True)
    plots.write(axes, (MARGIN, height - MARGIN + 2), source)
    return figure, axes


def _line(axes: Axes, top: float, bar: Bar, *, has_ratios: bool) -> None:
    baseline, right = top + 12, WIDTH - MARGIN
    plots.write(axes, (MARGIN, baseline), bar.name, colour=plots.INK)
    if bar.ratio:
        plots.write(axes, (right, baseline), bar.ratio, side="right", strong=True)
    texts = " · ".join(text for text in (bar.beside, bar.figure) if text)
    plots.write(axes, (right - RATIO * has_ratios, baseline), texts, side="right")


def _rectangle(axes: Axes, left: float, top: float, width: float, kind: Kind) -> None:
    edge = plots.GREY if kind == "bound" else COLOURS[kind]
    axes.barh(top + BAR / 2, width, BAR, left, color=COLOURS[kind], edgecolor=edge, linewidth=1)


@cache
def _style() -> str:
    """Read the light and the dark colours from the style sheet of the report.

    An image follows the reader's setting. Inside a page of the site, it follows the page's own switch.
    """
    sheet = (Path(plots.__file__).parent / "report" / "templates" / "style.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+)", part)) for part in re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)[:2]
    )
    names = ("paper", "ink", "soft", "blue", "red", "grey")
    day, night = (";".join(f"--{name}:{colours[name]}" for name in names) for colours in (light, dark))
    return (
        f".chart{{{day};max-width:100%;height:auto;"
        "font-family:system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
        f"@media (prefers-color-scheme:dark){{.chart{{{night}}}}}"
        f"[data-md-color-scheme=default] .chart{{{day}}}[data-md-color-scheme=slate] .chart{{{night}}}"
    )
