"""Runs some of the predicted points and says how far off the predictions were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mbaas.analysis.measuring.service import ServiceRun, Workload, pooled, run_service
from mbaas.analysis.quantity import Quantity, measured
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.simulated import simulated_epoch_s
from mbaas.analysis.whatif import predict

EPOCHS = 4
"""Of a feed, that count."""

ROUNDS = 2
"""Each point is run so often, and all others in between: a machine that others use too is not always as fast."""


@dataclass(frozen=True)
class Check:
    """One point that was predicted, and then run.

    Attributes:
        parameter: of `Setup` that this point is about, with its ``value``.
        predicted, found: samples/s of each trial in a steady epoch.
        limit: the resource that was predicted to set the pace.
        simulated: the same rate by the simulator.
    """

    parameter: str
    value: float
    predicted: Quantity
    found: Quantity
    limit: str
    simulated: float

    @property
    def error(self) -> float:
        """The prediction against what was found: 0.05 is 5 % too fast."""
        return self.predicted.value / self.found.value - 1

    @property
    def simulated_error(self) -> float:
        """The simulator against what was found."""
        return self.simulated / self.found.value - 1

    def to_json(self) -> dict[str, Any]:
        """The fields, ``error`` and ``simulated_error``."""
        return {
            "parameter": self.parameter,
            "value": self.value,
            "predicted": self.predicted.to_json(),
            "found": self.found.to_json(),
            "simulated": self.simulated,
            "limit": self.limit,
            "error": self.error,
            "simulated_error": self.simulated_error,
        }


@dataclass(frozen=True)
class Verification:
    """All points that were run."""

    checks: tuple[Check, ...]

    @property
    def median_error(self) -> float:
        """Of the absolute errors."""
        return median(abs(check.error) for check in self.checks)

    @property
    def worst_error(self) -> float:
        """The largest absolute error."""
        return max(abs(check.error) for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Keys ``checks``, ``median_error``, ``worst_error``."""
        return {
            "checks": [check.to_json() for check in self.checks],
            "median_error": self.median_error,
            "worst_error": self.worst_error,
        }


def points(rates: Rates, setup: Setup) -> list[tuple[str, Setup]]:
    """What is worth checking on this machine: cache size, workers, trials; what the setup is already only once."""
    found = [
        *(("cache_bytes", replace(setup, cache_bytes=share * rates.dataset_bytes)) for share in (0.0, 0.5, 1.0)),
        *(("prep_workers", replace(setup, prep_workers=count)) for count in sorted({1, rates.cores})),
        *(("trials", replace(setup, trials=count)) for count in (1, 2, 4)),
    ]
    once = {point: name for name, point in reversed(found)}
    return [(name, point) for name, point in found if once[point] == name]


def verify(
    workload: Workload,
    rates: Rates,
    chosen: Sequence[tuple[str, Setup]],
    *,
    cold: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Runs each point with feeds of its own; the workload's dataset may be a part of the measured one."""
    runs: list[list[ServiceRun]] = [[] for _ in chosen]
    for number in range(ROUNDS):
        for (name, setup), found in zip(chosen, runs, strict=True):
            say(f"checking {name} = {getattr(setup, name):g}, round {number + 1} of {ROUNDS}")
            found.append(_run(workload, rates, setup, cold=cold))
    return Verification(
        tuple(_check(rates, name, setup, pooled(found)) for (name, setup), found in zip(chosen, runs, strict=True))
    )


def _run(workload: Workload, rates: Rates, setup: Setup, *, cold: bool) -> ServiceRun:
    scale = workload.dataset.total_bytes / rates.dataset_bytes
    return run_service(
        workload,
        sample_bytes=rates.pixel_bytes,
        trials=setup.trials,
        prep_workers=setup.workers_of(rates.cores),
        cache_bytes=round(setup.cache_bytes * scale),
        disk_bytes=round(setup.disk_bytes * scale),
        epochs=EPOCHS,
        cold=cold and setup.cache_bytes < rates.dataset_bytes,
    )


def _check(rates: Rates, name: str, setup: Setup, run: ServiceRun) -> Check:
    expected = predict(rates, setup).steady
    return Check(
        parameter=name,
        value=getattr(setup, name),
        predicted=expected.trial_per_s,
        found=measured(run.trial_per_s, unit="samples/s"),
        limit=expected.limit,
        simulated=rates.samples / simulated_epoch_s(rates, setup),
    )
