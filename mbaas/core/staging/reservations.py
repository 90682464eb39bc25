"""Reservations for trials that are expected, held as long as recent trials took to join.

An announced trial, or one that replaces a finished trial, shares the epoch of the others if they wait for it. The time
to join depends on the cluster: a process may need two seconds, a node with a GPU minutes.

A trial that starts immediately, in the middle of an epoch, can share it at any time, so no consumer waits for it. Its
reservation only keeps staged blocks while there is room. The kind of start is known only at the join; later trials are
expected to do the same as the last one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from mbaas.core.staging.beginnings import Beginnings
from mbaas.core.staging.consumers import Cohort, Consumer, ConsumerTable
from mbaas.core.staging.transitions import ConsumerState

REMEMBERED = 8
"""Number of recent arrivals that count."""

MARGIN = 2.0
"""A reservation is held for this multiple of the longest arrival; arrival times vary, on a busy node by much."""

LEAST_S = 5.0
"""Minimum length of a reservation, however fast others arrived."""

MOST_GIVEN_UP = 1000
"""Number of expired reservations that are remembered, to learn from trials that arrive late."""


class ReservationTime:
    """Measures arrival times, and derives the length of reservations.

    Args:
        first_s: length of a reservation before the first measurement.

    Attributes:
        at_once: whether the last announced trial started immediately.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._arrivals: deque[float] = deque(maxlen=REMEMBERED)
        self._given_up: dict[str, float] = {}
        self.at_once = False

    def came(self, seconds: float, at_once: bool | None = None) -> None:
        """Record that a trial joined ``seconds`` after its reservation was made.

        ``at_once`` is True if it started immediately, possibly in the middle of an epoch, and None if it resumed at its
        old position. A resumed trial predicts nothing for others.
        """
        self._arrivals.append(seconds)
        self.at_once = self.at_once if at_once is None else at_once

    def give_up(self, name: str, since: float) -> None:
        """Record that a reservation made at ``since`` expired."""
        self._given_up[name] = since
        if len(self._given_up) > MOST_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def joined(self, name: str, now: float, at_once: bool | None = None) -> None:
        """Record that a consumer joined without a reservation: it had none, or its reservation expired."""
        since = self._given_up.pop(name, None)
        if since is not None:
            self.came(now - since, at_once)

    @property
    def has_given_up(self) -> bool:
        """True if there are expired reservations without a late arrival."""
        return bool(self._given_up)

    def came_late(self, now: float) -> None:
        """Record the announcement of a trial without a reservation; it is counted for the newest expired one."""
        if self._given_up:
            _, since = self._given_up.popitem()
            self.came(now - since)

    def forget_given_up(self) -> None:
        """Forget the expired reservations: no trial will come for them."""
        self._given_up.clear()

    def hold_s(self, epoch_s: float) -> float:
        """Return the length of a new reservation in seconds; 0 if it is not worthwhile.

        ``epoch_s`` is the time of prep for an epoch, which a reservation saves; 0 if unknown.
        """
        if not self._arrivals:
            return self._first_s
        wanted_s = max(min(LEAST_S, self._first_s), MARGIN * max(self._arrivals))
        if self.at_once:  # no consumer waits for it
            return wanted_s
        # The others stall meanwhile. Up to the user's limit, that is the price of sharing. Beyond it, the wait must be
        # shorter than the saved prep time. A shorter reservation would expire before the trial joins.
        return wanted_s if wanted_s <= max(self._first_s, epoch_s) else 0.0


class Arrivals:
    """The reservations of a feed: for whom, where, and how long.

    An unassigned reservation is for the trial that is announced next: the successor of one that ended, or one that
    starts together with others. It becomes that trial's own reservation, which ends when the trial joins.

    Args:
        consumers, beginnings: of the feed; reservations are entries among the consumers.
        first_s: length of a reservation before the first arrival. A trial that has its resources gets at least this.
    """

    def __init__(self, consumers: ConsumerTable, beginnings: Beginnings, first_s: float) -> None:
        self._consumers, self._beginnings, self._first_s = consumers, beginnings, first_s
        self._numbers = itertools.count()  # of unassigned reservations
        self._starts = ReservationTime(first_s)  # from a trial's announcement until it joins
        # from an unassigned reservation until a trial is announced
        self._successions, self._cohort_mates = ReservationTime(first_s), ReservationTime(first_s)

    # ---- events ----

    def announce(self, trial: str, others: int, now: float, *, fresh: int, epoch_s: float) -> None:
        """Reserve for a trial, and for ``others`` that start with it and were not announced yet.

        ``fresh`` is where they start without other consumers; ``epoch_s`` is as in `ReservationTime.hold_s`.
        """
        known = self._consumers.of_trial(trial)
        if not known:
            self._assign(trial, now, fresh, epoch_s)
        elif not any(consumer.is_announced for consumer in known):  # otherwise the call is repeated, and has no effect
            # It joined first, as class trainables of Tune do. The reservation that another trial left was for it.
            known[0].is_announced = True
            if (free := next(iter(self.unassigned()), None)) is not None:
                self._come_for(free, trial, now)
        # Processes of trials that start together come up one by one. Without reservations for the trials not yet
        # announced, the first trial would finish its epochs before the last one is up.
        lacking = range(others - len(self.unassigned()))
        hold_s = self._cohort_mate_s(trial, epoch_s) if lacking else 0.0
        for number in lacking:
            if hold_s:
                cohort, cursor = self._beginnings.shared_start(fresh)
                reserved = self.reserve_unassigned(cohort, cursor, now, now + hold_s, at_once=False)
                reserved.expects_cohort_mate = True
            else:
                self._cohort_mates.give_up(f"{trial}, other {number}", now)

    def join(self, trial: str, now: float, *, at_once: bool | None) -> Consumer | None:
        """Record that a trial joins; ``at_once`` is as in `ReservationTime.came`. Return its reservation, or None.

        The trial's first rank takes it for all ranks.
        """
        reserved = self._consumers.by_name.get(trial)
        if reserved is None or reserved.state is not ConsumerState.RESERVED:
            self._starts.joined(trial, now, at_once)
            return None
        self._starts.came(now - reserved.since, at_once)
        return reserved

    def leave(self, leaving: Sequence[Consumer], successors: int, now: float, *, epoch_s: float) -> None:
        """Reserve for the successor of a leaving trial, unless all ``successors`` have reservations already."""
        if not leaving or successors <= len(self.unassigned()):
            return
        last = min(leaving, key=lambda consumer: consumer.done)
        hold_s = self._successions.hold_s(epoch_s) if self._starts.hold_s(epoch_s) else 0.0
        # A successor that starts immediately starts where the active consumers are, if there are any.
        in_vain = self._starts.at_once and not all(c.rests or c in leaving for c in self._consumers.by_name.values())
        if hold_s and not in_vain:
            self.reserve_for_successor(last, now, now + hold_s, at_once=self._starts.at_once)
        else:
            self._successions.give_up(last.name, now)

    def expire(self, reserved: Consumer) -> None:
        """Record that no trial came for a reservation in time."""
        self._times_of(reserved).give_up(reserved.name, reserved.since)

    def expect_none(self) -> None:
        """Record that there are no consumers: the next trial to join is not one of the expected ones."""
        for times in (self._successions, self._cohort_mates):
            times.forget_given_up()

    def _assign(self, trial: str, now: float, fresh: int, epoch_s: float) -> None:
        """Take over an unassigned reservation, or create a new one."""
        free = next(iter(self.unassigned()), None)
        # A trial that starts immediately needs no reservation unless another left staged blocks for it.
        hold_s = 0.0 if free is None and self._starts.at_once else self._starts.hold_s(epoch_s)
        if free is not None:
            if free.expects_cohort_mate:
                hold_s = self._as_allowed(hold_s)
        else:
            (self._cohort_mates if self._cohort_mates.has_given_up else self._successions).came_late(now)
        if not hold_s:
            self._starts.give_up(trial, now)
        elif free is not None:  # prefer the position that a finished trial left
            cohort = self._consumers.cohorts[free.cohort]
            self.reserve(trial, cohort, free.cursor, now, now + hold_s, at_once=free.is_passive)
        else:
            cohort, cursor = self._beginnings.shared_start(fresh)
            self.reserve(trial, cohort, cursor, now, now + hold_s, at_once=False)
        if free is not None:
            self._come_for(free, trial, now)

    def _come_for(self, free: Consumer, trial: str, now: float) -> None:
        """End an unassigned reservation, because its trial was announced."""
        self._times_of(free).came(now - free.since)
        self._consumers.exit(free, f"{trial} comes for it")

    def _cohort_mate_s(self, trial: str, epoch_s: float) -> float:
        # Trials that start immediately start where the active consumers are, if there are any.
        here = [c for c in self._consumers.by_name.values() if c.trial != trial and not c.rests]
        if (self._starts.at_once and here) or not self._starts.hold_s(epoch_s):
            return 0.0
        return self._as_allowed(self._cohort_mates.hold_s(epoch_s))

    def _as_allowed(self, hold_s: float) -> float:
        # The trial has resources to run, so it will join. Waiting for less than the user allows would waste the wait.
        return max(hold_s, self._first_s) if hold_s else 0.0

    def _times_of(self, reserved: Consumer) -> ReservationTime:
        if not reserved.is_unassigned:
            return self._starts
        return self._cohort_mates if reserved.expects_cohort_mate else self._successions

    # ---- entries ----

    def reserve(
        self, name: str, cohort: Cohort, cursor: int, now: float, deadline: float, *, at_once: bool
    ) -> Consumer:
        """Create a reservation: the trial starts at ``cursor`` if it joins before the deadline.

        With ``at_once`` the trial starts immediately, wherever the others are when it joins. Others then do not wait,
        and blocks from ``cursor`` on are kept only while there is room.
        """
        # Sessions of consumers start above 0, so no client call can match a reservation.
        reserved = self._consumers.enter(name, 0, cohort, cursor, deadline, ConsumerState.RESERVED)
        reserved.since, reserved.is_announced = now, True
        if at_once:
            reserved.is_passive = True
            cohort.active.remove(reserved)
        return reserved

    def reserve_for_successor(self, consumer: Consumer, now: float, deadline: float, *, at_once: bool) -> None:
        """Reserve for a leaving consumer's successor: at that consumer's end if ``at_once``, otherwise at the next
        epoch.
        """
        cohort = self._consumers.cohorts[consumer.cohort]
        start = consumer.done if at_once else cohort.next_boundary(consumer.done)
        self.reserve_unassigned(cohort, start, now, deadline, at_once=at_once)

    def reserve_unassigned(
        self, cohort: Cohort, cursor: int, now: float, deadline: float, *, at_once: bool
    ) -> Consumer:
        """Create an unassigned reservation; arguments as for `reserve`."""
        # Consumers choose their names freely, so the name may be taken.
        names = (f"reservation {number}" for number in self._numbers)
        name = next(name for name in names if name not in self._consumers.by_name)
        reserved = self.reserve(name, cohort, cursor, now, deadline, at_once=at_once)
        reserved.is_unassigned = True
        return reserved

    def unassigned(self) -> list[Consumer]:
        """Return the unassigned reservations, lowest cursor first: that one blocks most."""
        free = [consumer for consumer in self._consumers.by_name.values() if consumer.is_unassigned]
        return sorted(free, key=lambda consumer: consumer.cursor)
