"""Predictions of training speed and stalls from measured rates, and the answers that follow from them.

The model is DS-Analyzer's (VLDB 2021), speed = min(F, P, G). It is extended to several trials, shared feeds, several
nodes, and cores shared by prep and steps. `mbaas.model.supply` has the table of resources. An epoch is split by the
differential method. Compute is its time on synthetic data. Prep stall is the time added by prep with all data in
memory. Fetch stall is the time added by fetching.

If steps, prep and fetch do not overlap perfectly (``overlap`` below 1), a sample takes the longest time of the three
plus ``1 - overlap`` of the other two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbaas.base import units
from mbaas.errors import ConfigError
from mbaas.model import words
from mbaas.model.curves import MOST_COUNT, ROUNDING
from mbaas.model.quantity import BOUNDS, AsJson, Bound, Quantity, spanning
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import ReadShares, ResourceTimes, read_shares, resource_times


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
        return self.prep + self.fetch + self.peers


@dataclass(frozen=True, kw_only=True)
class Epoch(AsJson):
    """Prediction of one epoch of every trial.

    Attributes:
        trial_per_s: samples/s of each trial.
        total_per_s: samples/s of all trials together.
        compute_s, prep_stall_s, fetch_stall_s: the parts of ``epoch_s`` for one trial; their values add up to it.
        limit: the resource that sets the pace, by its name in `mbaas.model.supply`.
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
    reads: ReadShares

    @property
    def prep_stall(self) -> float:
        return self.prep_stall_s.value / self.epoch_s.value

    @property
    def fetch_stall(self) -> float:
        return self.fetch_stall_s.value / self.epoch_s.value

    @property
    def waits(self) -> Waits:
        return Waits(prep=self.prep_stall, fetch=self.fetch_stall)


@dataclass(frozen=True, kw_only=True)
class Prediction(AsJson):
    """Predictions of the first epoch, with empty caches, and of later ones; ``notes`` are reasons for doubt."""

    setup: Setup
    first: Epoch
    steady: Epoch
    notes: tuple[str, ...] = ()

    def run_s(self, epochs: int) -> Quantity:
        if epochs < 1:
            raise ConfigError(f"epochs must be at least 1, got {epochs}")
        return self.first.epoch_s.plus(self.steady.epoch_s.scaled(epochs - 1))


def predict(rates: Rates, setup: Setup) -> Prediction:
    """Predict epochs with ``setup``.

    Intervals assume that all rates are off in the same direction: they are results at the slow and fast ends. Raises
    ConfigError if the setup uses a disk whose rate was not measured.
    """
    return Prediction(
        setup=setup,
        first=_epoch(rates, setup, steady=False),
        steady=_epoch(rates, setup, steady=True),
        notes=tuple(_notes(rates, setup)),
    )


def speedup(now: Prediction, then: Prediction) -> Quantity:
    """Return the speedup of steady epochs. Both predictions use the same rates, so equal ends are compared."""
    before, after = now.steady.epoch_s, then.steady.epoch_s
    return spanning(*(before.at(bound) / after.at(bound) for bound in BOUNDS), unit="times")


def stall_range(rates: Rates, setup: Setup) -> tuple[float, float]:
    """Return the lowest and highest share of time that trials wait in steady epochs, 0 to 1.

    Unlike the intervals of `predict`, they assume that steps and supply are off in opposite directions.
    """

    def share(step: Bound, supply: Bound) -> float:
        found = resource_times(rates, setup, steady=True, step=step, prep=supply, supply=supply)
        synthetic_s, _, whole_s = _run_times(found, rates.overlap)
        return max(0.0, 1 - synthetic_s / whole_s)

    return share("low", "high"), share("high", "low")


def _run_times(found: ResourceTimes, overlap: float) -> tuple[float, ...]:
    """Return seconds per sample of three runs: synthetic data, all data in memory, and the real workload."""
    # Each run adds one part to the previous run; the added time is that part's stall, as in DS-Analyzer.
    parts = (found.compute_s, found.prep_s, found.fetch_s)
    return tuple(overlap * max(parts[:n]) + (1 - overlap) * sum(parts[:n]) for n in (1, 2, 3))


def _epoch(rates: Rates, setup: Setup, *, steady: bool) -> Epoch:
    middle, slow, fast = (resource_times(rates, setup, steady=steady, step=b, prep=b, supply=b) for b in BOUNDS)
    samples = rates.samples
    # Each run's seconds at the three ends.
    synthetic_s, prepared_s, whole_s = zip(
        *(_run_times(found, rates.overlap) for found in (middle, slow, fast)), strict=True
    )

    def seconds(ends: Sequence[float]) -> Quantity:
        return spanning(*(samples * s for s in ends), unit="s")

    def stall_s(earlier: Sequence[float], later: Sequence[float]) -> Quantity:
        # A difference is widest if one run was slow and the other fast. The runs are measured one after the other, and
        # the machine's load may change between them.
        pairs = ((later[0], earlier[0]), (later[2], earlier[1]), (later[1], earlier[2]))
        return seconds([max(0.0, after - before) for after, before in pairs])

    trial_per_s = spanning(*(1 / s for s in whole_s), unit="samples/s")
    # the limit at the median comes first; further names mean that the limit is uncertain
    limits = tuple(dict.fromkeys(found.limit for found in (middle, slow, fast)))
    return Epoch(
        trial_per_s=trial_per_s,
        total_per_s=trial_per_s.scaled(setup.trials),
        epoch_s=seconds(whole_s),
        compute_s=seconds(synthetic_s),
        prep_stall_s=stall_s(synthetic_s, prepared_s),
        fetch_stall_s=stall_s(prepared_s, whole_s),
        limit=middle.limit,
        limits=limits,
        bounds=_bounds(middle, slow, fast),
        reads=read_shares(rates, setup, steady=steady),
    )


def _bounds(middle: ResourceTimes, slow: ResourceTimes, fast: ResourceTimes) -> dict[str, Quantity]:
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


PARAMETERS = (
    *("cache_bytes", "disk_bytes", "dram_bytes", "cores", "prep_workers", "readers", "storage_factor"),
    *("network_bytes_per_s", "accelerator_factor", "accelerators", "nodes", "trials", "pipelines", "batch_size"),
)
"""Numeric fields of `Setup`, which a curve can follow."""


@dataclass(frozen=True)
class Enough(AsJson):
    """The smallest sufficient amount by the medians of the rates, and at their favourable and unfavourable ends.

    None: no amount suffices. ``reason`` is the answer as a clause.
    """

    amount: int | None
    low: int | None
    high: int | None
    unit: str
    reason: str


@dataclass(frozen=True)
class Bottleneck:
    """The resource that sets the pace of steady epochs, ``certain`` at all ends of the rates, and the ``next`` one.

    ``gain`` is the speedup if it were unlimited.
    """

    resource: str
    certain: bool
    gain: float
    next: str
    sentence: str


@dataclass(frozen=True)
class WhatIfCurve:
    """Predictions along one field of `Setup`; ``points`` are (value, prediction) in the order of the given values."""

    parameter: str
    points: tuple[tuple[float, Prediction], ...]


def smallest_cache(rates: Rates, setup: Setup) -> Enough:
    """Find the smallest memory cache per node, in bytes, with which fetch does not limit steady epochs.

    All samples are taken as encoded; see `mbaas.tools.analysis.decoding` for decoded ones. The answer is the cache
    share x at which F = D / (D x / C + D (1 - x) / S) reaches min(P, G), by bisection: more cache is never slower.
    """
    whole_bytes = math.ceil(setup.read_bytes(rates.dataset_bytes))

    def fewest(others: Bound, supply: Bound) -> int | None:
        def suffices(cache_bytes: int) -> bool:
            tried = replace(setup, cache_bytes=cache_bytes, decoded=False)
            found = resource_times(rates, tried, steady=True, step=others, prep=others, supply=supply)
            return found.fetch_s <= max(found.compute_s, found.prep_s)

        # tried first: if memory is slower than storage, more cache is slower, and bisection would not be valid
        if suffices(0):
            return 0
        if not suffices(whole_bytes):
            return None
        return bisect_left(range(whole_bytes), True, key=suffices)

    # The smallest cache suffices for a slow step with fast storage, the largest for the reverse.
    amount = fewest("value", "value")
    return Enough(
        amount, fewest("low", "high"), fewest("high", "low"), "bytes", _about_cache(amount, whole_bytes, setup)
    )


def fewest_prep_cores(rates: Rates, setup: Setup, *, most: int = MOST_COUNT) -> Enough:
    """Find the fewest prep workers per node, each with a core, that end prep stalls; other cores do not change."""
    workers = setup.workers_of(rates.cores)
    # the cores of steps and readers stay theirs; otherwise more workers would only take cores from training
    others = max(0, setup.cores_of(rates.cores) - workers)

    def fewest(step: Bound, prep: Bound) -> int | None:
        def suffices(count: int) -> bool:
            tried = replace(setup, prep_workers=count, cores=others + count)
            found = resource_times(rates, tried, steady=True, step=step, prep=prep)
            # equal speed suffices, within rounding
            return found.prep_s * (1 - ROUNDING) <= found.compute_s

        # No bisection: one more worker may slow prep down even if many more speed it up. Doubling finds a sufficient
        # number in a few steps; only the numbers below it are tried one by one.
        doubled = next(filter(suffices, [*(2**power for power in range(most.bit_length())), most]), None)
        return None if doubled is None else next(filter(suffices, range(1, doubled + 1)))

    amount = fewest("value", "value")
    if amount is None:
        reason = f"not even {most:,} prep cores on each node end prep stalls"
    else:
        others_too = f" beside {units.counted(others, 'other core')}" if others else ""
        verb = "ends" if amount == 1 else "end"
        reason = (
            f"{units.counted(amount, 'prep core')} on each node{others_too} {verb} prep stalls; it has {workers} now"
        )
    return Enough(amount, fewest("low", "high"), fewest("high", "low"), "cores", reason)


def bottleneck(rates: Rates, setup: Setup) -> Bottleneck:
    """Return the resource that sets the pace of steady epochs, and the next one if it were unlimited."""
    found = resource_times(rates, setup, steady=True)
    rest = found.without(found.limit)
    limits = predict(rates, setup).steady.limits
    gain = found.pace_s / rest.pace_s
    # the first limit is the one at the medians, which the sentence names already
    others = " or ".join(words.NAMES[name] for name in limits[1:])
    doubt = f" (or, within the measured interval, {others})" if others else ""
    sentence = (
        f"{words.NAMES[found.limit]} sets the pace{doubt}; without that limit training would be {units.number(gain)} "
        f"times as fast, and {words.NAMES[rest.limit]} would set it"
    )
    return Bottleneck(found.limit, len(limits) == 1, gain, rest.limit, sentence)


def curve(rates: Rates, setup: Setup, parameter: str, values: Sequence[float]) -> WhatIfCurve:
    """Predict along one numeric field of the setup; raise ConfigError for a field not in `PARAMETERS`."""
    if parameter not in PARAMETERS:
        raise ConfigError(f"parameter must be one of {', '.join(PARAMETERS)}, got {parameter!r}")

    def at(value: float) -> Prediction:
        changed: dict[str, Any] = {parameter: value}
        return predict(rates, replace(setup, **changed))

    return WhatIfCurve(parameter, tuple((value, at(value)) for value in values))


def _about_cache(amount: int | None, whole_bytes: int, setup: Setup) -> str:
    each = " on each node" if setup.nodes > 1 else ""
    if amount is None:
        return f"fetch sets the pace even if all {units.size(whole_bytes)} that are read{each} are cached"
    if amount == 0:
        return "fetch does not set the pace, even without a cache"
    part = units.percent(amount / whole_bytes)
    has = f"it is {units.size(setup.cache_bytes)} now"
    return f"a cache of {units.size(amount)}{each}, {part} of the bytes read there, ends fetch stalls; {has}"
