"""Threads of a machine: fetch and prep, now and over time.

The rule is Lobster's ("Load Balance-Aware I/O for Distributed DNN Training", ICPP 2022). Prep gets the smallest number
of threads that reaches its peak, fetch the others. Threads then move from prep to fetch one at a time while a minibatch
takes longer than the training step and prep is not the bottleneck.

`ThreadTuner` applies the rule to rates measured while the feed runs. The curve is extrapolated to untried numbers
(optimism): when fetch keeps consumers waiting, up to twice as many threads are tried, and the measurement corrects the
curve. Threads that were measured to bring nothing are taken back. Four rules prevent oscillation: a change must promise
`GAIN`, a proposal must persist, the node is measured again after every change, and a reversal of the last change
doubles the next wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import Struct

from mbaas.base import units
from mbaas.model.curves import Floats, ThroughputCurve
from mbaas.settings import Threads

Seconds = tuple[float, float]
"""Seconds of prep and of fetch for one minibatch."""


class TierBytes(Struct, frozen=True):
    """Bytes of a minibatch from one tier: local memory, another node's memory, or storage; or samples to prepare.

    ``curve`` is their total rate against the number of threads (alpha T(alpha) in the paper).
    """

    nbytes: float
    curve: ThroughputCurve

    def seconds(self, threads: Floats) -> Floats:
        """float64[n] threads -> float64[n] seconds for all of it; infinite at a rate of 0."""
        if not self.nbytes:
            return np.zeros_like(threads)
        with np.errstate(divide="ignore"):
            return self.nbytes / self.curve.rates(threads)


@dataclass(frozen=True)
class ThreadSplit:
    """Prep and fetch threads of a machine, at least one each, and their seconds per minibatch.

    ``idle`` threads would make both slower. ``reason`` is a sentence on why the split is not different.
    """

    prep: int
    fetch: int
    idle: int
    prep_s: float
    fetch_s: float
    reason: str


def split_threads(
    total: int, *, prep: ThroughputCurve, samples: float, tiers: Sequence[TierBytes], step_s: float
) -> ThreadSplit:
    """Split ``total`` threads, at least two, between prep and fetch.

    Prep is the bottleneck when it takes longer than both fetch and the step. Threads also stop moving when a move makes
    a minibatch no faster, for example when storage is saturated. ``prep`` are samples/s against threads, ``samples``
    those of a minibatch; the same fetch threads read one tier after the other; ``step_s`` is between two minibatches.
    """
    counts = np.arange(1.0, total + 1)
    prep_s, fetch_s = TierBytes(samples, prep).seconds(counts), sum((s.seconds(counts) for s in tiers), 0 * counts)
    # Storage slows down past its peak: threads that would only hinder fetch stay idle.
    best_fetch_s = np.minimum.accumulate(fetch_s)

    def made_s(preparing: int) -> Seconds:
        return float(prep_s[preparing - 1]), float(best_fetch_s[total - preparing - 1])

    # The smallest count at the peak: more threads make prep no faster and could fetch instead.
    preparing = min(prep.peak(most=total).count, total - 1)
    now = made_s(preparing)
    while not (why := _why_stay(now, made_s(preparing - 1) if preparing > 1 else None, step_s)):
        preparing -= 1
        now = made_s(preparing)
    fetching = int((fetch_s[: total - preparing] <= now[1]).argmax()) + 1  # the fewest that are as fast
    reason = (
        f"prep takes {units.seconds(now[0])} on {preparing} and fetch {units.seconds(now[1])} on {fetching} "
        f"of {total} threads: {why}"
    )
    return ThreadSplit(preparing, fetching, total - preparing - fetching, *now, reason)


def _why_stay(now: Seconds, then: Seconds | None, step_s: float) -> str:
    """Return why no thread moves from prep to fetch, from ``now`` to ``then``, or "" if one should."""
    if sum(now) <= step_s:
        return f"together within the step of {units.seconds(step_s)}"
    if now[0] > max(now[1], step_s):
        return "prep is the bottleneck"
    if then is None:
        return f"longer than the step of {units.seconds(step_s)}, but prep keeps one"
    if then[0] > max(then[1], step_s):
        return f"longer than the step of {units.seconds(step_s)}, but with one less prep would be the bottleneck"
    if not sum(then) < sum(now):
        return f"longer than the step of {units.seconds(step_s)}, but one more to fetch makes it no shorter"
    return ""


def divide_threads(total: int, *, lengths: Sequence[float]) -> list[int]:
    """Divide threads between queues in proportion to their lengths, in requests or seconds of work.

    An empty queue gets none, every other queue at least one; if there are too few, the longest queues get one each. The
    remainder goes to the largest fractions, and to the earlier queue in a tie. A longer queue never gets less than a
    shorter one.
    """
    waiting = [queue for queue, length in enumerate(lengths) if length > 0]
    counts = [0] * len(lengths)
    if total < len(waiting):
        for queue in sorted(waiting, key=lambda queue: -lengths[queue])[:total]:
            counts[queue] = 1
        return counts
    whole = sum(lengths)
    fair = [total * (length / whole) if length else 0.0 for length in lengths]  # this order avoids overflow
    for queue in waiting:
        # A queue without threads would never move.
        counts[queue] = max(1, math.floor(fair[queue]))
    while waiting and (left := total - sum(counts)):
        if left > 0:
            counts[max(waiting, key=lambda queue: (fair[queue] - counts[queue], -queue))] += 1
        else:
            above_one = [queue for queue in waiting if counts[queue] > 1]
            counts[max(above_one, key=lambda queue: (counts[queue] - fair[queue], queue))] -= 1
    return counts


GAIN = 0.10
"""Smallest share of the time that a change must save. Measured rates of busy machines scatter by about half as much."""

LOSS = 0.05
"""Threads are taken back if the remaining ones read at most this share less."""

FEWER = 0.75
"""Threads are taken back only if at most this share remains: a smaller step is not worth a new measurement."""

FRESH = 0.3
"""Weight of a new measurement against recent ones of the same count (`RECENT_S`). Older ones are replaced."""

RECENT_S = 60.0
"""Maximum age of a recent measurement of the same count."""

FORGET_S = 600.0
"""Age at which the rate of an unused count is forgotten. The time doubles with each reversed change."""

FILLED = 0.7
"""Share of fetch time that threads must be busy on average for more threads to find work too."""

NEAR = 0.8
"""Fetch time, as a share of the slower of training and prep, above which fetch is about to be the bottleneck."""

AMPLE = 0.5
"""Fetch time, as the same share, at which fetch is fast enough: more threads are useless."""

BUSY_S = 0.25
"""Minimum time of reading from storage for a rate to count."""

MOST_HOLD_S = 600.0
"""Longest time that a proposal must persist, after any number of reversals."""


class NodeLoad(Struct, frozen=True, kw_only=True):
    """Measurements of a node over the last seconds, with constant numbers of threads.

    Attributes:
        most_prep, most: limits of prep threads (of all workers), and of both kinds together.
        demand_per_s: samples/s from this node at which no trial would wait; 0 without trials.
        batch_samples: samples of a minibatch that are prepared here, on average.
        prep_per_s: samples/s of its workers while they prepare; 0 if not known.
        sample_bytes: average bytes read from storage for a sample.
        storage_s, read_s: seconds during which at least one thread read storage; the same summed over threads.
        others: other sources of a minibatch's bytes, read by separate threads: their curves are flat.
    """

    workers: int
    prep_threads: int
    fetch_threads: int
    most_prep: int
    most: int
    demand_per_s: float
    batch_samples: float
    prep_per_s: float
    sample_bytes: float
    storage_bytes: float
    storage_s: float
    read_s: float
    others: tuple[TierBytes, ...] = ()

    @property
    def is_filled(self) -> bool:
        """True if fetch had work for all of its threads."""
        return self.read_s >= FILLED * self.fetch_threads * self.storage_s

    @property
    def step_s(self) -> float:
        return self.batch_samples / self.demand_per_s if self.demand_per_s else math.inf


class Tuned(Struct, frozen=True):
    prep_threads: int
    fetch_threads: int
    reason: str


class ObservedCurve:
    """Rates of the counts tried so far, as a curve; ``points`` is count -> rate."""

    def __init__(self) -> None:
        self.points: dict[int, float] = {}
        self._learned_s: dict[int, float] = {}  # count -> time of its last measurement

    def learn(self, count: int, rate_per_s: float, now: float) -> None:
        # An old rate belongs to another load: replace it instead of averaging.
        is_recent = now - self._learned_s.get(count, -math.inf) <= RECENT_S
        old = self.points[count] if is_recent else rate_per_s
        self.points[count] = old + FRESH * (rate_per_s - old)
        self._learned_s[count] = now

    def forget_before(self, time_s: float) -> None:
        for count in [count for count, learned_s in self._learned_s.items() if learned_s < time_s]:
            del self.points[count], self._learned_s[count]

    def curve(self, *, most: int | None = None) -> ThroughputCurve:
        """Return straight lines through the measurements; the last line is extrapolated, up to ``most`` threads.

        A single point extends to a proportional curve, so more threads are tried. Two equal points give no reason to
        try more.
        """
        knots = tuple(sorted((float(count), rate) for count, rate in self.points.items()))
        (x0, y0), (x1, y1) = ((0.0, 0.0), *knots)[-2:]
        curve = ThroughputCurve(knots, (y1 - y0) / (x1 - x0))
        return curve if most is None else curve.flat_beyond(float(most))


def _beyond_one_each(prep: ThroughputCurve, *, workers: int, most: int) -> ThroughputCurve:
    """Return the curve without each worker's first thread; a count of 1 stands for ``workers`` threads."""
    more = ((count - workers + 1, rate) for count, rate in prep.flat_beyond(most).knots if count > workers)
    return ThroughputCurve(((1.0, prep.rate(workers)), *more), 0.0)


class ThreadTuner:
    def __init__(self, settings: Threads) -> None:
        self._settings = settings
        self._prep, self._fetch = ObservedCurve(), ObservedCurve()
        self._proposed: tuple[int, int] | None = None  # direction of the pending proposal
        self._last: tuple[int, int] = (0, 0)  # direction of the last change
        self._since = -math.inf
        self._reversals = 0

    def observe(self, load: NodeLoad, now: float) -> Tuned | None:
        """Return the change due at ``now`` seconds; ``load`` must be from after the last change."""
        # A node above its limit (a worker came) gives threads back at once: other nodes rely on the limit.
        if load.prep_threads + load.fetch_threads > load.most:
            fetching = max(1, load.most - load.prep_threads)
            reason = f"prep has {load.prep_threads}, and the node was given {load.most}"
            return Tuned(load.prep_threads, fetching, _change(load, load.prep_threads, fetching, reason))
        self._learn(load, now)
        proposal = self._propose(load)
        direction = _direction(load, proposal) if proposal is not None else None
        # Only the direction must persist. The number follows the scatter of the rates.
        if direction != self._proposed:
            self._proposed, self._since = direction, now
        if proposal is None or direction is None or now - self._since < self._hold_s(direction):
            return None
        self._reversals += _is_reversal(direction, self._last)
        self._last, self._proposed = direction, None
        return proposal

    def _hold_s(self, direction: tuple[int, int]) -> float:
        reversals = self._reversals if _is_reversal(direction, self._last) else 0
        return min(MOST_HOLD_S, self._settings.hold_s * 2.0**reversals)

    def _learn(self, load: NodeLoad, now: float) -> None:
        if load.prep_per_s > 0:
            self._prep.learn(load.prep_threads, load.prep_per_s, now)
        if load.storage_s >= BUSY_S and load.storage_bytes > 0:
            # Idle threads contribute nothing to the curve: the rate belongs to the busy ones.
            busy = load.fetch_threads if load.is_filled else max(1, round(load.read_s / load.storage_s))
            self._fetch.learn(busy, load.storage_bytes / load.storage_s, now)
        # Loads change, so measurements age. Forgotten counts are tried again, so remember longer after reversals.
        for curve in (self._prep, self._fetch):
            curve.forget_before(now - FORGET_S * 2.0**self._reversals)

    def _propose(self, load: NodeLoad) -> Tuned | None:
        is_known = self._prep.points and (self._fetch.points or not load.sample_bytes)
        if not is_known or not load.demand_per_s or not load.batch_samples:
            return None
        view = _View(load, self._prep.curve(), self._fetch)
        return view.more_for_prep_or_fetch() or view.fewer_for_fetch()


@dataclass(frozen=True)
class _View:
    load: NodeLoad
    prep: ThroughputCurve
    measured: ObservedCurve

    @cached_property
    def storage(self) -> ThroughputCurve:
        """Bytes/s against fetch threads; flat beyond the present count if the threads were not busy."""
        if not self.measured.points:  # nothing is read from storage, so any curve will do
            return ThroughputCurve.linear(1.0)
        return self.measured.curve(most=None if self.load.is_filled else self.load.fetch_threads)

    @cached_property
    def prep_s(self) -> list[float]:
        """Seconds of a minibatch for 0, 1, ... threads."""
        seconds: list[float] = TierBytes(self.load.batch_samples, self.prep).seconds(self._counts).tolist()
        return seconds

    @cached_property
    def fetch_s(self) -> list[float]:
        """The same to read its bytes from storage."""
        seconds: list[float] = self._from_storage.seconds(self._counts).tolist()
        return seconds

    @property
    def _counts(self) -> Floats:
        return np.arange(self.load.most + 1.0)

    @property
    def _from_storage(self) -> TierBytes:
        return TierBytes(self.load.batch_samples * self.load.sample_bytes, self.storage)

    def more_for_prep_or_fetch(self) -> Tuned | None:
        """Return Lobster's split if it gains enough."""
        load = self.load
        # Lobster keeps one thread for prep, a node one for each worker, so the others are not counted.
        split = split_threads(
            load.most - load.workers + 1,
            prep=_beyond_one_each(self.prep, workers=load.workers, most=load.most_prep),
            samples=load.batch_samples,
            tiers=[self._from_storage, *load.others],
            step_s=load.step_s,
        )
        preparing = split.prep + load.workers - 1
        fetching = self._enough(preparing, load.most - preparing)
        if preparing < load.prep_threads and fetching <= load.most - load.prep_threads:
            preparing = load.prep_threads  # fetch does not need them, and idle prep threads cost nothing
        if (preparing, fetching) == (load.prep_threads, load.fetch_threads):
            return None
        if not self._both_s(preparing, fetching) < (1 - GAIN) * self._both_s(load.prep_threads, load.fetch_threads):
            return None
        return Tuned(preparing, fetching, _change(load, preparing, fetching, self._why(preparing, fetching)))

    def _both_s(self, preparing: int, fetching: int) -> float:
        """Return the seconds of a minibatch, one stage after the other as in Lobster, including other tiers."""
        others_s = float(sum(other.seconds(np.ones(1))[0] for other in self.load.others))
        return self.prep_s[preparing] + self.fetch_s[fetching] + others_s

    def _enough(self, preparing: int, most: int) -> int:
        load = self.load
        pace_s = max(load.step_s, self.prep_s[preparing])
        here = min(load.fetch_threads, most)
        if self.fetch_s[here] <= NEAR * pace_s:
            return here
        # At most twice as many: untried counts are optimistic, and storage may be shared.
        reach = range(here, min(2 * load.fetch_threads, most) + 1)
        times = [self.fetch_s[count] for count in reach]
        ample = (count for count, time_s in zip(reach, times, strict=True) if time_s <= AMPLE * pace_s)
        best = reach[times.index(min(times))]
        found = min(next(ample, best), best)
        return found if self.fetch_s[found] <= (1 - GAIN) * self.fetch_s[here] else here

    def fewer_for_fetch(self) -> Tuned | None:
        load, points = self.load, self.measured.points
        if load.fetch_threads not in points:
            return None
        # Only within the tried range is "no faster" a measurement instead of an extrapolation.
        tried = np.arange(min(points), load.fetch_threads + 1.0)
        rates = self.measured.curve().rates(tried)
        knee = int(tried[(rates >= (1 - LOSS) * rates.max()).argmax()])
        if knee > FEWER * load.fetch_threads:
            return None
        most, enough = units.rate(rates[-1]), units.rate(rates[knee - int(tried[0])])
        told = f"storage gives {most} to {load.fetch_threads} and {enough} to {knee}"
        return Tuned(load.prep_threads, knee, _change(load, load.prep_threads, knee, told))

    def _why(self, preparing: int, fetching: int) -> str:
        load = self.load
        fetch_s, prep_s = self.fetch_s[load.fetch_threads], self.prep_s[load.prep_threads]
        return (
            f"a minibatch takes {units.seconds(fetch_s)} to fetch, {units.seconds(prep_s)} to prepare, "
            f"{units.seconds(load.step_s)} of training; "
            f"fetch may take {units.seconds(self.fetch_s[fetching])} and prep {units.seconds(self.prep_s[preparing])}"
        )


def _direction(load: NodeLoad, proposal: Tuned) -> tuple[int, int]:
    prep, fetch = proposal.prep_threads - load.prep_threads, proposal.fetch_threads - load.fetch_threads
    return (prep > 0) - (prep < 0), (fetch > 0) - (fetch < 0)


def _is_reversal(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return any(a * b < 0 for a, b in zip(one, other, strict=True))


def _change(load: NodeLoad, preparing: int, fetching: int, reason: str) -> str:
    parts = []
    if fetching != load.fetch_threads:
        parts.append(f"{fetching} instead of {load.fetch_threads} threads read storage")
    if preparing != load.prep_threads:
        parts.append(f"{preparing} instead of {load.prep_threads} threads prepare")
    return f"{' and '.join(parts)}: {reason}"
