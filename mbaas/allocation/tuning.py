"""Decides when a node's threads move between fetch and prep, and how many read storage: a state machine.

The split is Lobster's (`threads`), from rates that were measured while the feed runs. Nobody knows how fast a number of
threads is before it has run. So counts that were never tried are taken to go on as the measured ones do (optimism); a
few more threads are tried, at most twice as many, when fetch keeps trials waiting; and what is measured then corrects
the curve. Threads beyond the point from which on more have been measured to bring nothing are taken back.

Nothing swings: a change has to promise `GAIN`, a proposal has to last, after every change the node is measured anew,
and a change that takes the last one back makes the next wait twice as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import Struct

from mbaas import units
from mbaas.allocation.threads import TierBytes, load_time_s, split_threads
from mbaas.allocation.throughput import Floats, ThroughputCurve
from mbaas.errors import ConfigError
from mbaas.settings import Threads

GAIN = 0.10
"""The share of the time that a change must save. Measured rates of busy machines scatter by about half as much."""

LOSS = 0.05
"""Threads are taken back if the others read at most this share less."""

FEWER = 0.75
"""Threads are taken back only if at most this share of them remains: a smaller step is not worth a new measurement."""

FRESH = 0.3
"""The weight of a new measurement against those of the same count in the last `RECENT_S`; older ones are replaced."""

RECENT_S = 60.0
"""How long a measurement of the same count is recent."""

FORGET_S = 600.0
"""A count that was not in use for this long is unknown again; the time doubles with each change that was taken back."""

FILLED = 0.7
"""Threads that are busy for at least this share of the time in which any is: more of them would find work, too."""

NEAR = 0.8
"""Fetch that takes this share of the time of training or prep, the slower one, is about to be the bottleneck."""

AMPLE = 0.5
"""Fetch that takes this share of it is fast enough: more threads are of no use."""

BUSY_S = 0.25
"""How long storage must have been read before its rate counts."""

MOST_HOLD_S = 600.0
"""No proposal has to last longer than this, however often changes were taken back."""


class NodeLoad(Struct, frozen=True, kw_only=True):
    """What a node did over the last seconds, with the same threads all the time.

    Attributes:
        workers: number of prep workers, each with one thread or more.
        prep_threads: threads of all of them together.
        fetch_threads: threads that may read storage at once.
        most_prep: how many prep threads the node was given; it never has more.
        most: how many threads of both kinds together it was given.
        demand_per_s: samples/s that this node would have to prepare for no trial to wait; 0 without trials.
        batch_samples: samples of a minibatch that are prepared here, on average.
        prep_per_s: samples/s that its workers prepare while they prepare; 0 if not known.
        sample_bytes: bytes that are read from storage for a sample, on average.
        storage_bytes: bytes that were read from storage.
        storage_s: seconds in which any thread read.
        read_s: seconds in which threads read, summed over threads.
        others: where the other bytes of a minibatch come from, by threads of their own: the curves are flat.

    Raises:
        ConfigError: no worker, or fewer prep threads than workers, or more than given.
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

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= self.prep_threads <= self.most_prep < self.most:
            raise ConfigError(
                "1 <= workers <= prep_threads <= most_prep < most must hold, got "
                f"{self.workers}, {self.prep_threads}, {self.most_prep} and {self.most}"
            )

    @property
    def is_filled(self) -> bool:
        """Whether fetch had enough to do for all of its threads."""
        return self.read_s >= FILLED * self.fetch_threads * self.storage_s

    @property
    def step_s(self) -> float:
        """Seconds between two minibatches that training takes."""
        return self.batch_samples / self.demand_per_s if self.demand_per_s else math.inf


class Tuned(Struct, frozen=True):
    """Threads that a node should have from now on, and one sentence that says why."""

    prep_threads: int
    fetch_threads: int
    reason: str


class ObservedCurve:
    """What is known of a curve while it is measured: the rates of the counts that were tried.

    Attributes:
        points: count -> its rate.
    """

    def __init__(self) -> None:
        self.points: dict[int, float] = {}
        self._learned_s: dict[int, float] = {}  # count -> when; of the same counts

    def learn(self, count: int, rate_per_s: float, now: float) -> None:
        """Take in a measured rate."""
        # A rate of long ago is of another load: it is replaced, not averaged with.
        is_recent = now - self._learned_s.get(count, -math.inf) <= RECENT_S
        old = self.points[count] if is_recent else rate_per_s
        self.points[count] = old + FRESH * (rate_per_s - old)
        self._learned_s[count] = now

    def forget_before(self, time_s: float) -> None:
        """Drop what was last measured before ``time_s``."""
        for count in [count for count, learned_s in self._learned_s.items() if learned_s < time_s]:
            del self.points[count], self._learned_s[count]

    def curve(self, *, most: int | None = None) -> ThroughputCurve:
        """Draw straight lines through what was measured; beyond, the last line goes on.

        So a single point is taken for the beginning of a proportional curve, and more threads are tried; two equal ones
        are a reason not to. With ``most``, threads beyond that are taken to add nothing.
        """
        knots = tuple(sorted((float(count), rate) for count, rate in self.points.items()))
        (x0, y0), (x1, y1) = ((0.0, 0.0), *knots)[-2:]
        curve = ThroughputCurve(knots, (y1 - y0) / (x1 - x0))
        return curve if most is None else curve.flat_beyond(float(most))


def _beyond_one_each(prep: ThroughputCurve, *, workers: int, most: int) -> ThroughputCurve:
    """Return the rates of prep threads counted from one less than there are workers, as each worker keeps one.

    A count of 1 stands for as many threads as workers; beyond ``most`` threads, which are never used, it is flat.
    """
    more = ((count - workers + 1, rate) for count, rate in prep.flat_beyond(most).knots if count > workers)
    return ThroughputCurve(((1.0, prep.rate(workers)), *more), 0.0)


class ThreadTuner:
    """Decides for one node, one look after the other: when threads move, and how many read storage."""

    def __init__(self, settings: Threads) -> None:
        self._settings = settings
        self._prep, self._fetch = ObservedCurve(), ObservedCurve()
        self._proposed: tuple[int, int] | None = None  # the direction of the proposal that lasts
        self._last: tuple[int, int] = (0, 0)  # the direction of the last change
        self._since = -math.inf
        self._reversals = 0

    def observe(self, load: NodeLoad, now: float) -> Tuned | None:
        """Return the change that is due at ``now`` seconds, if any.

        What ``load`` says must have been measured after the last change.
        """
        # A node that has more threads than it was given (a worker came) gives some back at once: no measurement may
        # delay what was promised to others.
        if load.prep_threads + load.fetch_threads > load.most:
            fetching = max(1, load.most - load.prep_threads)
            reason = f"prep has {load.prep_threads}, and the node was given {load.most}"
            return Tuned(load.prep_threads, fetching, _change(load, load.prep_threads, fetching, reason))
        self._learn(load, now)
        proposal = self._propose(load)
        direction = _direction(load, proposal) if proposal is not None else None
        # Only the direction has to last, not the number: numbers follow the scatter of the rates.
        if direction != self._proposed:
            self._proposed, self._since = direction, now
        if proposal is None or direction is None or now - self._since < self._hold_s(direction):
            return None
        self._reversals += _is_reversal(direction, self._last)
        self._last, self._proposed = direction, None
        return proposal

    def _hold_s(self, direction: tuple[int, int]) -> float:
        """Return how long a proposal has to last: twice as long for each time that a change was taken back."""
        reversals = self._reversals if _is_reversal(direction, self._last) else 0
        return min(MOST_HOLD_S, self._settings.hold_s * 2.0**reversals)

    def _learn(self, load: NodeLoad, now: float) -> None:
        if load.prep_per_s > 0:
            self._prep.learn(load.prep_threads, load.prep_per_s, now)
        if load.storage_s >= BUSY_S and load.storage_bytes > 0:
            # Threads that had nothing to do say nothing of the curve: the rate belongs to those that were busy.
            busy = load.fetch_threads if load.is_filled else max(1, round(load.read_s / load.storage_s))
            self._fetch.learn(busy, load.storage_bytes / load.storage_s, now)
        # Loads change, so knowledge ages. But what is forgotten will be tried again: the longer, the more it swung.
        for curve in (self._prep, self._fetch):
            curve.forget_before(now - FORGET_S * 2.0**self._reversals)

    def _propose(self, load: NodeLoad) -> Tuned | None:
        """Return the change that would be right if nothing had to be waited for."""
        is_known = self._prep.points and (self._fetch.points or not load.sample_bytes)
        if not is_known or not load.demand_per_s or not load.batch_samples:
            return None
        view = _View(load, self._prep.curve(), self._fetch)
        return view.more_for_prep_or_fetch() or view.fewer_for_fetch()


@dataclass(frozen=True)
class _View:
    """One look at a node, with what is known of its rates."""

    load: NodeLoad
    prep: ThroughputCurve
    measured: ObservedCurve

    @cached_property
    def storage(self) -> ThroughputCurve:
        """Bytes/s against fetch threads; threads that found nothing to do would not be faster in a crowd."""
        if not self.measured.points:  # nothing is read from storage, so any curve does
            return ThroughputCurve.linear(1.0)
        return self.measured.curve(most=None if self.load.is_filled else self.load.fetch_threads)

    @cached_property
    def _prep_s(self) -> Floats:
        with np.errstate(divide="ignore"):
            seconds: Floats = self.load.batch_samples / self.prep.rates(np.arange(self.load.most + 1.0))
        return seconds

    @cached_property
    def _fetch_s(self) -> Floats:
        storage = TierBytes(self.load.batch_samples * self.load.sample_bytes, self.storage)
        seconds: Floats = storage.seconds(np.arange(self.load.most + 1.0))
        return seconds

    def prep_s(self, threads: int) -> float:
        """Return the seconds in which ``threads`` threads prepare a minibatch."""
        return float(self._prep_s[threads])

    def fetch_s(self, threads: int) -> float:
        """Return the seconds in which ``threads`` threads read a minibatch's bytes from storage."""
        return float(self._fetch_s[threads])

    def more_for_prep_or_fetch(self) -> Tuned | None:
        """Return Lobster's split, if it gains enough over what is."""
        load, storage_bytes = self.load, self.load.batch_samples * self.load.sample_bytes
        # Lobster keeps one thread for prep, a node one for each worker: the others are none of its business.
        split = split_threads(
            load.most - load.workers + 1,
            prep=_beyond_one_each(self.prep, workers=load.workers, most=load.most_prep),
            samples=load.batch_samples,
            tiers=[TierBytes(storage_bytes, self.storage), *load.others],
            step_s=load.step_s,
        )
        preparing = split.prep + load.workers - 1
        fetching = self._enough(preparing, load.most - preparing)
        if preparing < load.prep_threads and fetching <= load.most - load.prep_threads:
            preparing = load.prep_threads  # fetch does not want them, and idle threads in prep cost nothing
        if (preparing, fetching) == (load.prep_threads, load.fetch_threads):
            return None
        if not self._both_s(preparing, fetching) < (1 - GAIN) * self._both_s(load.prep_threads, load.fetch_threads):
            return None
        return Tuned(preparing, fetching, _change(load, preparing, fetching, self._why(preparing, fetching)))

    def _both_s(self, preparing: int, fetching: int) -> float:
        """Return the seconds of a minibatch, one step after the other as Lobster counts, other tiers included."""
        others_s = sum(load_time_s([other], threads=[1]) for other in self.load.others)
        return self.prep_s(preparing) + self.fetch_s(fetching) + others_s

    def _enough(self, preparing: int, most: int) -> int:
        """Return how many fetch threads are worth while beside ``preparing`` prep threads, at most ``most``."""
        load = self.load
        pace_s = max(load.step_s, self.prep_s(preparing))
        here = min(load.fetch_threads, most)
        if self.fetch_s(here) <= NEAR * pace_s:
            return here
        # At most twice as many: beyond the counts that were tried the curve is a hope, and storage may be shared.
        reach = range(here, min(2 * load.fetch_threads, most) + 1)
        times = [self.fetch_s(count) for count in reach]
        ample = (count for count, time_s in zip(reach, times, strict=True) if time_s <= AMPLE * pace_s)
        best = reach[times.index(min(times))]
        found = min(next(ample, best), best)
        return found if self.fetch_s(found) <= (1 - GAIN) * self.fetch_s(here) else here

    def fewer_for_fetch(self) -> Tuned | None:
        """Take back fetch threads that were measured to bring nothing."""
        load, points = self.load, self.measured.points
        if load.fetch_threads not in points:
            return None
        # Within what was tried the lines are measured; only there "no faster" is known, not hoped.
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
        fetch_s, prep_s = self.fetch_s(load.fetch_threads), self.prep_s(load.prep_threads)
        return (
            f"a minibatch takes {units.seconds(fetch_s)} to fetch, {units.seconds(prep_s)} to prepare, "
            f"{units.seconds(load.step_s)} of training; "
            f"fetch may take {units.seconds(self.fetch_s(fetching))} and prep {units.seconds(self.prep_s(preparing))}"
        )


def _direction(load: NodeLoad, proposal: Tuned) -> tuple[int, int]:
    """Return whether prep and fetch get more threads (1), fewer (-1), or as many (0)."""
    return _sign(proposal.prep_threads - load.prep_threads), _sign(proposal.fetch_threads - load.fetch_threads)


def _is_reversal(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return any(a * b < 0 for a, b in zip(one, other, strict=True))


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


def _change(load: NodeLoad, preparing: int, fetching: int, reason: str) -> str:
    """Write a sentence: what changes, and why."""
    parts = []
    if fetching != load.fetch_threads:
        parts.append(f"{fetching} instead of {load.fetch_threads} threads read storage")
    if preparing != load.prep_threads:
        parts.append(f"{preparing} instead of {load.prep_threads} threads prepare")
    return f"{' and '.join(parts)}: {reason}"
