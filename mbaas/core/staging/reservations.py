"""Length of reservations, based on how long recent trials took to join.

An announced trial, or one that replaces a finished trial, shares the epoch of the others if they wait for it. The time
to join depends on the cluster: a process may need two seconds, a node with a GPU minutes.

A trial that starts immediately, in the middle of an epoch, can share it at any time, so no consumer waits for it. Its
reservation only keeps staged blocks while there is room. The kind of start is known only at the join; later trials are
expected to do the same as the last one.
"""

from __future__ import annotations

from collections import deque

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
