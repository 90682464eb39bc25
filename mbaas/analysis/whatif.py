"""Predict how fast trials train, and what they wait for, from measured rates.

The model is DS-Analyzer's (VLDB 2021): speed = min(F, P, G), extended to several trials, shared feeds, several nodes
and cores that prep and steps share; `mbaas.analysis.stages` has the table of who needs how long. Epoch time is split
by the differential method: compute is the time on synthetic data; what prep adds to that with everything in memory is
prep stall; what fetching adds to both is fetch stall.

Where steps, prep and fetch do not mask each other perfectly (``overlap`` below 1), the time for a sample is the longest
of them plus ``1 - overlap`` of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mbaas import units
from mbaas.analysis.kept import Reads, stored_share
from mbaas.analysis.quantity import BOUNDS, Quantity, plain_fields, spanning
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.stages import Stages, stages
from mbaas.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Waits:
    """The shares of its time that a trial waits, from 0 to 1.

    Attributes:
        prep: for samples to be prepared.
        fetch: for samples to be read.
        peers: for other trials, where whoever says so can tell that from ``prep``; else it is in there.
    """

    prep: float
    fetch: float
    peers: float = 0.0

    @property
    def all(self) -> float:
        """Return the share in which it waits for whatever."""
        return self.prep + self.fetch + self.peers


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch of every trial, predicted.

    Attributes:
        trial_per_s: samples/s of each trial.
        total_per_s: of all trials together.
        epoch_s: seconds.
        compute_s, prep_stall_s, fetch_stall_s: the parts of it, for one trial; their values add up to the epoch's.
        limit: the resource that sets the pace, by its name in `mbaas.analysis.stages`.
        limits: the same at the slow and at the fast end of what was measured as well; one name is a sure answer.
        bounds: samples/s of each trial that every resource would allow on its own; resources without a limit left out.
        reads: where samples come from.
    """

    trial_per_s: Quantity
    total_per_s: Quantity
    epoch_s: Quantity
    compute_s: Quantity
    prep_stall_s: Quantity
    fetch_stall_s: Quantity
    limit: str
    limits: tuple[str, ...]
    bounds: dict[str, Quantity]
    reads: Reads

    @property
    def prep_stall(self) -> float:
        """Return the share of a trial's time in which it waits for prep."""
        return self.prep_stall_s.value / self.epoch_s.value

    @property
    def fetch_stall(self) -> float:
        """Return the share of a trial's time in which it waits for bytes."""
        return self.fetch_stall_s.value / self.epoch_s.value

    @property
    def waits(self) -> Waits:
        """Return both shares."""
        return Waits(prep=self.prep_stall, fetch=self.fetch_stall)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; ``reads`` are shares by tier."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The first epoch, with empty caches, and every later one.

    Attributes:
        notes: what makes the prediction a guess, a sentence each.
    """

    setup: Setup
    first: Epoch
    steady: Epoch
    notes: tuple[str, ...] = ()

    def run_s(self, epochs: int) -> Quantity:
        """Return the seconds of a job of ``epochs`` epochs."""
        if epochs < 1:
            raise ConfigError(f"epochs must be at least 1, got {epochs}")
        return self.first.epoch_s.plus(self.steady.epoch_s.scaled(epochs - 1))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


def predict(rates: Rates, setup: Setup) -> Prediction:
    """Predict what would be with ``setup``.

    Intervals come from the model at the slow and at the fast ends of everything measured; they are as wide as if all
    rates were off the same way at the same time.

    Raises:
        ConfigError: the setup uses a disk whose rate was not measured.
    """
    return Prediction(
        setup=setup,
        first=_epoch(rates, setup, steady=False),
        steady=_epoch(rates, setup, steady=True),
        notes=tuple(_notes(rates, setup)),
    )


def speedup(now: Prediction, then: Prediction) -> Quantity:
    """Return how many times as fast steady epochs become.

    Rates are the same before and after, so slow ends belong together, and so do fast ends.
    """
    before, after = now.steady.epoch_s, then.steady.epoch_s
    return spanning(*(before.at(bound) / after.at(bound) for bound in BOUNDS), unit="times")


@dataclass(frozen=True)
class _Times:
    """The seconds a sample takes with synthetic data, with all data in memory, and as it is: the three runs."""

    synthetic_s: float
    prepared_s: float
    whole_s: float

    @classmethod
    def of(cls, found: Stages, overlap: float) -> _Times:
        # each run has one part more than the one before it, so what it adds is that part's stall, as in DS-Analyzer
        parts = (found.compute_s, found.prep_s, found.fetch_s)
        first, second, third = (overlap * max(parts[:n]) + (1 - overlap) * sum(parts[:n]) for n in (1, 2, 3))
        return cls(first, second, third)


def _epoch(rates: Rates, setup: Setup, *, steady: bool) -> Epoch:
    middle, slow, fast = (stages(rates, setup, steady=steady, step=b, prep=b, supply=b) for b in BOUNDS)
    at_middle, at_slow, at_fast = times = [_Times.of(found, rates.overlap) for found in (middle, slow, fast)]
    samples = rates.samples

    def stall_s(earlier: str, later: str) -> Quantity:
        """Return what is added from one run to the next, never less than nothing."""
        # A difference is widest where one run was slow and the other fast: the runs are measured one after the other,
        # and the machine need not be as busy both times.
        least = getattr(at_fast, later) - getattr(at_slow, earlier)
        most = getattr(at_slow, later) - getattr(at_fast, earlier)
        value = getattr(at_middle, later) - getattr(at_middle, earlier)
        return spanning(*(samples * max(0.0, s) for s in (value, least, most)), unit="s")

    trial_per_s = spanning(*(1 / t.whole_s for t in times), unit="samples/s")
    # the median's resource comes first; others that may set the pace within the intervals make the answer unsure
    limits = tuple(dict.fromkeys(found.limit for found in (middle, slow, fast)))
    return Epoch(
        trial_per_s=trial_per_s,
        total_per_s=trial_per_s.scaled(setup.trials),
        epoch_s=spanning(*(samples * t.whole_s for t in times), unit="s"),
        compute_s=spanning(*(samples * t.synthetic_s for t in times), unit="s"),
        prep_stall_s=stall_s("synthetic_s", "prepared_s"),
        fetch_stall_s=stall_s("prepared_s", "whole_s"),
        limit=middle.limit,
        limits=limits,
        bounds=_bounds(middle, slow, fast),
        reads=stored_share(rates, setup, steady=steady),
    )


def _bounds(middle: Stages, slow: Stages, fast: Stages) -> dict[str, Quantity]:
    """Find the samples/s that each resource allows; fetch as a whole, because its parts take turns."""
    middle_s, slow_s, fast_s = ({**s.compute, **s.prep, "fetch": s.fetch_s} for s in (middle, slow, fast))
    return {
        name: spanning(1 / seconds, 1 / slow_s[name], 1 / fast_s[name], unit="samples/s")
        for name, seconds in middle_s.items()
        if min(seconds, slow_s[name], fast_s[name]) > 0
    }


def _notes(rates: Rates, setup: Setup) -> list[str]:
    cores, workers = setup.cores_of(rates.cores), setup.workers_of(rates.cores)
    like = workers * rates.cores / cores  # as many workers for each core: this count was to be measured
    notes = []
    if like > rates.prep.most:
        notes.append(
            f"prep was measured with up to {units.exact(rates.prep.most)} workers on {rates.cores} cores; "
            f"{workers} on {cores} is a guess"
        )
    elif cores > rates.cores:
        notes.append(
            f"prep was measured on {rates.cores} cores; {cores} are taken to be as fast each, with as many workers each"
        )
    if setup.readers is not None and setup.readers > rates.storage.most:
        most = f"{units.exact(rates.storage.most)} readers"
        notes.append(f"storage was measured with up to {most}; {setup.readers} are not taken to be faster")
    return notes
