"""Run the workload, to split the time of an epoch and to say how far off predictions are.

The split is the differential method of DS-Analyzer (VLDB 2021), with three runs of the same workload: on synthetic
minibatches, with all data in memory, and with caches and storage as they are. What the second takes longer than the
first is prep stall, what the third takes longer than the second is fetch stall. A loader attributes its waits while it
runs, by whether prep was waiting for bytes; the two should agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, median
from typing import Any

from mbaas.analysis import words
from mbaas.analysis.decoding import largest_cache
from mbaas.analysis.measuring.pace import Pace
from mbaas.analysis.measuring.progress import Progress
from mbaas.analysis.measuring.service import EpochRun, ServiceRun, Workload, run_service
from mbaas.analysis.quantity import Quantity, measured, plain_fields, spanning
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.simulated import simulated_epoch_s
from mbaas.analysis.whatif import Waits, predict

SPLIT_EPOCHS = 5
"""Epochs that count, at least, of a run for the split: it is run once."""

EPOCHS = 4
"""The same of a run that checks a prediction, in each round."""

RUN_S = 4.0
"""More epochs count if these are over sooner."""

ROUNDS = 3
"""How often each point is run, with all others in between: a machine that others use too is not always as fast."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the time of an epoch of one trial splits up, on a part of the dataset.

    Attributes:
        samples: how many that part has.
        compute_s, prep_stall_s, fetch_stall_s: by the differential method; their values add up to the epoch's.
        live_prep_stall_s, live_fetch_stall_s, live_peer_stall_s: what the loaders said; see `ConsumerReport`.
        epoch_s: seconds of an epoch of the last run.
    """

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
        """Return what a trial waits for, as each of both methods sees it."""
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
        """Return the larger difference between both methods, as a share of the epoch."""
        # training is not compared: of what loaders say it is only what the stalls leave over
        # nor are waits for other trials told apart: with data in memory trials wait for each other as well
        pairs = (
            (self.prep_stall_s.value, self.live_prep_stall_s.value + self.live_peer_stall_s.value),
            (self.fetch_stall_s.value, self.live_fetch_stall_s.value),
        )
        return max(abs(one - other) for one, other in pairs) / self.epoch_s.value

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, and ``disagreement``."""
        return {**plain_fields(self), "disagreement": self.disagreement}


def split_epoch(workload: Workload, rates: Rates, setup: Setup) -> Split:
    """Run the workload with all data in memory, and as it is; the synthetic run is G's, measured alone."""
    in_memory = replace(setup, cache_bytes=max(setup.cache_bytes, rates.dataset_bytes), disk_bytes=0.0)
    cached = _run(workload, rates, in_memory, least_epochs=SPLIT_EPOCHS, warm_up=2)
    real = _run(workload, rates, setup, least_epochs=SPLIT_EPOCHS)
    return split_of(len(workload.dataset), rates.step, cached, real)


def split_of(samples: int, step: Quantity, cached: ServiceRun, real: ServiceRun) -> Split:
    """Split an epoch by three rates: the step alone, the run in memory, and the run as it is."""
    # no run of its own: with data that is always ready an epoch takes as long as its steps
    synthetic_s = step.inverse(unit="s").scaled(samples, unit="s")
    cached_s, real_s = _epoch_s(cached), _epoch_s(real)
    return Split(
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
    """Return the slowest trial's time for an epoch: all trials share a feed, so they end about together."""
    return _mean_of([max(trial.seconds for trial in trials) for trials in run.epochs])


def _more(later: Quantity, earlier: Quantity) -> Quantity:
    """Return how much longer one run took; never less than nothing."""
    ends = (later.value - earlier.value, later.low - earlier.high, later.high - earlier.low)
    return spanning(*(max(0.0, end) for end in ends), unit="s")


def _seen(run: ServiceRun, part: Callable[[EpochRun], float]) -> Quantity:
    """Return what loaders attributed to a part, the mean over trials."""
    return _mean_of([max(0.0, sum(map(part, trials)) / len(trials)) for trials in run.epochs])


def _mean_of(epochs_s: Sequence[float]) -> Quantity:
    # not their median: what is prepared ahead in one epoch makes the next one shorter
    return spanning(mean(epochs_s), *epochs_s, unit="s")


@dataclass(frozen=True)
class Check:
    """One point that was predicted, and then run.

    Attributes:
        parameter: the name in `Setup` that this point is about, with its ``value``.
        predicted, found: samples/s of each trial in a steady epoch.
        limit: the resource that was predicted to set the pace.
        simulated: the same rate by the simulator.
        pace: how many times as fast as when rates were measured the machine was; predictions are for that.
    """

    parameter: str
    value: float
    predicted: Quantity
    found: Quantity
    limit: str
    simulated: float
    pace: float = 1.0

    @property
    def error(self) -> float:
        """Return the prediction against what was found: 0.05 is 5 % too fast."""
        return self.predicted.value / self.found.value - 1

    @property
    def simulated_error(self) -> float:
        """Return the simulator's rate against what was found."""
        return self.simulated / self.found.value - 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, ``error`` and ``simulated_error``."""
        return {**plain_fields(self), "error": self.error, "simulated_error": self.simulated_error}


@dataclass(frozen=True)
class Verification:
    """All points that were run."""

    checks: tuple[Check, ...]

    @property
    def median_error(self) -> float:
        """Return the median of the absolute errors."""
        return median(abs(check.error) for check in self.checks)

    @property
    def worst_error(self) -> float:
        """Return the largest absolute error."""
        return max(abs(check.error) for check in self.checks)

    @property
    def paces(self) -> tuple[float, float]:
        """Return the least and the greatest pace of all."""
        paces = [check.pace for check in self.checks]
        return min(paces), max(paces)

    def to_json(self) -> dict[str, Any]:
        """Return ``checks``, ``median_error`` and ``worst_error``."""
        return {**plain_fields(self), "median_error": self.median_error, "worst_error": self.worst_error}


BUDGETS = 8
"""Sizes of the cache that are checked where samples may be kept decoded, from nothing to room for all of them."""

MOST_POINTS = BUDGETS + 5
"""The most that `points` finds."""


def points(rates: Rates, setup: Setup) -> list[tuple[str, Setup]]:
    """List the points worth checking on this machine: cache sizes, workers and trials."""
    largest = largest_cache(rates, setup)
    parts = 2 if largest <= rates.dataset_bytes else BUDGETS - 1
    found = [
        *(("cache_bytes", replace(setup, cache_bytes=largest * number / parts)) for number in range(parts + 1)),
        *(("prep_workers", replace(setup, prep_workers=count)) for count in sorted({1, rates.cores})),
        *(("trials", replace(setup, trials=count)) for count in (1, 2, 4)),
    ]
    # several of them may be the setup as it is, which needs to be run once only; the first name has it
    once = {point: name for name, point in reversed(found)}
    return [(name, point) for name, point in found if once[point] == name]


def verify(
    workload: Workload,
    rates: Rates,
    chosen: Sequence[tuple[str, Setup]],
    *,
    pace: Pace,
    progress: Progress,
) -> Verification:
    """Run each point with feeds of its own; the workload's dataset may be a part of the measured one.

    A machine that others use, too, is not as fast all the time. So its pace is measured before and after each run, and
    what is predicted is the rate at that pace.

    Args:
        pace: of the machine, whose usual one is that of the rates.
    """
    runs: list[list[ServiceRun]] = [[] for _ in chosen]
    paces: list[list[float]] = [[] for _ in chosen]
    before = pace.now()
    # all points in each round, so that a minute in which the machine is busy does not fall on one of them alone
    for number, index in product(range(ROUNDS), range(len(chosen))):
        name, setup = chosen[index]
        text = f"checking {name} = {words.setting(name, getattr(setup, name))}, round {number + 1} of {ROUNDS}"
        progress.begin("check", text, done=(number + index / len(chosen)) / ROUNDS)
        runs[index].append(_run(workload, rates, setup, least_epochs=EPOCHS))
        after = pace.now()
        paces[index].append((before + after) / 2)
        before = after
    return Verification(
        tuple(
            _check(rates, name, setup, found, sum(seen) / len(seen))
            for (name, setup), found, seen in zip(chosen, runs, paces, strict=True)
        )
    )


def _run(workload: Workload, rates: Rates, setup: Setup, *, least_epochs: int, warm_up: int = 1) -> ServiceRun:
    """Run a part of the dataset with as large a part of the caches."""
    epoch_s = len(workload.dataset) / predict(rates, setup).steady.trial_per_s.value
    scale = workload.dataset.total_bytes / rates.dataset_bytes
    return run_service(
        workload,
        sample_bytes=rates.pixel_bytes,
        trials=setup.trials,
        prep_workers=setup.workers_of(rates.cores),
        # no more than there is to cache: it would bring nothing, and `mbaas.serve` refuses more than there is room for
        cache_bytes=round(min(setup.cache_bytes, largest_cache(rates, setup)) * scale),
        disk_bytes=round(setup.disk_bytes * scale),
        decoded=setup.decoded,
        epochs=max(least_epochs, round(RUN_S / epoch_s)),
        # one more in which what the first one kept, and is to be kept in the other form, is handed in
        warm_up=warm_up + setup.decoded,
        # where the cache holds everything, dropping files would only cost the first epoch, which does not count
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
