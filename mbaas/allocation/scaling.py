"""Decides how many prep workers the cluster should have: a state machine with hysteresis.

Trials that stall on prep ask for workers, a model says how many would help, and idle workers are retired. Signals have
two thresholds each and have to hold for a while, and after every change there is a pause, so that noise changes
nothing and a load that comes and goes is not chased.

Workers may be idle for two reasons. Trials ask for less than before: they may ask again, so that has to hold for long.
Or each worker has become faster, because more and more samples are kept decoded: what is kept stays, so workers are
retired as soon as that rate is sure, if it would have been enough for all that trials asked for lately.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low

from msgspec import Struct

from mbaas import units
from mbaas.allocation.throughput import ROUNDING
from mbaas.errors import ConfigError, StateError
from mbaas.settings import Scaling

SHOWN_STALL = 0.005
"""Waiting of trials for each other is told from this share on: in most feeds there is none."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What was seen of a feed over the last seconds.

    Attributes:
        prep_stall, fetch_stall, peer_stall: shares of the trials' time, in [0, 1], that they waited for data while prep
            was computing, while prep waited for bytes, and while it was idle because trials wait for each other.
        demand_per_s: samples/s that prep would have to make for no trial to wait, from the trials' step times; 0
            without trials, or if all that they will ask for is ready.
        worker_per_s: samples/s that one worker prepares from memory; 0 when not known yet.
        fetch_per_s: samples/s that caches and storage can deliver; infinite when not known.
        workers, pending: workers that are up, and that were asked for and are not up yet.
        idle: share of the time, in [0, 1], of workers that are up in which they had nothing to prepare.
        reserved, most: bounds on the number of workers.

    Raises:
        ConfigError: a share outside [0, 1], a negative number, or reserved above most.
    """

    prep_stall: float
    fetch_stall: float
    demand_per_s: float
    worker_per_s: float
    peer_stall: float = 0.0
    fetch_per_s: float = math.inf
    workers: int
    pending: int = 0
    idle: float
    reserved: int
    most: int

    def __post_init__(self) -> None:
        for name in ("prep_stall", "fetch_stall", "peer_stall", "idle"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be a share in [0, 1], got {getattr(self, name)}")
        for name in ("demand_per_s", "worker_per_s", "fetch_per_s", "workers", "pending", "reserved"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.reserved > self.most:
            raise ConfigError(f"reserved must be at most the maximum of {self.most}, got {self.reserved}")
        if math.isinf(min(self.demand_per_s, self.fetch_per_s)) or math.isinf(self.worker_per_s):
            raise ConfigError(
                f"demand_per_s and worker_per_s must be finite, got {self.demand_per_s}, {self.worker_per_s}"
            )

    @cached_property
    def needed(self) -> int | None:
        """The number of workers beyond which another bottleneck, training or fetch, decides; within the bounds.

        It is None while the rate of a worker is not known.
        """
        if self.useful_per_s and not self.worker_per_s:
            return None
        return self.workers_for(self.useful_per_s, self.worker_per_s)

    @property
    def useful_per_s(self) -> float:
        """The samples/s that prep serves: more workers than fetch can feed would wait for bytes."""
        return min(self.demand_per_s, self.fetch_per_s)

    def workers_for(self, useful_per_s: float, worker_per_s: float) -> int:
        """Return the workers that make ``useful_per_s`` samples/s if each makes ``worker_per_s``; within the bounds."""
        count = math.ceil(useful_per_s / worker_per_s * (1 - ROUNDING)) if useful_per_s else 0
        return min(max(count, self.reserved), self.most)

    def spare(self, wanted: int) -> float:
        """Return the share of ``wanted`` workers that had nothing to prepare, or is not even up."""
        return max(0.0, 1 - self.workers * (1 - self.idle) / wanted) if wanted else 0.0

    @property
    def limit(self) -> str:
        """What `needed` follows from, for a sentence."""
        if self.fetch_per_s < self.demand_per_s:
            rate = f"fetch, at {units.number(self.fetch_per_s)} samples/s,"
        else:
            rate = f"training, at {units.number(self.demand_per_s)} samples/s,"
        return f"{rate} within [{self.reserved}, {self.most}]"

    @property
    def stalls(self) -> str:
        """The stalls, for a sentence."""
        prep, fetch, peers = map(units.percent, (self.prep_stall, self.fetch_stall, self.peer_stall))
        on_peers = f", and wait {peers} for each other" if self.peer_stall >= SHOWN_STALL else ""
        return f"trials stall {prep} on prep and {fetch} on fetch{on_peers}"


@dataclass
class Hold:
    """A signal that begins when a share reaches ``high`` and ends when it falls below ``low``.

    Attributes:
        since: when it began; None while it is off.
    """

    high: float
    low: float
    since: float | None = field(default=None, init=False)

    def watch(self, share: float, now: float) -> None:
        """Take in the share at ``now``."""
        # Between the two thresholds the signal stays as it is, so that a share that scatters around one of them does
        # not begin and end again and again.
        if share < self.low:
            self.since = None
        elif self.since is None and share >= self.high:
            self.since = now

    def held_s(self, now: float) -> float:
        """Return how long the signal has lasted; 0 while it is off."""
        return 0.0 if self.since is None else now - self.since


class Decision(Struct, frozen=True):
    """What should be, after an observation.

    Attributes:
        workers: wanted, those that are up and pending included.
        change: by how many more (fewer, if negative) than the decision before; mostly 0.
        reason: one sentence that says why.
    """

    workers: int
    change: int
    reason: str


class Scaler:
    """Decides how many workers are wanted, one observation after the other.

    Attributes:
        wanted: the last decision; None before the first observation, then within [reserved, most] of the last one.
    """

    def __init__(self, settings: Scaling) -> None:
        self.wanted: int | None = None
        self._settings = settings
        self._stalled = Hold(high=settings.stall_high, low=settings.stall_low)
        self._idle = Hold(high=settings.idle_high, low=settings.idle_low)
        self._seen: deque[tuple[float, Observation]] = deque()  # with a known need, as far back as a hold reaches
        self._seen_since = float("inf")  # the first of all of them
        self._last_s = self._changed_s = float("-inf")

    def moved(self, wanted: int) -> None:
        """Take over a new number of wanted workers, because some were lent, borrowed or given back.

        Nothing changes before the first observation.
        """
        if self.wanted is not None:
            self.wanted = wanted

    def observe(self, seen: Observation, now: float) -> Decision:
        """Take in an observation at ``now`` seconds, on any clock that does not go back; decide.

        What is reserved and the maximum are kept at once. More workers are asked for when trials have stalled on prep
        for ``grow_hold_s`` and the model needed more over that time (its lower median, so that a spike asks for
        nothing). Workers are retired when some have been idle for ``idle_hold_s``, down to the most that the model
        needed in that time; or for ``cooldown_s``, down to the workers that would have served all that was asked for in
        ``idle_hold_s`` at the lowest rate of a worker since they are idle.

        Raises:
            StateError: the clock went back.
        """
        if now < self._last_s:
            raise StateError(f"observations must come in order, got {now} s after {self._last_s} s")
        self._last_s = now
        if self.wanted is None:  # at first, and after a restart, what is there is what was wanted
            self.wanted = seen.workers + seen.pending
        self._watch(seen, now)
        # Bounds are promises to users, not measurements: they need no hold and no pause.
        bounded = min(max(self.wanted, seen.reserved), seen.most)
        if bounded != self.wanted:
            return self._change(bounded, now, f"{seen.reserved} are reserved and {seen.most} are the maximum")
        if seen.needed is None:
            return self._stay("the rate of a worker is not known yet")
        if self._stalled.since is not None:
            return self._grow(seen, now, seen.needed)
        if self._idle.since is not None:
            return self._shrink(seen, now)
        if seen.peer_stall >= max(self._settings.stall_high, seen.fetch_stall):
            return self._stay(f"trials wait for each other, not for prep: {seen.stalls}")
        if seen.fetch_stall >= self._settings.stall_high:
            return self._stay(f"trials wait for bytes, not for prep: {seen.stalls}")
        return self._stay(f"{seen.stalls}, workers are {units.percent(seen.spare(self._current))} idle")

    def _watch(self, seen: Observation, now: float) -> None:
        # trials that wait for bytes would wait as long with more workers
        on_prep = seen.prep_stall if seen.prep_stall >= seen.fetch_stall else 0.0
        self._stalled.watch(on_prep, now)
        # Workers idle while trials stall if a few of them hold all others up: that is no reason to retire any.
        self._idle.watch(seen.spare(self._current) if self._stalled.since is None else 0.0, now)
        if seen.needed is not None:
            self._seen.append((now, seen))
            self._seen_since = min(self._seen_since, now)
        horizon = now - max(self._settings.grow_hold_s, self._settings.idle_hold_s)
        while self._seen and self._seen[0][0] < horizon:
            self._seen.popleft()

    def _grow(self, seen: Observation, now: float, needed: int) -> Decision:
        hold_s = self._settings.grow_hold_s
        if needed <= self._current:
            asked = f", {seen.pending} are on their way" if seen.pending else ""
            return self._stay(f"{seen.stalls}, but {seen.limit} needs no more than {needed}{asked}")
        if wait := self._waiting(self._stalled, hold_s, now):
            return self._stay(f"{seen.stalls}; {needed} would help, {wait}")
        # a spike at the end of the hold must not buy workers that the rest of it did not need
        more = min(needed, median_low(_needed(self._within(hold_s, now))))
        if more <= self._current:
            return self._stay(
                f"{seen.stalls}; {needed} would help now, but {more} were enough most of the {units.seconds(hold_s)}"
            )
        lately = f", {more} most of that time" if more < needed else ""
        why = f"{seen.stalls} after {units.seconds(hold_s)}, and {seen.limit} needs {needed}{lately}"
        return self._change(more, now, why)

    def _shrink(self, seen: Observation, now: float) -> Decision:
        hold_s = self._settings.idle_hold_s
        # the most that was needed, not the median: a load that comes and goes would find its workers gone
        fewer, because = max(seen.reserved, *_needed(self._within(hold_s, now))), ""
        faster = self._needed_if_faster(seen, now)
        if faster is not None and faster < min(fewer, self._current):
            fewer, hold_s = faster, min(hold_s, self._settings.cooldown_s)
            because = f", because each prepares {units.number(self._slowest(now))} samples/s by now"
        idle = f"workers are {units.percent(seen.spare(self._current))} idle"
        if fewer >= self._current:
            return self._stay(f"{idle}, but {fewer} were needed or reserved lately")
        if wait := self._waiting(self._idle, hold_s, now):
            return self._stay(f"{idle}; {fewer} would do, {wait}")
        return self._change(
            fewer, now, f"{idle} after {units.seconds(hold_s)}{because}, and no more were needed or reserved"
        )

    def _needed_if_faster(self, seen: Observation, now: float) -> int | None:
        """Return how many workers would have been enough lately if each had been as fast as now; None: not known."""
        hold_s = self._settings.idle_hold_s
        if now - self._seen_since < hold_s or not (slowest := self._slowest(now)):
            return None
        return seen.workers_for(max(each.useful_per_s for each in self._within(hold_s, now)), slowest)

    def _slowest(self, now: float) -> float:
        """Return the lowest rate of a worker since workers are idle, in samples/s."""
        return min((each.worker_per_s for each in self._within(self._idle.held_s(now), now)), default=0.0)

    def _within(self, hold_s: float, now: float) -> list[Observation]:
        return [seen for time, seen in self._seen if time >= now - hold_s]

    def _waiting(self, hold: Hold, hold_s: float, now: float) -> str:
        """Say why a change has to wait; "" if it has not."""
        if hold.held_s(now) < hold_s:
            return f"if this holds for {units.seconds(hold_s)} (so far {units.seconds(hold.held_s(now))})"
        pause_s = self._changed_s + self._settings.cooldown_s - now
        return f"after a pause of {units.seconds(pause_s)} since the last change" if pause_s > 0 else ""

    @property
    def _current(self) -> int:
        assert self.wanted is not None
        return self.wanted

    def _stay(self, why: str) -> Decision:
        return Decision(self._current, 0, f"keep {self._current}: {why}")

    def _change(self, workers: int, now: float, why: str) -> Decision:
        before, self.wanted = self._current, workers
        self._changed_s = now
        self._stalled.since = self._idle.since = None  # what was seen was of the old number of workers
        verb = "grow" if workers > before else "shrink"
        return Decision(workers, workers - before, f"{verb} from {before} to {workers}: {why}")


def _needed(seen: Sequence[Observation]) -> list[int]:
    return [needed for each in seen if (needed := each.needed) is not None]
