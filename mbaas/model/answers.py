"""Questions to the what-if model: sufficient amounts, the bottleneck, and predictions along one parameter."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbaas import units
from mbaas.errors import ConfigError
from mbaas.model import words
from mbaas.model.curves import MOST_COUNT, ROUNDING
from mbaas.model.pace import Prediction, Stages, predict, stages
from mbaas.model.quantity import Bound, plain_fields
from mbaas.model.rates import Rates, Setup

PARAMETERS = (
    *("cache_bytes", "disk_bytes", "dram_bytes", "cores", "prep_workers", "readers", "storage_factor"),
    *("network_bytes_per_s", "accelerator_factor", "accelerators", "nodes", "trials", "batch_size"),
)
"""Numeric fields of `Setup`, which a curve can follow."""


@dataclass(frozen=True)
class Enough:
    """The smallest sufficient amount, with its uncertainty.

    Attributes:
        amount: sufficient by the medians of the rates; None: no amount suffices.
        low: sufficient at the favourable ends of the rates' intervals; None: even then no amount suffices.
        high: sufficient at the unfavourable ends; None: possibly no amount suffices.
        unit: unit of the amounts.
        reason: the answer as a clause.
    """

    amount: int | None
    low: int | None
    high: int | None
    unit: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


@dataclass(frozen=True)
class Bottleneck:
    """The resource that sets the pace of steady epochs, by its name in `mbaas.model.pace`.

    Attributes:
        certain: whether it is the bottleneck at all ends of the rates' intervals.
        gain: speedup if this resource were unlimited; 1 if another one is just as slow.
        next: the resource that would set the pace then.
        sentence: the answer as a clause.
    """

    resource: str
    certain: bool
    gain: float
    next: str
    sentence: str


@dataclass(frozen=True)
class Curve:
    """Predictions along one field of `Setup`; ``points`` are (value, prediction) in the order of the given values."""

    parameter: str
    points: tuple[tuple[float, Prediction], ...]


def smallest_cache(rates: Rates, setup: Setup) -> Enough:
    """Find the smallest memory cache per node, in bytes, with which fetch does not limit steady epochs.

    All samples are taken as encoded; see `mbaas.analysis.decoding` for decoded ones. The answer is the cache share x at
    which F = D / (D x / C + D (1 - x) / S) reaches min(P, G). It is found by bisection to the byte, because more cache
    is never slower.
    """
    whole_bytes = math.ceil(setup.read_bytes(rates.dataset_bytes))

    def fewest(others: Bound, supply: Bound) -> int | None:
        def suffices(cache_bytes: int) -> bool:
            tried = replace(setup, cache_bytes=cache_bytes, decoded=False)
            found = stages(rates, tried, steady=True, step=others, prep=others, supply=supply)
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
    """Find the fewest prep workers per node, each with a core, that end prep stalls.

    The number of the node's other cores does not change: a worker more or less is a core more or less.
    """
    workers = setup.workers_of(rates.cores)
    # the cores of steps and readers stay theirs; otherwise more workers would only take cores from training
    others = max(0, setup.cores_of(rates.cores) - workers)

    def fewest(step: Bound, prep: Bound) -> int | None:
        def suffices(count: int) -> bool:
            tried = replace(setup, prep_workers=count, cores=others + count)
            found = stages(rates, tried, steady=True, step=step, prep=prep)
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
    found = stages(rates, setup, steady=True)
    rest = _without(found, found.limit)
    now_s, then_s = (max(s.compute_s, s.prep_s, s.fetch_s) for s in (found, rest))  # the slowest sets the pace
    limits = predict(rates, setup).steady.limits
    gain = now_s / then_s
    # the first limit is the one at the medians, which the sentence names already
    doubt = "" if len(limits) == 1 else f" (or, within the measured interval, {_listed(limits[1:])})"
    sentence = (
        f"{words.NAMES[found.limit]} sets the pace{doubt}; without that limit training would be {units.number(gain)} "
        f"times as fast, and {words.NAMES[rest.limit]} would set it"
    )
    return Bottleneck(found.limit, len(limits) == 1, gain, rest.limit, sentence)


def curve(rates: Rates, setup: Setup, parameter: str, values: Sequence[float]) -> Curve:
    """Predict along one numeric field of the setup.

    Raises:
        ConfigError: ``parameter`` is not in `PARAMETERS`, or a value is out of range.
    """
    if parameter not in PARAMETERS:
        raise ConfigError(f"parameter must be one of {', '.join(PARAMETERS)}, got {parameter!r}")

    def at(value: float) -> Prediction:
        changed: dict[str, Any] = {parameter: value}
        return predict(rates, replace(setup, **changed))

    return Curve(parameter, tuple((value, at(value)) for value in values))


def _without(found: Stages, limit: str) -> Stages:
    def kept(part: dict[str, float]) -> dict[str, float]:
        return {name: 0.0 if name == limit else s for name, s in part.items()}

    cores_s = 0.0 if limit == "cores" else found.cores_s  # with reads, cores are part of fetch too
    return Stages(kept(found.compute), kept(found.prep), kept(found.fetch), cores_s)


def _listed(names: Sequence[str]) -> str:
    return " or ".join(words.NAMES[name] for name in names)


def _about_cache(amount: int | None, whole_bytes: int, setup: Setup) -> str:
    each = " on each node" if setup.nodes > 1 else ""
    if amount is None:
        return f"fetch sets the pace even if all {units.size(whole_bytes)} that are read{each} are cached"
    if amount == 0:
        return "fetch does not set the pace, even without a cache"
    part = units.percent(amount / whole_bytes)
    has = f"it is {units.size(setup.cache_bytes)} now"
    return f"a cache of {units.size(amount)}{each}, {part} of what is read there, ends fetch stalls; {has}"
