"""Number of prep workers of a feed over time, and the machines that are released.

`Scaler` is a state machine with hysteresis. Workers are added when trials stall on prep and the model predicts that
more would help; idle workers are retired. Each signal has two thresholds and must hold for some time, and every change
is followed by a pause. Workers that idle because demand fell are retired late, because the demand may return. Workers
that idle because each became faster (more samples are cached decoded) are retired as soon as the new rate is certain.

When the last worker of a machine is released, its cache goes too, because samples have their homes where they are
prepared. A sample that moves crosses the network once; a sample that fits nowhere is decoded or read again in every
epoch. So `to_let_go` releases a machine only if the others have room for its whole cache, which moves there first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low

from msgspec import Struct

from mbaas.base import units
from mbaas.model.curves import ROUNDING, ThroughputCurve, whole
from mbaas.model.loading import PrepCurve
from mbaas.settings import Scaling

SHOWN_STALL = 0.005
"""Smallest stall on other trials that is reported: most feeds have none."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Measurements of a feed over the last seconds.

    Attributes:
        prep_stall, fetch_stall, peer_stall: shares of the trials' time, in [0, 1], that they waited for data while prep
            was computing, while prep waited for bytes, and while prep was idle because trials wait for each other.
        demand_per_s: samples/s of prep at which no trial would wait; 0 without trials, or if everything is ready.
        worker_per_s: samples/s of one worker from memory; 0 if unknown.
        fetch_per_s: samples/s of caches, storage and network; inf if unknown, or if they are not the limit.
        prep: samples/s of prep against workers; None while only ``worker_per_s`` is known.
        has_room: whether a further worker would have room on the machines in use.
        workers, pending: workers that are up, and that were requested and are not up yet.
        idle: share of time, in [0, 1], that workers that are up had nothing to prepare.
        reserved, most: bounds on the number of workers.
    """

    prep_stall: float
    fetch_stall: float
    demand_per_s: float
    worker_per_s: float
    peer_stall: float = 0.0
    fetch_per_s: float = math.inf
    prep: PrepCurve | None = None
    has_room: bool = True
    workers: int
    pending: int = 0
    idle: float
    reserved: int
    most: int

    @cached_property
    def needed(self) -> int | None:
        """Workers beyond which training or fetch is the bottleneck, within the bounds; None without a rate."""
        if self.useful_per_s and not self.worker_per_s:
            return None
        return bounded_workers(self.useful_per_s, self.prep_curve, reserved=self.reserved, most=self.most)

    @property
    def measured(self) -> PrepCurve:
        """The curve of prep, or the line through the rate of one worker."""
        return self.prep if self.prep is not None else PrepCurve.of_one(self.worker_per_s)

    @property
    def prep_curve(self) -> ThroughputCurve:
        """Samples/s of prep against workers; those without room on the machines in use start on others."""
        curve = self.measured.curve
        return curve if self.has_room or not self.workers else curve.elsewhere_beyond(self.workers)

    @property
    def loading(self) -> ThroughputCurve:
        """Samples/s of loading against workers: the lower of prep and fetch."""
        return self.prep_curve.capped(self.fetch_per_s)

    def gain_per_s(self, before: int, after: int) -> float:
        """Return the samples/s that a change of the workers adds, at the demand of the trials."""
        rates = [min(self.demand_per_s, self.loading.rate(count)) for count in (before, after)]
        return rates[1] - rates[0]

    @property
    def useful_per_s(self) -> float:
        """Useful samples/s of prep: workers beyond the fetch rate would only wait for bytes."""
        return min(self.demand_per_s, self.fetch_per_s)

    def spare(self, wanted: int) -> float:
        """Return the share of ``wanted`` workers that had nothing to prepare or is not up yet."""
        return max(0.0, 1 - self.workers * (1 - self.idle) / wanted) if wanted else 0.0

    @property
    def limit(self) -> str:
        peak_per_s = self.prep_curve.peak().rate_per_s
        if peak_per_s < self.useful_per_s * (1 - ROUNDING):
            rate = f"prep, with a peak of {units.number(peak_per_s)} samples/s,"
        elif self.fetch_per_s < self.demand_per_s:
            rate = f"fetch, at {units.number(self.fetch_per_s)} samples/s,"
        else:
            rate = f"training, at {units.number(self.demand_per_s)} samples/s,"
        return f"{rate} within [{self.reserved}, {self.most}]"

    @property
    def stalls(self) -> str:
        prep, fetch, peers = map(units.percent, (self.prep_stall, self.fetch_stall, self.peer_stall))
        on_peers = f", and wait {peers} for each other" if self.peer_stall >= SHOWN_STALL else ""
        return f"trials stall {prep} on prep and {fetch} on fetch{on_peers}"


def bounded_workers(useful_per_s: float, prep: ThroughputCurve, *, reserved: int, most: int) -> int:
    """Return the workers that prepare so many samples/s, or those at the peak of prep, within the bounds."""
    count = whole(prep.workers_for(useful_per_s)) if useful_per_s else 0
    return min(max(count, reserved), most)


@dataclass
class Hold:
    """A signal that turns on (at ``since``) when a share reaches ``high``, and off when it falls below ``low``."""

    high: float
    low: float
    since: float | None = field(default=None, init=False)

    def watch(self, share: float, now: float) -> None:
        # Between the thresholds the signal keeps its state, so that a share that scatters around one of them does not
        # toggle it.
        if share < self.low:
            self.since = None
        elif self.since is None and share >= self.high:
            self.since = now

    def held_s(self, now: float) -> float:
        return 0.0 if self.since is None else now - self.since


class Decision(Struct, frozen=True):
    """``workers`` wanted include pending ones."""

    workers: int
    change: int
    reason: str


class Scaler:
    """``wanted`` is the last decision, within the bounds of the last observation; None before the first one."""

    def __init__(self, settings: Scaling) -> None:
        self.wanted: int | None = None
        self._settings = settings
        self._stalled = Hold(high=settings.stall_high, low=settings.stall_low)
        self._idle = Hold(high=settings.idle_high, low=settings.idle_low)
        self._seen: deque[tuple[float, Observation]] = deque()  # of known need, as far back as the longest hold
        self._seen_since = float("inf")  # time of the first observation ever
        self._changed_s = float("-inf")

    def moved(self, wanted: int) -> None:
        """Set the number of wanted workers after a loan or return; no effect before the first observation."""
        if self.wanted is not None:
            self.wanted = wanted

    def observe(self, seen: Observation, now: float) -> Decision:
        """Decide how many workers are wanted at ``now`` (monotonic seconds). The bounds take effect immediately.

        The feed grows when trials have stalled on prep for ``grow_hold_s`` and the model needed more workers over that
        time (the lower median, so that a spike has no effect).

        It shrinks in two cases. After ``idle_hold_s`` with idle workers, it shrinks to the most that the model needed
        in that time. After ``cooldown_s``, it shrinks to the workers that would have met all demand of the last
        ``idle_hold_s`` at the lowest rate per worker since workers became idle.
        """
        if self.wanted is None:  # after a (re)start, adopt the workers that exist
            self.wanted = seen.workers + seen.pending
        self._watch(seen, now)
        # Bounds are promises to users, not measurements: no hold and no pause.
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
        # More workers do not help trials that wait for bytes.
        on_prep = seen.prep_stall if seen.prep_stall >= seen.fetch_stall else 0.0
        self._stalled.watch(on_prep, now)
        # If a few workers hold up all others, workers idle while trials stall, and none should be retired.
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
            enough = f"{seen.limit} needs no more than {needed}{asked} ({seen.measured.basis})"
            return self._stay(f"{seen.stalls}, but {enough}")
        if wait := self._waiting(self._stalled, hold_s, now):
            return self._stay(f"{seen.stalls}; {needed} would help, {wait}")
        # A spike at the end of the hold must not add workers that the rest of it did not need.
        more = min(needed, median_low(_needed(self._within(hold_s, now))))
        if more <= self._current:
            return self._stay(
                f"{seen.stalls}; {needed} would help now, but {more} were enough most of the {units.seconds(hold_s)}"
            )
        lately = f", {more} most of that time" if more < needed else ""
        why = f"{seen.stalls} after {units.seconds(hold_s)}, and {seen.limit} needs {needed}{lately}"
        why += f" ({seen.measured.basis})"
        return self._change(more, now, why)

    def _shrink(self, seen: Observation, now: float) -> Decision:
        hold_s = self._settings.idle_hold_s
        # The maximum, not the median: otherwise a fluctuating load would lose its workers.
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
        hold_s = self._settings.idle_hold_s
        if now - self._seen_since < hold_s or not (slowest := self._slowest(now)):
            return None
        useful_per_s = max(each.useful_per_s for each in self._within(hold_s, now))
        # A line: with fewer workers each is at least as fast.
        line = ThroughputCurve.linear(slowest)
        return bounded_workers(useful_per_s, line, reserved=seen.reserved, most=seen.most)

    def _slowest(self, now: float) -> float:
        return min((each.worker_per_s for each in self._within(self._idle.held_s(now), now)), default=0.0)

    def _within(self, hold_s: float, now: float) -> list[Observation]:
        return [seen for time, seen in self._seen if time >= now - hold_s]

    def _waiting(self, hold: Hold, hold_s: float, now: float) -> str:
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
        self._stalled.since = self._idle.since = None  # measured with the old number of workers
        verb = "grow" if workers > before else "shrink"
        return Decision(workers, workers - before, f"{verb} from {before} to {workers}: {why}")


def _needed(seen: Sequence[Observation]) -> list[int]:
    return [needed for each in seen if (needed := each.needed) is not None]


SETTLED_S = 10.0
"""A cache that has not grown for this many seconds is taken to be complete."""

GROWTH = 0.01
"""Growth counts from this share of the cache's limit."""


class Machine(Struct, frozen=True, kw_only=True):
    """A machine with prep workers that stay there, at least one; ``own`` ones may be released.

    Its cache holds, or is going to hold, ``keeps_bytes``. If nothing is prepared there while another machine is
    available, it is not ``is_of_use``, and is released first.
    """

    node: str
    workers: int
    own: int
    keeps_bytes: float = 0.0
    room_bytes: float = 0.0
    is_of_use: bool = True


def to_let_go(machines: Sequence[Machine], count: int) -> list[str]:
    """Choose ``count`` workers to release, or fewer if more would lose samples; return the node of each, in order.

    Machines with the fewest workers are released whole while the rest has room for their caches. Further workers come
    from the machines with the most. The last machine, and each one that is not released, keeps a worker.
    """
    left = {machine.node: machine for machine in machines}
    chosen: list[str] = []
    moved_bytes = 0.0
    for machine in sorted(machines, key=lambda m: (m.is_of_use, m.workers, m.keeps_bytes, m.node)):
        room_bytes = sum(other.room_bytes for other in left.values()) - machine.room_bytes
        if len(left) > 1 and machine.own == machine.workers and moved_bytes + machine.keeps_bytes <= room_bytes:
            chosen += [machine.node] * machine.workers
            moved_bytes += machine.keeps_bytes
            del left[machine.node]
    here, own = ({node: getattr(machine, name) for node, machine in left.items()} for name in ("workers", "own"))
    while len(chosen) < count and (several := [node for node in left if here[node] > 1 and own[node]]):
        node = max(several, key=lambda node: (here[node], node))
        here[node], own[node] = here[node] - 1, own[node] - 1
        chosen.append(node)
    return chosen[:count]


class KeptBytes:
    """Cached bytes of machines, present and expected. A cache that is still growing is expected to reach its limit."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, float]] = {}  # node -> (cached bytes, limit)
        self._grew: dict[str, tuple[float, float]] = {}  # node -> (time of last growth, cached bytes then)

    def observe(self, kept: Mapping[str, tuple[float, float]], now: float) -> None:
        """Record (cached bytes, limit) of each machine; missing machines have none."""
        self._kept = dict(kept)
        self._grew = {node: grew for node, grew in self._grew.items() if node in kept}
        for node, (keeps, most) in kept.items():
            if node not in self._grew or abs(keeps - self._grew[node][1]) > GROWTH * most:
                self._grew[node] = now, keeps

    def of(self, node: str, now: float) -> tuple[float, float]:
        """Return a cache's present or expected bytes, and its remaining room."""
        if node not in self._kept:
            return 0.0, 0.0
        keeps, most = self._kept[node]
        if now - self._grew[node][0] < SETTLED_S:
            keeps = most
        return keeps, max(0.0, most - keeps)
