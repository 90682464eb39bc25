"""What to change, the recommended change first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mbaas.analysis import words
from mbaas.analysis.answers import fewest_prep_cores, smallest_cache
from mbaas.analysis.quantity import Quantity
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.whatif import Prediction, predict

LEAST_GAIN = 1.02
"""A change that makes epochs less than 2 % faster is not worth a sentence."""

CLEAR_GAIN = 1.1
"""A setting that gains so much comes before anything that has to be bought."""

Kind = Literal["setting", "purchase"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to do.

    Attributes:
        kind: whether it is a setting of what is there, or has to be bought.
        advice: what to do, as a clause: "use 4 prep workers instead of 2".
        setup: afterwards.
        prediction: with that.
        speedup: how many times as fast steady epochs become.
    """

    kind: Kind
    advice: str
    setup: Setup
    prediction: Prediction
    speedup: Quantity

    def to_json(self) -> dict[str, Any]:
        """Keys ``kind``, ``advice``, ``setup``, ``epoch_s``, ``speedup``."""
        return {
            "kind": self.kind,
            "advice": self.advice,
            "setup": self.setup.to_json(),
            "epoch_s": self.prediction.steady.epoch_s.to_json(),
            "speedup": self.speedup.to_json(),
        }


def recommend(rates: Rates, setup: Setup, *, memory_bytes: float = math.inf) -> list[Change]:
    """Changes that make steady epochs at least 2 % faster, each on its own: clear settings first, then by gain.

    Args:
        memory_bytes: of a node, that a cache could get without buying any.
    """
    now = predict(rates, setup)
    made = []
    for kind, advice, changed in (*_settings(rates, setup, memory_bytes), *_purchases(rates, setup, memory_bytes)):
        prediction = predict(rates, changed)
        speedup = _speedup(now, prediction)
        if speedup.value >= LEAST_GAIN:
            made.append(Change(kind=kind, advice=advice, setup=changed, prediction=prediction, speedup=speedup))
    return sorted(made, key=lambda c: (c.kind != "setting" or c.speedup.value < CLEAR_GAIN, -c.speedup.value))


Candidate = tuple[Kind, str, Setup]


def _settings(rates: Rates, setup: Setup, memory_bytes: float) -> Iterator[Candidate]:
    if setup.trials > 1 and not setup.sharing:
        shared = (
            f"let all {setup.trials} trials share one feed, so that each sample is fetched and prepared once for all"
        )
        yield "setting", shared, replace(setup, sharing=True)
    workers = setup.workers_of(rates.cores)
    best = _best_workers(rates, setup)
    if best != workers:
        yield (
            "setting",
            f"use {words.counted(best, 'prep worker')} instead of {workers}",
            replace(setup, prep_workers=best),
        )
    wanted_bytes = _useful_cache(rates, setup)
    affordable_bytes = min(wanted_bytes, memory_bytes)
    if affordable_bytes > setup.cache_bytes:
        yield "setting", _about_cache(setup, affordable_bytes), replace(setup, cache_bytes=affordable_bytes)


def _purchases(rates: Rates, setup: Setup, memory_bytes: float) -> Iterator[Candidate]:
    wanted_bytes = _useful_cache(rates, setup)
    if wanted_bytes > max(memory_bytes, setup.cache_bytes):
        advice = f"{_about_cache(setup, wanted_bytes)}, more memory than there is"
        yield "purchase", advice, replace(setup, cache_bytes=wanted_bytes)
    cores, workers = setup.cores_of(rates.cores), setup.workers_of(rates.cores)
    enough = fewest_prep_cores(rates, setup).amount
    if enough is not None and enough > workers:
        more = replace(setup, cores=cores + enough - workers, prep_workers=enough)
        yield "purchase", f"give each node {words.counted(enough - workers, 'more core')} for prep", more
    faster = replace(setup, storage_factor=2 * setup.storage_factor)
    yield "purchase", "use storage that is twice as fast", faster
    yield (
        "purchase",
        "use accelerators that are twice as fast",
        replace(setup, accelerator_factor=2 * setup.accelerator_factor),
    )
    wider = replace(setup, network_bytes_per_s=2 * setup.network_bytes_per_s)
    yield "purchase", "use a network that is twice as fast", wider
    yield "purchase", f"use {setup.nodes + 1} nodes instead of {setup.nodes}", replace(setup, nodes=setup.nodes + 1)


def _speedup(now: Prediction, then: Prediction) -> Quantity:
    """Rates are the same before and after, so slow ends belong together, and so do fast ends."""
    before, after = now.steady.epoch_s, then.steady.epoch_s
    ratios = [before.at(bound) / after.at(bound) for bound in ("value", "low", "high")]
    return Quantity(ratios[0], low=min(ratios), high=max(ratios), unit="times")


def _best_workers(rates: Rates, setup: Setup) -> int:
    """The fewest workers within the node's cores with which epochs are within 1 % of the shortest."""
    counts = range(1, setup.cores_of(rates.cores) + 1)
    seconds = [predict(rates, replace(setup, prep_workers=count)).steady.epoch_s.value for count in counts]
    return next(count for count, s in zip(counts, seconds, strict=True) if s <= 1.01 * min(seconds))


def _useful_cache(rates: Rates, setup: Setup) -> float:
    """Bytes of a node beyond which more cache brings nothing."""
    enough = smallest_cache(rates, setup).amount
    if enough is not None:
        return enough
    return math.ceil(rates.dataset_bytes / setup.nodes if setup.sharing else rates.dataset_bytes * setup.node_trials)


def _about_cache(setup: Setup, cache_bytes: float) -> str:
    each = " on each node" if setup.nodes > 1 else ""
    instead = f" instead of {words.size(setup.cache_bytes)}" if setup.cache_bytes else ""
    return f"give the cache {words.size(cache_bytes)}{each}{instead}"
