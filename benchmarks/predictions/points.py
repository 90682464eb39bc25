"""The setups that are predicted and run, their results, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mbaas.base import units
from mbaas.model import words
from mbaas.model.quantity import Quantity
from mbaas.model.rates import Rates, Setup
from mbaas.tools.bench.render import figure_table, machine_line
from mbaas.tools.bench.report import Machine

STORAGE_BYTES_PER_S = 320e6
"""Rate of the storage whose S is measured; setups multiply it by `Setup.storage_factor`. It is faster than two cores
prepare: the CPU time of a read cannot be measured in a feed that waits for storage."""

STEP_PER_S, STEP_OVERHEAD_S = 600.0, 0.02
"""G at `BATCH`, and the part of a step that does not depend on the batch size."""

BATCH = 64

FAST = 8.0
"""Speed of an accelerator that never limits."""


def points(rates: Rates) -> Iterator[tuple[str, Setup]]:
    """List the setups with the name of what they vary, from a trial whose cache holds half of the dataset."""
    half = rates.dataset_bytes / 2
    base = Setup(cache_bytes=half, decoded=False, storage_factor=_storage(40e6))
    fast: dict[str, Any] = {"storage_factor": 1.0, "accelerator_factor": FAST}
    for bytes_per_s in (10e6, 20e6):
        yield "storage rate", replace(base, storage_factor=_storage(bytes_per_s))
    yield "storage rate", replace(base, **fast)
    for batch in (16, 32, 256):
        yield "batch size", replace(base, batch_size=batch)
    for share in (0.35, 0.65):
        paged: dict[str, Any] = {"cache_bytes": 0.0, "dram_bytes": share * rates.dataset_bytes}
        yield "page cache", replace(base, storage_factor=_storage(20e6), **paged)
    yield "pipelines", replace(base, trials=4, pipelines=4, storage_factor=_storage(10e6))
    for number in (2, 4):
        yield "pipelines", replace(base, trials=number, pipelines=number, **fast)
    two = replace(base, nodes=2, cores=1, cache_bytes=half / 2, data_parallel=True)
    for is_shared in (True, False):
        yield "nodes", replace(two, storage_factor=_storage(10e6), storage_shared=is_shared)
    four = replace(two, nodes=4, cache_bytes=half / 4)
    yield "nodes", replace(four, storage_factor=_storage(5e6), storage_shared=False)
    apart = replace(two, trials=2, data_parallel=False)
    for bytes_per_s in (10e6, 20e6, 40e6):
        yield "network rate", replace(apart, network_bytes_per_s=bytes_per_s)
    yield "network rate", replace(two, network_bytes_per_s=10e6)


def _storage(bytes_per_s: float) -> float:
    return bytes_per_s / STORAGE_BYTES_PER_S


@dataclass(frozen=True)
class Point:
    """A predicted setup and its runs.

    Attributes:
        varied: what it varies.
        setup: the setup.
        predicted: samples/s of each trial, at the speed of the machine during the runs.
        limit: the predicted bottleneck.
        found: samples/s of each trial.
        pace: speed of the machine during the runs, relative to the measurement of the rates.
    """

    varied: str
    setup: Setup
    predicted: Quantity
    limit: str
    found: Quantity
    pace: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.05 is 5 % too fast."""
        return self.predicted.value / self.found.value - 1

    def as_text(self) -> str:
        """Describe the setup by what is unusual about it."""
        setup, parts = self.setup, []
        if setup.nodes > 1:
            parts.append(f"{setup.nodes} nodes, {'ranks' if setup.data_parallel else 'a trial on each'}")
        if setup.times_made > 1:
            parts.append(f"{setup.trials} trials, a pipeline each")
        if setup.batch_size is not None:
            parts.append(units.counted(setup.batch_size, "sample"))
        if setup.dram_bytes:
            parts.append(f"page cache {units.size(setup.dram_bytes)}")
        shared = "" if setup.nodes == 1 else " together" if setup.storage_shared else " each"
        parts.append(f"storage {units.rate(STORAGE_BYTES_PER_S * setup.storage_factor)}{shared}")
        if setup.network_bytes_per_s < float("inf"):
            parts.append(f"network {units.rate(setup.network_bytes_per_s)}")
        return ", ".join(parts)


@dataclass(frozen=True)
class PredictionsReport:
    """The measured rates and all points."""

    machine: Machine
    rates: Rates
    points: tuple[Point, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Absolute relative errors, in the order of the points."""
        return tuple(abs(point.error) for point in self.points)


def figures(report: PredictionsReport) -> dict[str, Any]:
    """Return the report as plain values."""
    return {
        "machine": report.machine,
        "rates": report.rates.to_json(),
        "points": [
            {
                "varied": point.varied,
                "setup": point.setup.to_json(),
                "predicted": point.predicted.to_json(),
                "found": point.found.to_json(),
                "limit": point.limit,
                "pace": point.pace,
                "error": point.error,
            }
            for point in report.points
        ],
        "median_error": median(report.errors),
        "worst_error": max(report.errors),
    }


def table(report: PredictionsReport) -> RenderableType:
    """Return the table of all points, and the median and worst error."""
    found = figure_table(
        "Samples/s of each trial, predicted from one measurement and found in a feed",
        ["varied", "setup", "predicted", "found", "error", "limit"],
        words=("varied", "setup", "limit"),
        wrapped=("setup", "limit"),
    )
    for point in report.points:
        found.add_row(
            point.varied,
            point.as_text(),
            units.count(point.predicted.value),
            words.with_interval(point.found, units.count),
            f"{100 * point.error:+.1f} %",
            words.cell(point.limit),
        )
    summary = f"Median error {units.percent(median(report.errors))}, worst {units.percent(max(report.errors))}."
    return Group(found, Text(summary), Text(machine_line(report.machine)))
