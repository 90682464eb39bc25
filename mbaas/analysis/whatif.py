"""Prediction of training speed and stalls from measured rates.

The model is DS-Analyzer's (VLDB 2021), speed = min(F, P, G). It is extended to several trials, shared feeds, several
nodes, and cores shared by prep and steps. `mbaas.analysis.stages` has the table of resources. An epoch is split by the
differential method. Compute is its time on synthetic data. Prep stall is the time added by prep with all data in
memory. Fetch stall is the time added by fetching.

If steps, prep and fetch do not overlap perfectly (``overlap`` below 1), a sample takes the longest time of the three
plus ``1 - overlap`` of the other two.
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
    """Shares of a trial's time spent waiting for prep, for reads and for other trials, from 0 to 1.

    A source that cannot separate waits for other trials from ``prep`` includes them there and leaves ``peers`` at 0.
    """

    prep: float
    fetch: float
    peers: float = 0.0

    @property
    def all(self) -> float:
        """Return the total share."""
        return self.prep + self.fetch + self.peers


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Prediction of one epoch of every trial.

    Attributes:
        trial_per_s: samples/s of each trial.
        total_per_s: samples/s of all trials together.
        compute_s, prep_stall_s, fetch_stall_s: the parts of ``epoch_s`` for one trial; their values add up to it.
        limit: the resource that sets the pace, by its name in `mbaas.analysis.stages`.
        limits: ``limit`` at the median, slow and fast ends of the rates, without duplicates; a single name is certain.
        bounds: samples/s of each trial that each resource alone would allow; unlimited resources are left out.
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
        """Return the share of a trial's time spent waiting for prep."""
        return self.prep_stall_s.value / self.epoch_s.value

    @property
    def fetch_stall(self) -> float:
        """Return the share of a trial's time spent waiting for reads."""
        return self.fetch_stall_s.value / self.epoch_s.value

    @property
    def waits(self) -> Waits:
        """Return both shares."""
        return Waits(prep=self.prep_stall, fetch=self.fetch_stall)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predictions of the first epoch, with empty caches, and of later ones; ``notes`` are reasons for doubt."""

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
    """Predict epochs with ``setup``.

    Intervals are the model's results at the slow and fast ends of all measurements, so they assume that all rates are
    off in the same direction.

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
    """Return the speedup of steady epochs.

    Both predictions use the same rates, so slow ends are compared with slow ends and fast with fast.
    """
    before, after = now.steady.epoch_s, then.steady.epoch_s
    return spanning(*(before.at(bound) / after.at(bound) for bound in BOUNDS), unit="times")


@dataclass(frozen=True)
class _Times:
    """Seconds per sample of the three runs: synthetic data, all data in memory, and the real workload."""

    synthetic_s: float
    prepared_s: float
    whole_s: float

    @classmethod
    def of(cls, found: Stages, overlap: float) -> _Times:
        # each run adds one part to the previous run; the added time is that part's stall, as in DS-Analyzer
        parts = (found.compute_s, found.prep_s, found.fetch_s)
        first, second, third = (overlap * max(parts[:n]) + (1 - overlap) * sum(parts[:n]) for n in (1, 2, 3))
        return cls(first, second, third)


def _epoch(rates: Rates, setup: Setup, *, steady: bool) -> Epoch:
    middle, slow, fast = (stages(rates, setup, steady=steady, step=b, prep=b, supply=b) for b in BOUNDS)
    at_middle, at_slow, at_fast = times = [_Times.of(found, rates.overlap) for found in (middle, slow, fast)]
    samples = rates.samples

    def stall_s(earlier: str, later: str) -> Quantity:
        # A difference is widest if one run was slow and the other fast. The runs are measured one after the other, and
        # the machine's load may change between them.
        least = getattr(at_fast, later) - getattr(at_slow, earlier)
        most = getattr(at_slow, later) - getattr(at_fast, earlier)
        value = getattr(at_middle, later) - getattr(at_middle, earlier)
        return spanning(*(samples * max(0.0, s) for s in (value, least, most)), unit="s")

    trial_per_s = spanning(*(1 / t.whole_s for t in times), unit="samples/s")
    # the limit at the median comes first; further names mean that the limit is uncertain
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
    """Return the samples/s that each resource allows; fetch counts as one because its parts add up."""
    middle_s, slow_s, fast_s = ({**s.compute, **s.prep, "fetch": s.fetch_s} for s in (middle, slow, fast))
    return {
        name: spanning(1 / seconds, 1 / slow_s[name], 1 / fast_s[name], unit="samples/s")
        for name, seconds in middle_s.items()
        if min(seconds, slow_s[name], fast_s[name]) > 0
    }


def _notes(rates: Rates, setup: Setup) -> list[str]:
    cores, workers = setup.cores_of(rates.cores), setup.workers_of(rates.cores)
    like = workers * rates.cores / cores  # workers at the same number per core on the measured machine
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
