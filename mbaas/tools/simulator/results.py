"""Results of the simulator as plain data for JSON, as tables for a terminal, and as plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mbaas.base import units
from mbaas.model import words
from mbaas.model.quantity import plain_fields, stated
from mbaas.tools.analysis import plots
from mbaas.tools.simulator.chance import Frequency
from mbaas.tools.simulator.simulation import Axis, Outcome, Sweep, locations_of
from mbaas.tools.simulator.system import System
from mbaas.tools.simulator.world import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plain_outcomes(system: System, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    policies = {each.policy: plain_fields(each) for each in outcomes}
    for said in policies.values():
        del said["policy"]
    return {
        "system": system.name,
        "samples": system.dataset.samples,
        "dataset_bytes": system.dataset.nbytes,
        **plain_fields(system.training),
        "policies": policies,
    }


def plain_sweep(swept: Sweep) -> dict[str, Any]:
    """Return axes, and seconds as rows of ``y``."""
    speedup = swept.speedup
    return {
        "policy": swept.policy,
        "versus": swept.versus,
        "x": plain_fields(swept.x),
        "y": plain_fields(swept.y),
        "total_s": swept.total_s.tolist(),
        "versus_total_s": swept.versus_s.tolist() if swept.versus_s is not None else None,
        "speedup": speedup.tolist() if speedup is not None else None,
    }


def outcomes_table(system: System, outcomes: Sequence[Outcome]) -> RenderableType:
    """Return a table with one row per policy, fastest first, and notes on the model's limits."""
    shown = fastest_first(outcomes)
    used = [name for name in locations_of(system) if any(each.seconds[name] for each in shown)]
    table = Table(title=f"{title_of(system)}; seconds", title_justify="left", title_style="bold")
    table.add_column("policy", no_wrap=True)
    for name in ("total", *used):
        table.add_column(name, justify="right", no_wrap=True, style="bold" if name == "total" else None)
    # The same decimals in the whole table, for comparison: three digits for the slowest policy.
    decimals = max(0, 2 - math.floor(math.log10(max(each.total_s for each in shown))))
    for each in shown:
        values = [each.total_s, *(each.seconds[name] for name in used)]
        table.add_row(each.policy, *(_cell(value, decimals) for value in values))
    # below the table, because one remark often applies to several policies
    notes = ["compute is training; what stands beside it is waiting, by location.", *_remarks(shown)]
    notes += _about_equals(system, shown)
    return Group(table, Text("\n".join(notes), style="dim"))


def sweep_table(swept: Sweep) -> RenderableType:
    """Return a table of seconds, or of speedups over the other policy."""
    speedup = swept.speedup
    title = f"{swept.policy}: seconds" if speedup is None else f"{swept.policy}: times as fast as {swept.versus}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(f"{swept.y.name} \\ {swept.x.name}")
    for label in _labels(swept.x):
        table.add_column(label, justify="right")
    cells = swept.total_s if speedup is None else speedup
    for label, row in zip(_labels(swept.y), cells, strict=True):
        table.add_row(label, *(seconds(cell) if speedup is None else units.number(cell) for cell in row))
    return table


def _labels(axis: Axis) -> list[str]:
    return [words.setting(axis.name, value) for value in axis.values]


def fastest_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda each: each.total_s)


def title_of(system: System) -> str:
    training = system.training
    parts = [
        units.counted(training.epochs, "epoch"),
        units.counted(training.workers, "worker"),
        f"minibatches of {training.batch}",
        *([f"{training.trials} trials"] if training.trials > 1 else []),
        *(["published model"] if system.model == "published" else []),
    ]
    return f"{system.name}: {', '.join(parts)}"


def seconds(value: float) -> str:
    """Format seconds without larger units, for comparison: "0.742 s", "8,640 s"; empty for 0."""
    return "" if value == 0 else f"{units.number(value)} s"


def _cell(value: float, decimals: int) -> str:
    """Format a table cell; small values never look like zero."""
    return "" if value == 0 else (f"{value:,.{decimals}f}" if round(value, decimals) else "~0")


AS_FAST = 1.01
"""A policy is as fast as training alone if its total is at most this times the time of training."""


def loading_limit(system: System, outcome: Outcome) -> float:
    """Return the compute rate of a worker, bytes/s, above which loading slows down at least one epoch."""
    slowest_s = max(outcome.loading_s)
    return system.dataset.nbytes / system.training.workers / slowest_s if slowest_s else math.inf


def _about_equals(system: System, outcomes: Sequence[Outcome]) -> list[str]:
    """Explain why several policies take the same time."""
    limits = {
        each.policy: limit
        for each in outcomes
        if each.total_s <= AS_FAST * each.seconds["compute"] and math.isfinite(limit := loading_limit(system, each))
    }
    if not limits:
        return []
    equal = f"{next(iter(limits))} is" if len(limits) == 1 else f"{len(limits)} policies are"
    first, last = (choose(limits, key=limits.__getitem__) for choose in (min, max))
    low, high = units.rate(limits[first]), units.rate(limits[last])
    above = f"{first} above {low} and {last} above {high}" if low != high else f"training above {low}"
    compute = f"{units.rate(system.machine.compute_bytes_per_s)} of compute per worker"
    return [
        f"{equal} as fast as training alone: at {compute}, training is the limit, not loading. "
        f"Loading begins to limit {above} (--set compute_bytes_per_s=...)."
    ]


def _remarks(outcomes: Sequence[Outcome]) -> list[str]:
    about: dict[str, list[str]] = {}
    for each in outcomes:
        if each.remark is not None:
            about.setdefault(each.remark, []).append(each.policy)
    return [f"{', '.join(names)}: {remark}." for remark, names in about.items()]


COLOURS = {
    "compute": plots.GREY,
    "staging": plots.SERIES[4],
    "ram": plots.SERIES[2],
    "ssd": plots.BLUE,
    "remote": plots.SERIES[3],
    "pfs": plots.RED,
}
"""Color of each location, the same in all plots, so that plots of different systems are comparable."""


def policies_figure(system: System, outcomes: Sequence[Outcome]) -> Figure:
    """Draw a horizontal bar for each policy, the fastest on top, made of its seconds by location."""
    shown = fastest_first(outcomes)
    # a part below a thousandth of the longest bar in every bar is invisible, so it gets no colour and no legend
    seen = 0.001 * max(each.total_s for each in shown)
    parts = [name for name in locations_of(system) if any(each.seconds[name] > seen for each in shown)]
    figure = plots.new_figure(title=title_of(system), size=(640, 90 + 22 * max(len(shown), 3)))
    axes = figure.add_subplot()
    plots.style(axes, grid="x")
    rows, left = np.arange(len(shown)), np.zeros(len(shown))
    for number, part in enumerate(parts):
        widths = np.array([each.seconds[part] for each in shown])
        colour = COLOURS.get(part, plots.SERIES[number % len(plots.SERIES)])
        axes.barh(rows, widths, left=left, height=0.72, color=colour, label=part)
        left += widths
    look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "color": plots.INK, "size": plots.TEXT}
    for row, (end, each) in enumerate(zip(left, shown, strict=True)):
        axes.annotate(seconds(each.total_s), (end, row), (4, 0), **look)
    axes.set_yticks(rows, [each.policy for each in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * float(left.max()))  # room for the text at the end of the longest bar
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("seconds: training, and waiting by location")
    plots.add_legend(figure, columns=min(len(parts), 7), loc="outside lower center")
    return figure


def sweep_figure(system: System, swept: Sweep) -> Figure:
    """Draw a labelled cell for each pair of values, the first row at the bottom."""
    values = swept.total_s if swept.speedup is None else swept.speedup
    title = f"{system.name}: {swept.policy}" + (f" versus {swept.versus}" if swept.versus else "")
    x, y = _labels(swept.x), _labels(swept.y)
    figure = plots.new_figure(title=title, size=(180 + 68 * len(x), 130 + 36 * max(len(y), 3)))
    axes = figure.add_subplot()
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="viridis")
    halfway = (float(values.min()) + float(values.max())) / 2
    for (row, column), value in np.ndenumerate(values):
        ink = "black" if value > halfway else "white"  # viridis is bright at its upper end
        axes.text(column, row, units.number(value), ha="center", va="center", color=ink, size=plots.TEXT)
    axes.set_xticks(range(len(x)), x)
    axes.set_yticks(range(len(y)), y)
    axes.set_xlabel(swept.x.name)
    axes.set_ylabel(swept.y.name)
    bar = figure.colorbar(image, ax=axes, label="seconds" if swept.speedup is None else "times as fast")
    bar.outline.set_visible(False)
    plots.style(axes)
    plots.style(bar.ax)
    return figure


def hit_rates_figure(policy: str, cached: float, hits: Sequence[float]) -> Figure:
    return plots.lines(
        {
            f"{policy} serves": [(epoch, stated(100 * hit, unit="%")) for epoch, hit in enumerate(hits)],
            f"{policy} holds": [(epoch, stated(100 * cached, unit="%")) for epoch in range(len(hits))],
        },
        title=f"{policy}, room for {units.percent(cached)} of the samples",
        x="epoch",
        y="samples, %",
    )


def frequency_figure(found: Frequency, *, samples: int, workers: int, epochs: int) -> Figure:
    # The tails are long and invisible: show only counts with at least half a sample expected.
    shown = np.flatnonzero(found.expected_counts >= 0.5)
    first, last = (int(shown[0]), int(shown[-1]) + 1) if len(shown) else (0, epochs + 1)
    series: dict[str, Any] = {"expected": found.expected_counts[first:last]}
    if found.simulated_counts is not None:
        series["counted"] = found.simulated_counts[first:last]
    return _histogram(
        series,
        title=f"{samples:,} samples, {workers} workers, {epochs} epochs",
        axis=("times that one worker reads a sample", "samples"),
        first=first,
        marks={"mean": epochs / workers, f"from {found.least} times": found.least - 0.5},
    )


def imbalance_figure(fractions: Floats, *, nodes: int, local_batch: int) -> Figure:
    percent = 100 * fractions
    # Small minibatches have few possible shares: more bins than these would leave gaps.
    counts, edges = np.histogram(percent, bins=min(30, len(np.unique(percent))))
    return _histogram(
        {"steps": counts},
        title=f"{nodes} nodes, {local_batch} samples a node",
        axis=("share of the global minibatch that travels, %", "steps"),
        first=float(edges[0] + edges[1]) / 2,
        step=float(edges[1] - edges[0]),
        marks={"median": float(np.median(percent))},
    )


def _histogram(
    series: Mapping[str, Any],
    *,
    title: str,
    axis: tuple[str, str],
    first: float,
    step: float = 1.0,
    marks: Mapping[str, float],
) -> Figure:
    """Draw counts of equal bins: the first series as bars, the others as dots.

    ``axis`` are the names of the horizontal and the vertical axis, ``first`` and ``step`` the centre of the first bin
    and the width of a bin, ``marks`` vertical lines by name.
    """
    from matplotlib.ticker import MaxNLocator

    figure = plots.new_figure(title=title, size=(576, 324))
    axes = figure.add_subplot()
    plots.style(axes, grid="y")
    for number, (name, counts) in enumerate(series.items()):
        at = first + step * np.arange(len(counts))
        if number == 0:
            axes.bar(at, counts, width=0.9 * step, color=plots.SERIES[0], alpha=0.75, label=name)
        else:
            axes.plot(at, counts, "o", color=plots.SERIES[number], markersize=4, label=name)
    for number, (name, position) in enumerate(marks.items()):
        axes.axvline(position, color=plots.SERIES[-1 - number], linestyle="--", linewidth=1.2, label=name)
    if float(first).is_integer() and step == 1:  # whole numbers: 2.5 would be between two bars
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(axis[0])
    axes.set_ylabel(axis[1])
    plots.add_legend(figure, columns=4, loc="outside lower center")
    return figure
