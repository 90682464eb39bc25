"""What people ask of the what-if model: how much is enough, what limits, and how it goes on from there."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbaas import units
from mbaas.allocation.throughput import MOST_COUNT, ROUNDING
from mbaas.analysis import words
from mbaas.analysis.quantity import Bound, plain_fields
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.stages import Stages, stages
from mbaas.analysis.whatif import Prediction, predict
from mbaas.errors import ConfigError

PARAMETERS = (
    *("cache_bytes", "disk_bytes", "dram_bytes", "cores", "prep_workers", "readers", "storage_factor"),
    *("network_bytes_per_s", "accelerator_factor", "accelerators", "nodes", "trials", "batch_size"),
)
"""Fields of a `Setup` that a curve can follow: those that are numbers."""


@dataclass(frozen=True)
class Enough:
    """The smallest amount that suffices, and how sure that is.

    Attributes:
        amount: what suffices by the medians of the rates; None: no amount does.
        low: what would do if rates are as lucky as the measurements allow; None: not even then is there one.
        high: what will do even if they are as unlucky; None: it may be that no amount does.
        unit: what the amounts count.
        reason: the answer as a clause for people.
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
    """What sets the pace of steady epochs.

    Attributes:
        resource: the slowest one, by its name in `mbaas.analysis.stages`.
        certain: whether it is the same resource wherever in their intervals the rates are.
        gain: how many times as fast everything would be if this resource had no limit; 1 is no faster, because another
            one is as slow.
        next: the resource that would set the pace then.
        sentence: the answer as a clause for people.
    """

    resource: str
    certain: bool
    gain: float
    next: str
    sentence: str


@dataclass(frozen=True)
class Curve:
    """Predictions along one parameter, for a plot.

    Attributes:
        parameter: a field of `Setup`.
        points: (value, prediction), in the order in which the values were given.
    """

    parameter: str
    points: tuple[tuple[float, Prediction], ...]


def smallest_cache(rates: Rates, setup: Setup) -> Enough:
    """Find the fewest bytes of memory, on each node, with which fetch does not set the pace of steady epochs.

    They are for samples as they were read: what decoded ones bring is another question (`mbaas.analysis.decoding`).
    That is where F = D / (D x / C + D (1 - x) / S) crosses min(P, G), found by bisection to the byte: more cache never
    slows down.
    """
    whole_bytes = math.ceil(setup.read_bytes(rates.dataset_bytes))

    def fewest(others: Bound, supply: Bound) -> int | None:
        def suffices(cache_bytes: int) -> bool:
            tried = replace(setup, cache_bytes=cache_bytes, decoded=False)
            found = stages(rates, tried, steady=True, step=others, prep=others, supply=supply)
            return found.fetch_s <= max(found.compute_s, found.prep_s)

        # asked first, because the bisection needs that more cache is never slower: memory may be slower than storage
        if suffices(0):
            return 0
        if not suffices(whole_bytes):
            return None
        return bisect_left(range(whole_bytes), True, key=suffices)

    # Lucky is a slow step beside fast storage: it needs the smallest cache. Unlucky is the other way round.
    amount = fewest("value", "value")
    return Enough(
        amount, fewest("low", "high"), fewest("high", "low"), "bytes", _about_cache(amount, whole_bytes, setup)
    )


def fewest_prep_cores(rates: Rates, setup: Setup, *, most: int = MOST_COUNT) -> Enough:
    """Find the fewest prep workers of a node, each with a core, with which prep does not keep training from full speed.

    The node's other cores stay as they are: it has as many more, or fewer, cores as it has prep workers.
    """
    workers = setup.workers_of(rates.cores)
    # those that steps and readers use now stay theirs: otherwise more workers would only take cores from training
    others = max(0, setup.cores_of(rates.cores) - workers)

    def fewest(step: Bound, prep: Bound) -> int | None:
        def suffices(count: int) -> bool:
            tried = replace(setup, prep_workers=count, cores=others + count)
            found = stages(rates, tried, steady=True, step=step, prep=prep)
            # exactly as fast is fast enough, whatever the last digit of a quotient says
            return found.prep_s * (1 - ROUNDING) <= found.compute_s

        # No bisection: measured prep may be slower with one worker more, though many more are faster in the end.
        # Doubling finds a number that suffices in a few steps; only those below it are tried one by one.
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
    """Say what sets the pace of steady epochs, and what would if it did not."""
    found = stages(rates, setup, steady=True)
    rest = _without(found, found.limit)
    now_s, then_s = (max(s.compute_s, s.prep_s, s.fetch_s) for s in (found, rest))  # the slowest sets the pace
    limits = predict(rates, setup).steady.limits
    gain = now_s / then_s
    # the first is the median's, which the sentence is about
    doubt = "" if len(limits) == 1 else f" (or, within what was measured, {_listed(limits[1:])})"
    sentence = (
        f"{words.NAMES[found.limit]} sets the pace{doubt}; without that limit training would be {units.number(gain)} "
        f"times as fast, and {words.NAMES[rest.limit]} would set it"
    )
    return Bottleneck(found.limit, len(limits) == 1, gain, rest.limit, sentence)


def curve(rates: Rates, setup: Setup, parameter: str, values: Sequence[float]) -> Curve:
    """Predict along one number of the setup.

    Raises:
        ConfigError: ``parameter`` is none of `PARAMETERS`, or a value is out of its bounds.
    """
    if parameter not in PARAMETERS:
        raise ConfigError(f"parameter must be one of {', '.join(PARAMETERS)}, got {parameter!r}")

    def at(value: float) -> Prediction:
        changed: dict[str, Any] = {parameter: value}
        return predict(rates, replace(setup, **changed))

    return Curve(parameter, tuple((value, at(value)) for value in values))


def _without(found: Stages, limit: str) -> Stages:
    """Take one resource out, as if it took no time."""

    def kept(part: dict[str, float]) -> dict[str, float]:
        return {name: 0.0 if name == limit else s for name, s in part.items()}

    cores_s = 0.0 if limit == "cores" else found.cores_s  # cores are part of fetch, too, where something is read
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
