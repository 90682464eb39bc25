"""Charts in one style, drawn by matplotlib for files and for report pages.

Colours have medium brightness because a file has no background and must be readable on white and on black. A page that
follows the reader's light or dark mode replaces them. A chart's title is the label of its figure: `save` writes it
above the chart, a page uses it as a heading. One unit of a figure's size is a CSS pixel.

Figures are made without pyplot, so they need no display and leave no global state. matplotlib takes a second to import
and most commands draw nothing. It is therefore imported when a figure is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model.quantity import Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT = "#757575", "#777777"
"""Main and secondary colour of text and axes. Both have about the same contrast with white as with black."""

PAPER = "#ffffff"
"""Background of labels on shapes, and text on dark shapes."""

BLUE, RED, GREY = "#3b82c4", "#d4583f", "#8a8f98"

SERIES = (BLUE, RED, "#2f9e6e", "#9a6cc9", "#c08a1e", "#2aa3a8", "#c55a93", GREY)
"""Colours of several series, in this order."""

TEXT = 12.0
"""Text size in pixels. A chart of `lines` is about as wide as a phone, so it is rarely scaled down."""

SAYS = "says: "
"""Prefix of a shape's gid; a page shows the rest of the gid as a tooltip."""

SUFFIXES = (".png", ".svg")

Points = Sequence[tuple[float, Quantity]]
"""(x, y with its interval) pairs; x ascends."""

Side = Literal["left", "center", "right"]

STEPS = (1, 2, 2.5, 5, 10)
"""Distances between the ticks of an axis, times a power of ten."""


def check_path(path: Path) -> None:
    """Check a path for `save` in advance."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a plot's file must end with {' or '.join(SUFFIXES)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of a plot must exist, got {path.parent}")


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or SVG file, depending on the suffix. SVG output is reproducible and keeps text as text."""
    import matplotlib

    check_path(path)
    # above the chart, which has no room for a title: a page shows the title as a heading
    above = {"x": 0, "y": 1 + 8 / figure.bbox.height, "ha": "left", "va": "bottom"}
    figure.suptitle(str(figure.get_label()), **above, color=INK, size=TEXT + 2, weight="bold")
    # no date and content-based ids, so that the same figure gives the same bytes
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "mbaas", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, transparent=True, bbox_inches="tight", metadata=metadata)


def new_figure(*, title: str, size: tuple[float, float], layout: Any = "constrained") -> Figure:
    """Make an empty, transparent figure; ``size`` is (width, height) in pixels.

    Args:
        layout: matplotlib's layout engine for axes and labels; None: manual positions.
    """
    from matplotlib.figure import Figure

    # at 72 dpi, a point (matplotlib's unit for text and lines) is a pixel
    figure = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout=layout, label=title)
    figure.patch.set_visible(False)
    return figure


def new_canvas(*, title: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """Make a figure with pixel coordinates, the origin at the upper left corner."""
    figure = new_figure(title=title, size=size, layout=None)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, size[0]), ylim=(size[1], 0))
    axes.set_axis_off()
    axes.autoscale(False)
    return figure, axes


def write(
    axes: Axes, at: tuple[float, float], text: str, *, side: Side = "left", strong: bool = False, colour: str = ""
) -> None:
    """Write text on a canvas; ``at`` is the (x, baseline) position of the end or centre given by ``side``."""
    weight, usual, size = ("bold", INK, TEXT + 2) if strong else ("normal", SOFT, TEXT)
    axes.text(at[0], at[1], text, ha=side, color=colour or usual, weight=weight, size=size)


def style(axes: Axes, *, grid: Any = None) -> None:
    """Apply the common style to axes; ``grid`` is the axis with grid lines."""
    axes.patch.set_visible(False)
    axes.tick_params(labelcolor=SOFT, labelsize=TEXT, length=0, pad=8)
    axes.tick_params(which="both", bottom=False, left=False, right=False)
    axes.spines[:].set_visible(False)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=SOFT, size=TEXT)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(axis=grid, color=INK, alpha=0.25, linewidth=1)


def add_legend(figure: Figure, *, columns: int, loc: Any = "lower left") -> None:
    figure.legend(
        loc=loc,
        bbox_to_anchor=(0, 0, 1, 1),
        bbox_transform=figure.transFigure,  # the default moves when `save` crops the file
        ncols=columns,
        frameon=False,
        labelcolor=SOFT,
        fontsize=TEXT,
        borderaxespad=0,
        borderpad=0,
        columnspacing=1,
        handletextpad=0.5,
        handlelength=1.7,
    )


def lines(
    series: Mapping[str, Points],
    *,
    title: str,
    x: str,
    y: str,
    measured: Sequence[tuple[float, Quantity, str]] = (),
    marks: Mapping[str, float] | None = None,
    log: bool = False,
    tick: Callable[[float], str] = units.count,
) -> Figure:
    """Draw lines over a horizontal axis of whole numbers or factors; the vertical axis begins at 0.

    Args:
        series: points by name; the first series is the main one and shows its intervals as a band.
        measured: measured points for the first series: (x, y, tooltip).
        marks: vertical lines by name, at most two; the first one is solid.
        log: whether the horizontal axis is logarithmic (base 2).
        tick: formats a number of the horizontal axis.
    """
    # fixed margins instead of margins that fit the labels, so that the axes of adjacent charts align
    (width, height), (left, right, top, bottom) = (376.0, 274.0), (50.0, 14.0, 50.0, 62.0)
    figure = new_figure(title=title, size=(width, height), layout=None)
    axes = figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height))
    style(axes, grid="y")
    _annotate(axes, x, (1, 0), (0, -38), axes.transAxes, side="right")
    _annotate(axes, y, (0, 1), (2 - left, 32), axes.transAxes)
    main, *others = series.values()
    points = [*main, *((at, found) for at, found, _ in measured)]
    _scale_x(axes, [at for at, _ in points], log=log, tick=tick)
    _scale_y(axes, [q.high for _, q in points] + [q.value for other in others for _, q in other])

    # Nothing is clipped: lines and points on the edge of the axes would be cut in half.
    low, high = ([q.at(end) for _, q in main] for end in ("low", "high"))
    axes.fill_between([at for at, _ in main], low, high, color=BLUE, alpha=0.2, linewidth=0, clip_on=False)
    _draw_marks(axes, marks or {})
    for number, (name, line) in enumerate(series.items()):
        look: dict[str, Any] = {"color": GREY, "linestyle": "--"} if number else {"color": BLUE}
        values = [at for at, _ in line], [q.value for _, q in line]
        axes.plot(*values, linewidth=2, label=name, clip_on=False, **look)
    for number, (at, found, says) in enumerate(measured):
        bar = axes.errorbar(
            [at],
            [found.value],
            yerr=[[found.value - found.low], [found.high - found.value]],
            fmt="D",
            color=INK,
            markerfacecolor=BLUE,
            markersize=8,
            capsize=4,
            clip_on=False,
            label=None if number else "measured",
        )
        # SVG stores the gid as the id of the shape; a page turns it into a tooltip
        bar.lines[0].set_gid(f"{SAYS}{says}")
    add_legend(figure, columns=3)
    return figure


def _scale_x(axes: Axes, values: Sequence[float], *, log: bool, tick: Callable[[float], str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    first, last = min(values), max(values)
    if log:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    else:
        whole = MaxNLocator(6, integer=True, steps=STEPS).tick_values(first, last)
        step = whole[1] - whole[0]
        axes.set_xticks([first, *(at for at in whole if first + step / 2 <= at <= last)])
    axes.set_xlim(first, last)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))


def _scale_y(axes: Axes, values: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    # from 0, so that heights are comparable
    ticks = MaxNLocator(5, steps=STEPS).tick_values(0, max(values))
    axes.set_yticks(ticks)
    axes.set_ylim(0, ticks[-1])
    axes.yaxis.set_major_formatter("{x:,g}")


def _draw_marks(axes: Axes, marks: Mapping[str, float]) -> None:
    left, right = axes.bbox.x0, axes.bbox.x1
    pixels = {name: float(axes.transData.transform((value, 0))[0]) for name, value in marks.items()}
    for number, (name, value) in enumerate(marks.items()):
        look: dict[str, Any] = {"color": SOFT, "linestyle": (0, (1, 2))} if number else {"color": INK}
        across = axes.get_xaxis_transform()
        axes.plot([value] * 2, [0, 1.04], transform=across, linewidth=1.25, clip_on=False, **look)
        at = pixels[name]
        # names that would overlap are stacked
        meets = number and abs(at - pixels[next(iter(marks))]) < 60
        # names near an edge stay within the chart's width
        side: Side = "left" if at < left + 30 else "right" if at > right - 30 else "center"
        _annotate(axes, name, (value, 1), (0, 24 if meets else 10), across, side=side)


def _annotate(
    axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], space: Any, *, side: Side = "left"
) -> None:
    """Write in the margin, ``shift`` pixels right of and above the point ``at`` of ``space``."""
    axes.annotate(
        text,
        at,
        shift,
        xycoords=space,
        textcoords="offset points",
        ha=side,
        color=SOFT,
        size=TEXT,
        annotation_clip=False,
    )
