"""Runs some of the predicted points and says how far off the predictions were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from mbaas.analysis.measuring.service import Workload, run_service
from mbaas.analysis.quantity import Quantity, measured
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.simulated import simulated_epoch_s
from mbaas.analysis.whatif import predict

EPOCHS = 4


@dataclass(frozen=True)
class Check:
    """One point that was predicted, and then run.

    Attributes:
        parameter: of `Setup` that this point is about, with its ``value``.
        predicted, found: samples/s of each trial in a steady epoch.
        limit: the resource that was predicted to set the pace.
        simulated: the same rate by the simulator.
        speed: of prep alone just before and after, as a share of what it was when rates were measured: a machine that
            others use too is not always as fast.
        adjusted: the prediction for a machine of that speed, samples/s of each trial.
    """

    parameter: str
    value: float
    predicted: Quantity
    found: Quantity
    limit: str
    simulated: float
    speed: float
    adjusted: float

    @property
    def error(self) -> float:
        """The prediction against what was found: 0.05 is 5 % too fast."""
        return self.predicted.value / self.found.value - 1

    @property
    def simulated_error(self) -> float:
        """The simulator against what was found."""
        return self.simulated / self.found.value - 1

    @property
    def adjusted_error(self) -> float:
        """What remains of `error` if the speed of the machine had been known."""
        return self.adjusted / self.found.value - 1

    def to_json(self) -> dict[str, Any]:
        """The fields, ``error``, ``simulated_error`` and ``adjusted_error``."""
        return {
            "parameter": self.parameter,
            "value": self.value,
            "predicted": self.predicted.to_json(),
            "found": self.found.to_json(),
            "simulated": self.simulated,
            "limit": self.limit,
            "speed": self.speed,
            "adjusted": self.adjusted,
            "adjusted_error": self.adjusted_error,
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

    @property
    def adjusted_median_error(self) -> float:
        """Of the absolute errors that remain if the speed of the machine had been known."""
        return median(abs(check.adjusted_error) for check in self.checks)

    @property
    def adjusted_worst_error(self) -> float:
        """The largest of them."""
        return max(abs(check.adjusted_error) for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Keys ``checks``, ``median_error``, ``worst_error``, and the latter two ``adjusted_``."""
        return {
            "checks": [check.to_json() for check in self.checks],
            "median_error": self.median_error,
            "worst_error": self.worst_error,
            "adjusted_median_error": self.adjusted_median_error,
            "adjusted_worst_error": self.adjusted_worst_error,
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
    alone: Callable[[], float],
    cold: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Runs each point with a feed of its own; the workload's dataset may be a part of the measured one.

    Args:
        alone: P of one worker now, samples/s.
    """
    scale = workload.dataset.total_bytes / rates.dataset_bytes
    checks = []
    for name, setup in chosen:
        value = getattr(setup, name)
        say(f"checking {name} = {value:g}")
        before = alone()
        run = run_service(
            workload,
            sample_bytes=rates.pixel_bytes,
            trials=setup.trials,
            prep_workers=setup.workers_of(rates.cores),
            cache_bytes=round(setup.cache_bytes * scale),
            epochs=EPOCHS,
            cold=cold and setup.cache_bytes < rates.dataset_bytes,
        )
        speed = (before + alone()) / 2 / rates.prep.rate(1)
        expected = predict(rates, setup).steady
        checks.append(
            Check(
                parameter=name,
                value=value,
                predicted=expected.trial_per_s,
                found=measured(run.trial_per_s, unit="samples/s"),
                limit=expected.limit,
                simulated=rates.samples / simulated_epoch_s(rates, setup),
                speed=speed,
                adjusted=predict(rates.at_speed(speed), setup).steady.trial_per_s.value,
            )
        )
    return Verification(tuple(checks))
