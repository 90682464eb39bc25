"""Draws the path of a minibatch: storage, the parts of a feed on a node, and trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.charts.drawing import MARGIN, WIDTH
from mbaas.tools.analysis import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 500.0

COLUMN = (28.0, 250.0)
"""Left and right end of the boxes that a minibatch passes."""

COORDINATOR = (304.0, 424.0)
"""Left and right end of the coordinator."""


def structure() -> Figure:
    """Draw the picture from the top down."""
    figure, axes = plots.new_canvas(title="", size=(WIDTH, HEIGHT))
    middle = sum(COLUMN) / 2
    plots.write(axes, (MARGIN, 32), "One feed: each minibatch is prepared once", strong=True)
    _box(axes, COLUMN, (50, 92), "storage", "files, shards, object stores")
    _arrow(axes, (middle, 92), (middle, 150), "reads, once per sample", side=(middle + 10, 110))
    _frame(axes, (MARGIN, COLUMN[1] + 10), (122, 366), "each node")
    _box(axes, COLUMN, (150, 196), "cache node", "samples, encoded or decoded")
    _arrow(axes, (middle, 196), (middle, 228), "in place", side=(middle + 10, 216))
    _box(axes, COLUMN, (228, 274), "prep workers", "decode and augment, CPU or GPU")
    _arrow(axes, (middle, 274), (middle, 306), "parts of a block", side=(middle + 10, 294))
    _box(axes, COLUMN, (306, 352), "staged blocks", "shared memory, with a budget")
    third = (COLUMN[1] - COLUMN[0]) / 3
    for number in range(3):
        left = COLUMN[0] + number * third
        _arrow(axes, (left + third / 2, 352), (left + third / 2, 416))
        _box(axes, (left + 4, left + third - 4), (416, 462), "trial", "loader")
    plots.write(axes, (COLUMN[0], 482), "minibatches, the same bytes for all")

    left, right = COORDINATOR
    lines = ("one per feed:", "which block is", "made, where, and", "for how long it", "is kept")
    _box(axes, COORDINATOR, (228, 352), "coordinator", *lines)
    _arrow(axes, (left, 251), (COLUMN[1], 251))
    plots.write(axes, ((left + COLUMN[1] + 10) / 2, 243), "tasks", side="center")
    across = (left + right) / 2
    for number, text in enumerate(("asks for the", "next block")):
        plots.write(axes, (across - 10, 430 + 17 * number), text, side="right")
    axes.plot([COLUMN[1] - 4, across], [456, 456], color=plots.GREY, linewidth=1.5)
    _arrow(axes, (across, 456), (across, 352))
    return figure


def _box(axes: Axes, across: tuple[float, float], down: tuple[float, float], name: str, *lines: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    (left, right), (top, bottom) = across, down
    style = "round,pad=0,rounding_size=5"
    look: dict[str, Any] = {"facecolor": plots.PAPER, "edgecolor": plots.BLUE, "linewidth": 1.5}
    axes.add_patch(FancyBboxPatch((left, top), right - left, bottom - top, boxstyle=style, **look))
    middle = (left + right) / 2
    plots.write(axes, (middle, top + 19), name, side="center", strong=True)
    for number, text in enumerate(lines):
        plots.write(axes, (middle, top + 37 + 17 * number), text, side="center")


def _frame(axes: Axes, across: tuple[float, float], down: tuple[float, float], name: str) -> None:
    (left, right), (top, bottom) = across, down
    axes.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=plots.GREY, linestyle="--")
    plots.write(axes, (right - 8, top + 18), name, side="right")


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str = "",
    *,
    side: tuple[float, float] = (0, 0),
) -> None:
    look = {"arrowstyle": "-|>", "color": plots.GREY, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 1}
    axes.annotate("", end, start, arrowprops=look)
    if label:
        plots.write(axes, side, label)
