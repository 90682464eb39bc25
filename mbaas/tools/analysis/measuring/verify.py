"""Runs of the workload that split the time of an epoch and check predictions.

The split is the differential method of DS-Analyzer (VLDB 2021). The same workload runs on synthetic minibatches, then
with all data in memory, and then with the real caches and storage. The second run takes longer by the prep stall, and
the third by the fetch stall. Loaders also attribute their waits at run time, depending on whether prep was waiting for
bytes. The two methods should agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, median

from mbaas.model import words
from mbaas.model.pace import Waits, predict
from mbaas.model.quantity import AsJson, Quantity, measured, spanning
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.decoding import largest_cache
from mbaas.tools.analysis.measuring.effort import Progress
from mbaas.tools.analysis.measuring.prep import MachineSpeed
from mbaas.tools.analysis.measuring.service import EpochRun, ServiceRun, Workload, run_service
from mbaas.tools.simulator.simulation import simulated_epoch_s

SPLIT_EPOCHS = 5
"""Minimum number of epochs that count in a run for the split, which is run only once."""

EPOCHS = 4
"""Minimum number of epochs that count in each round of a run that checks a prediction."""

RUN_S = 4.0
"""Minimum total time of the epochs that count."""

ROUNDS = 3
"""Runs of each point, interleaved with the others, because the speed of a shared machine varies."""


@dataclass(frozen=True, kw_only=True)
class EpochSplit(AsJson):
    """Time of one trial's epoch by cause, on a part of the dataset.

    Attributes:
        compute_s, prep_stall_s, fetch_stall_s: by the differential method; their values add up to the epoch.
        live_prep_stall_s, live_fetch_stall_s, live_peer_stall_s: reported by the loaders; see `ConsumerReport`.
        epoch_s: seconds of an epoch of the last run.
    """

    json_properties = ("disagreement",)
    samples: int
    epoch_s: Quantity
    compute_s: Quantity
    prep_stall_s: Quantity
    fetch_stall_s: Quantity
    live_prep_stall_s: Quantity
    live_fetch_stall_s: Quantity
    live_peer_stall_s: Quantity

    @property
    def waits(self) -> dict[str, Waits]:
        """Shares of the epoch that a trial waits, by method."""
        epoch_s = self.epoch_s.value
        return {
            "three runs compared": Waits(
                prep=self.prep_stall_s.value / epoch_s, fetch=self.fetch_stall_s.value / epoch_s
            ),
            "loaders": Waits(
                prep=self.live_prep_stall_s.value / epoch_s,
                fetch=self.live_fetch_stall_s.value / epoch_s,
                peers=self.live_peer_stall_s.value / epoch_s,
            ),
        }

    @property
    def disagreement(self) -> float:
        """The larger difference between the methods, as a share of the epoch."""
        # Training is not compared: loaders only derive it as the remainder. Waits for other trials are not separated:
        # with data in memory, trials wait for each other too.
        pairs = (
            (self.prep_stall_s.value, self.live_prep_stall_s.value + self.live_peer_stall_s.value),
            (self.fetch_stall_s.value, self.live_fetch_stall_s.value),
        )
        return max(abs(one - other) for one, other in pairs) / self.epoch_s.value


def split_epoch(workload: Workload, rates: Rates, setup: Setup) -> EpochSplit:
    """Run the workload with all data in memory, and as configured; G replaces the synthetic run."""
    in_memory = replace(setup, cache_bytes=max(setup.cache_bytes, rates.dataset_bytes), disk_bytes=0.0)
    cached = _run(workload, rates, in_memory, least_epochs=SPLIT_EPOCHS, warm_up=2)
    real = _run(workload, rates, setup, least_epochs=SPLIT_EPOCHS)
    return split_of(len(workload.dataset), rates.step, cached, real)


def split_of(samples: int, step: Quantity, cached: ServiceRun, real: ServiceRun) -> EpochSplit:
    """Split an epoch by the step's rate, the run in memory, and the run as configured."""
    # No separate run: if data is always ready, an epoch takes as long as its steps.
    synthetic_s = step.inverse(unit="s").scaled(samples)
    cached_s, real_s = _epoch_s(cached), _epoch_s(real)
    return EpochSplit(
        samples=samples,
        epoch_s=real_s,
        compute_s=synthetic_s,
        prep_stall_s=_more(cached_s, synthetic_s),
        fetch_stall_s=_more(real_s, cached_s),
        live_prep_stall_s=_seen(real, lambda run: run.wait_s - run.fetch_stall_s - run.peer_stall_s),
        live_fetch_stall_s=_seen(real, lambda run: run.fetch_stall_s),
        live_peer_stall_s=_seen(real, lambda run: run.peer_stall_s),
    )


def _epoch_s(run: ServiceRun) -> Quantity:
    """Return an epoch's time in the slowest trial: all trials share a feed, so they end at about the same time."""
    return _mean_of([max(trial.seconds for trial in trials) for trials in run.epochs])


def _more(later: Quantity, earlier: Quantity) -> Quantity:
    ends = (later.value - earlier.value, later.low - earlier.high, later.high - earlier.low)
    return spanning(*(max(0.0, end) for end in ends), unit="s")


def _seen(run: ServiceRun, part: Callable[[EpochRun], float]) -> Quantity:
    """Return the loaders' seconds for a part of the wait, averaged over trials."""
    return _mean_of([max(0.0, sum(map(part, trials)) / len(trials)) for trials in run.epochs])


def _mean_of(epochs_s: Sequence[float]) -> Quantity:
    # Not the median: prefetching in one epoch shortens the next.
    return spanning(mean(epochs_s), *epochs_s, unit="s")


@dataclass(frozen=True)
class Check(AsJson):
    """A point that was predicted and then run.

    Attributes:
        parameter: name of the varied parameter in `Setup`, with its ``value``.
        predicted, found: samples/s of each trial in a steady epoch.
        limit: predicted bottleneck.
        simulated: the simulator's rate.
        pace: speed of the machine relative to the measurement of the rates; predictions account for it.
    """

    json_properties = ("error", "simulated_error")
    parameter: str
    value: float
    predicted: Quantity
    found: Quantity
    limit: str
    simulated: float
    pace: float = 1.0

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.05 is 5 % too fast."""
        return self.predicted.value / self.found.value - 1

    @property
    def simulated_error(self) -> float:
        return self.simulated / self.found.value - 1


@dataclass(frozen=True)
class Verification(AsJson):
    """All points that were run."""

    json_properties = ("median_error", "worst_error")
    checks: tuple[Check, ...]

    @property
    def median_error(self) -> float:
        return median(abs(check.error) for check in self.checks)

    @property
    def worst_error(self) -> float:
        return max(abs(check.error) for check in self.checks)

    @property
    def paces(self) -> tuple[float, float]:
        paces = [check.pace for check in self.checks]
        return min(paces), max(paces)


BUDGETS = 8
"""Number of cache sizes to check if decoded samples are possible, from 0 to room for all of them."""

MOST_POINTS = BUDGETS + 5
"""Largest number of points that `points` returns."""


def points(rates: Rates, setup: Setup) -> list[tuple[str, Setup]]:
    """Return the points worth checking on this machine: cache sizes, workers and trials."""
    largest = largest_cache(rates, setup)
    parts = 2 if largest <= rates.dataset_bytes else BUDGETS - 1
    found = [
        *(("cache_bytes", replace(setup, cache_bytes=largest * number / parts)) for number in range(parts + 1)),
        *(("prep_workers", replace(setup, prep_workers=count)) for count in sorted({1, rates.cores})),
        *(("trials", replace(setup, trials=count)) for count in (1, 2, 4)),
    ]
    # Several may equal the given setup, which is run only once, under the first name.
    once = {point: name for name, point in reversed(found)}
    return [(name, point) for name, point in found if once[point] == name]


def verify(
    workload: Workload, rates: Rates, chosen: Sequence[tuple[str, Setup]], *, speed: MachineSpeed, progress: Progress
) -> Verification:
    """Run each point with separate feeds; the workload's dataset may be a part of the measured one.

    The speed of a shared machine varies, so its pace is measured before and after each run, relative to the measurement
    of ``rates``. Predictions are for the rate at that pace.
    """
    runs: list[list[ServiceRun]] = [[] for _ in chosen]
    paces: list[list[float]] = [[] for _ in chosen]
    before = speed.relative()
    # All points in each round, so that a busy minute does not affect a single point.
    for number, index in product(range(ROUNDS), range(len(chosen))):
        name, setup = chosen[index]
        text = f"checking {name} = {words.setting(name, getattr(setup, name))}, round {number + 1} of {ROUNDS}"
        progress.begin("check", text, done=(number + index / len(chosen)) / ROUNDS)
        runs[index].append(_run(workload, rates, setup, least_epochs=EPOCHS))
        after = speed.relative()
        paces[index].append((before + after) / 2)
        before = after
    return Verification(
        tuple(
            _check(rates, name, setup, found, sum(seen) / len(seen))
            for (name, setup), found, seen in zip(chosen, runs, paces, strict=True)
        )
    )


def _run(workload: Workload, rates: Rates, setup: Setup, *, least_epochs: int, warm_up: int = 1) -> ServiceRun:
    """Run the workload's part of the dataset with caches of the same proportion."""
    epoch_s = len(workload.dataset) / predict(rates, setup).steady.trial_per_s.value
    scale = workload.dataset.total_bytes / rates.dataset_bytes
    return run_service(
        workload,
        sample_bytes=rates.pixel_bytes,
        trials=setup.trials,
        prep_workers=setup.workers_of(rates.cores),
        # Capped: a larger cache would bring nothing, and `mbaas.serve` rejects a cache beyond the machine's memory.
        cache_bytes=round(min(setup.cache_bytes, largest_cache(rates, setup)) * scale),
        disk_bytes=round(setup.disk_bytes * scale),
        decoded=setup.decoded,
        epochs=max(least_epochs, round(RUN_S / epoch_s)),
        # In one more epoch, samples that the first one cached in the wrong form are added in the other.
        warm_up=warm_up + setup.decoded,
        # If the cache holds everything, dropping files only slows the first epoch, which does not count.
        cold=setup.cache_bytes < rates.dataset_bytes,
    )


def _check(rates: Rates, name: str, setup: Setup, runs: Sequence[ServiceRun], pace: float) -> Check:
    then = rates.at_pace(pace)
    expected = predict(then, setup).steady
    return Check(
        parameter=name,
        value=getattr(setup, name),
        predicted=expected.trial_per_s,
        found=measured([run.trial_per_s for run in runs], unit="samples/s"),
        limit=expected.limit,
        simulated=rates.samples / simulated_epoch_s(then, setup),
        pace=pace,
    )
