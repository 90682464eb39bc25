"""Value of the decoded tier: decoding's share of prep, memory needed to avoid it, and the resulting speedup."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from mbaas.base import units
from mbaas.model import words
from mbaas.model.forms import WORTHWHILE
from mbaas.model.pace import predict, speedup
from mbaas.model.quantity import AsJson, Bound, Quantity, spanning
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import form_plan, node_prep_rate, read_shares

LEAST_GAIN = 1.02
"""Minimum speedup of epochs to count as a gain."""

AS_GOOD = 1.01
"""A cache is large enough if epochs take at most this times the shortest."""

STEPS = 128
"""Resolution of the search for a large enough cache, as parts of the largest one."""


@dataclass(frozen=True, kw_only=True)
class Decoding(AsJson):
    """Value of caching samples decoded.

    Attributes:
        share: decoding's share of the CPU time of preparing a sample, at most 1; below 0 if decoded samples take
            longer.
        decoded: share of the samples that the present setup caches decoded.
        whole_bytes: memory per node to cache all its samples decoded.
        more_bytes: the part of ``whole_bytes`` that the present cache lacks.
        enough_bytes: memory per node's cache beyond which epochs hardly become shorter.
        prep_speedup: speedup of prep if all samples are cached decoded.
        epoch_speedup: the same for steady epochs, which may then have another bottleneck.
        told: reasons why the cache plan leaves out decoded samples or a disk, one clause each.
        sentence: the answer as a clause.
    """

    share: Quantity
    decoded: float
    whole_bytes: int
    more_bytes: int
    enough_bytes: int
    prep_speedup: Quantity
    epoch_speedup: Quantity
    told: tuple[str, ...]
    sentence: str

    @property
    def is_worthwhile(self) -> bool:
        """Return whether decoded samples would be cached at all, given enough memory."""
        return self.share.value >= WORTHWHILE


def decoding(rates: Rates, setup: Setup) -> Decoding | None:
    """Return the value of caching samples decoded; None if the decoded tier was not measured."""
    if rates.decoded_prep is None or rates.decoded_bytes is None:
        return None
    whole_bytes = math.ceil(setup.read_bytes(rates.samples * rates.decoded_bytes))
    whole = replace(setup, decoded=True, cache_bytes=max(setup.cache_bytes, float(whole_bytes)))
    plan, decoded = form_plan(rates, setup), read_shares(rates, setup, steady=True).decoded
    encoded, cost = rates.cpu_s(0.0), rates.cpu_s(1.0)
    # measured independently, so the two may be off in opposite directions
    pairs = (cost.value, encoded.value), (cost.high, encoded.low), (cost.low, encoded.high)
    # nothing can be saved of what costs nothing
    share = spanning(
        *(1 - decoded_s / encoded_s if encoded_s else 0.0 for decoded_s, encoded_s in pairs), unit="of prep"
    )
    found = Decoding(
        share=share,
        decoded=decoded,
        whole_bytes=whole_bytes,
        more_bytes=max(0, math.ceil(whole_bytes - setup.cache_bytes)),
        enough_bytes=_enough_bytes(rates, whole, whole_bytes),
        prep_speedup=_prep_speedup(rates, setup, decoded),
        epoch_speedup=speedup(predict(rates, setup), predict(rates, whole)),
        told=() if plan is None else plan.told,
        sentence="",
    )
    return replace(found, sentence=_sentence(found, setup, predict(rates, whole).steady.limit))


def largest_cache(rates: Rates, setup: Setup) -> float:
    """Return the bytes of each node's cache beyond which more are of no use, in any form of samples."""
    found = decoding(rates, setup) if setup.decoded else None
    whole_bytes = found.whole_bytes if found is not None and found.is_worthwhile else 0
    return max(setup.read_bytes(rates.dataset_bytes), whole_bytes)


def _enough_bytes(rates: Rates, whole: Setup, whole_bytes: int) -> int:
    """Return the smallest cache with which epochs are about as short as with all samples decoded."""

    def epoch_s(cache_bytes: float) -> float:
        return predict(rates, replace(whole, cache_bytes=cache_bytes)).steady.epoch_s.value

    most_s = AS_GOOD * epoch_s(whole_bytes)

    def is_enough(step: int) -> bool:
        return epoch_s(whole_bytes * step / STEPS) <= most_s

    # As soon as all samples fit encoded, all of them are cached, even if fewer are decoded. Epochs may become longer at
    # that size. On each side of it, more memory is never slower.
    all_kept = min(STEPS, math.ceil(whole.read_bytes(rates.dataset_bytes) / whole_bytes * STEPS))
    steps = range(all_kept) if is_enough(all_kept) else range(all_kept, STEPS)
    step = steps.start + bisect_left(steps, True, key=is_enough)
    return math.ceil(whole_bytes * step / STEPS)


def _prep_speedup(rates: Rates, setup: Setup, decoded: float) -> Quantity:
    def times(encoded_end: Bound, decoded_end: Bound) -> float:
        encoded_s = 1 / node_prep_rate(rates, setup, encoded_end)
        decoded_s = 1 / node_prep_rate(rates, setup, decoded_end, decoded=1.0)
        return ((1 - decoded) * encoded_s + decoded * decoded_s) / decoded_s

    return spanning(times("value", "value"), times("high", "low"), times("low", "high"), unit="times")


def _sentence(found: Decoding, setup: Setup, limit: str) -> str:
    share = words.with_interval(found.share, units.percent)
    if not found.is_worthwhile:
        return words.none_decoded(found.share.value)
    if found.decoded > 1 - 1e-6:
        return f"decoding is {share} of prep, and all samples are kept decoded"
    each = " on each node" if setup.nodes > 1 else ""
    now = f", and {units.percent(found.decoded)} of the samples are kept decoded" if found.decoded else ""
    with_what = f"{units.size(found.more_bytes)} more memory{each}" if found.more_bytes else "the memory that there is"
    verb, times = "would" if setup.decoded else "could", words.with_interval(found.prep_speedup)
    prep = f"{with_what} {verb} keep all of them decoded and make prep {times} times as fast"
    return f"decoding is {share} of prep{now}; {prep}, {_epochs(found, limit)}"


def _epochs(found: Decoding, limit: str) -> str:
    if found.epoch_speedup.value < LEAST_GAIN:
        return f"but epochs no shorter, because {words.NAMES[limit]} sets their pace"
    return f"and epochs {words.with_interval(found.epoch_speedup)} times"
