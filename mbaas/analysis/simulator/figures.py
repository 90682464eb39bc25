"""Plots of the simulator's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mbaas import units
from mbaas.analysis import plots
from mbaas.analysis.simulator.chance import Frequency, Imbalance
from mbaas.analysis.simulator.report import axis_labels, fastest_first, seconds, title_of
from mbaas.analysis.simulator.simulation import Outcome, locations_of
from mbaas.analysis.simulator.sweep import Sweep
from mbaas.analysis.simulator.system import System
from mbaas.model.quantity import stated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "compute": plots.GREY,
    "staging": plots.SERIES[4],
    "ram": plots.SERIES[2],
    "ssd": plots.BLUE,
    "remote": plots.SERIES[3],
    "pfs": plots.RED,
}
"""Color of each location, the same in all plots, so that plots of different systems are comparable."""


def policies(system: System, outcomes: Sequence[Outcome]) -> Figure:
    """Return a bar chart with one bar per policy, fastest on top, stacked by location."""
    shown = fastest_first(outcomes)
    return plots.stacked_bars(
        {each.policy: {name: each.seconds[name] for name in locations_of(system)} for each in shown},
        title=title_of(system),
        axis="seconds: training, and waiting by location",
        ends=[seconds(each.total_s) for each in shown],
        colours=COLOURS,
    )


def sweep(system: System, swept: Sweep) -> Figure:
    """Return a heat map of seconds, or of the speedup over the policy that it is compared with."""
    speedup = swept.speedup
    return plots.heat_map(
        swept.total_s if speedup is None else speedup,
        title=f"{system.name}: {swept.policy}" + (f" versus {swept.versus}" if swept.versus else ""),
        x=(swept.x.name, axis_labels(swept.x)),
        y=(swept.y.name, axis_labels(swept.y)),
        unit="seconds" if speedup is None else "times as fast",
    )


def hit_rates(policy: str, cached: float, hits: Sequence[float]) -> Figure:
    """Return a plot of the hit rate in each epoch, and of the cache's share of the samples."""
    return plots.lines(
        {
            f"{policy} serves": [(epoch, stated(100 * hit, unit="%")) for epoch, hit in enumerate(hits)],
            f"{policy} holds": [(epoch, stated(100 * cached, unit="%")) for epoch in range(len(hits))],
        },
        title=f"A {policy} cache of {units.percent(cached)} of the samples",
        x="epoch",
        y="samples, %",
    )


def frequency(found: Frequency, *, samples: int, workers: int, epochs: int) -> Figure:
    """Return a histogram of samples by the number of times that one worker reads them."""
    # The tails are long and invisible: show only counts with at least half a sample expected.
    shown = np.flatnonzero(found.expected_counts >= 0.5)
    first, last = (int(shown[0]), int(shown[-1]) + 1) if len(shown) else (0, epochs + 1)
    series: dict[str, Any] = {"expected": found.expected_counts[first:last]}
    if found.simulated_counts is not None:
        series["counted"] = found.simulated_counts[first:last]
    return plots.histogram(
        series,
        title=f"{samples:,} samples, {workers} workers, {epochs} epochs",
        axis=("times that one worker reads a sample", "samples"),
        first=first,
        marks={"mean": epochs / workers, f"from {found.least} times": found.least - 0.5},
    )


def imbalance(found: Imbalance, *, nodes: int, local_batch: int) -> Figure:
    """Return a histogram of the share of a global minibatch that travels."""
    percent = 100 * found.fractions
    # Small minibatches have few possible shares: more bins than these would leave gaps.
    counts, edges = np.histogram(percent, bins=min(30, len(np.unique(percent))))
    return plots.histogram(
        {"steps": counts},
        title=f"{nodes} nodes, {local_batch} samples a node",
        axis=("share of the global minibatch that travels, %", "steps"),
        first=float(edges[0] + edges[1]) / 2,
        step=float(edges[1] - edges[0]),
        marks={"median": 100 * found.median},
    )
