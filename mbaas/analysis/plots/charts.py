"""The kinds of plots: stacked bars, heat map, histogram, lines. Each takes plain numbers and returns a Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.plots.style import INK, SERIES, add_legend, new_figure, style, whole_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bars = Mapping[str, Mapping[str, float]]
"""For each bar its parts, by name."""


def stacked_bars(
    bars: Bars, *, title: str, axis: str, ends: Sequence[str], colours: Mapping[str, str] | None = None
) -> Figure:
    """Horizontal bars, the first on top, each made of the same parts.

    Args:
        bars: their parts, in the order in which they are stacked.
        title: above.
        axis: below the numbers, with the unit.
        ends: a text at the end of each bar.
        colours: of parts; by default `SERIES` in turn.
    """
    seen = 0.001 * max(sum(bar.values()) for bar in bars.values())
    parts = [part for part in next(iter(bars.values())) if any(bar[part] > seen for bar in bars.values())]
    chosen = {part: SERIES[number % len(SERIES)] for number, part in enumerate(parts)} | dict(colours or {})
    figure, axes = new_figure(title=title, height=1.2 + 0.3 * max(len(bars), 3))
    rows, left = np.arange(len(bars)), np.zeros(len(bars))
    for part in parts:
        widths = np.array([bar[part] for bar in bars.values()])
        axes.barh(rows, widths, left=left, height=0.72, color=chosen[part], label=part)
        left += widths
    for row, (end, text) in enumerate(zip(left, ends, strict=True)):
        axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
    axes.set_yticks(rows, list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * float(left.max()))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(axis)
    axes.grid(axis="x", color=INK, alpha=0.25, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=min(len(parts), 7), frameon=False, labelcolor=INK, fontsize=9)
    return figure


def heat_map(
    values: NDArray[np.float64],
    *,
    title: str,
    x: tuple[str, Sequence[str]],
    y: tuple[str, Sequence[str]],
    unit: str,
) -> Figure:
    """Cells with their numbers in them; ``values`` [y, x], the first row at the bottom.

    Args:
        values: of the cells.
        title: above.
        x: the axis' name and its labels.
        y: the same upward.
        unit: beside the colour bar.
    """
    figure, axes = new_figure(title=title, width=2.5 + 0.95 * len(x[1]), height=1.8 + 0.5 * max(len(y[1]), 3))
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    halfway = (float(values.min()) + float(values.max())) / 2
    for (row, column), value in np.ndenumerate(values):
        ink = "black" if value > halfway else "white"
        axes.text(
            column,
            row,
            f"{value:.3g}" if value < 1000 else f"{value:,.0f}",
            ha="center",
            va="center",
            color=ink,
            fontsize=9,
        )
    axes.set_xticks(range(len(x[1])), list(x[1]))
    axes.set_yticks(range(len(y[1])), list(y[1]))
    axes.set_xlabel(x[0])
    axes.set_ylabel(y[0])
    bar = figure.colorbar(image, ax=axes)
    bar.set_label(unit)
    bar.outline.set_visible(False)
    style(bar.ax)
    return figure


def histogram(
    series: Mapping[str, NDArray[Any]],
    *,
    title: str,
    axis: tuple[str, str],
    first: float = 0.0,
    step: float = 1.0,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Counts of equal classes: the first series as bars, others as dots on them.

    Args:
        series: counts by name, all as many.
        title: above.
        axis: names of the horizontal and the vertical axis.
        first: the middle of the first class.
        step: from one class to the next.
        marks: vertical lines, by name.
    """
    figure, axes = new_figure(title=title)
    for number, (name, counts) in enumerate(series.items()):
        at = first + step * np.arange(len(counts))
        if number == 0:
            axes.bar(at, counts, width=0.9 * step, color=SERIES[0], alpha=0.75, label=name)
        else:
            axes.plot(at, counts, "o", color=SERIES[number], markersize=4, label=name)
    for number, (name, position) in enumerate((marks or {}).items()):
        axes.axvline(position, color=SERIES[-1 - number], linestyle="--", linewidth=1.2, label=name)
    if float(first).is_integer() and step == 1:
        whole_numbers(axes)
    axes.set_xlabel(axis[0])
    axes.set_ylabel(axis[1])
    axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
    add_legend(axes, columns=len(series) + len(marks or {}))
    return figure


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    axis: tuple[str, str],
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
) -> Figure:
    """Lines from zero upward.

    Args:
        series: x and y values by name.
        title: above.
        axis: names of the horizontal and the vertical axis.
        bands: lowest and highest y values around a line of that name.
        points: measured x and y values that belong to the line of that name.
    """
    figure, axes = new_figure(title=title)
    for number, (name, (x, y)) in enumerate(series.items()):
        colour = SERIES[number % len(SERIES)]
        axes.plot(x, y, color=colour, linewidth=1.8, label=name, marker="o" if len(x) < 20 else None, markersize=4)
        if bands is not None and name in bands:
            axes.fill_between(x, *bands[name], color=colour, alpha=0.18, linewidth=0)
        if points is not None and name in points:
            axes.plot(*points[name], "D", color=colour, markeredgecolor=INK, markersize=7, label=f"{name}, measured")
    axes.set_ylim(bottom=0)
    if all(float(at).is_integer() for x, _ in series.values() for at in x):
        whole_numbers(axes)
    axes.set_xlabel(axis[0])
    axes.set_ylabel(axis[1])
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    add_legend(axes, columns=4)
    return figure
