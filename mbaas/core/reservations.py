"""How long a reservation is held: as long as those took lately for whom reservations were held.

A trial that was announced, or that takes the place of one that ended, shares the epoch of the others if they wait for
it. How long that takes depends on the cluster: a process may need two seconds, a machine with a GPU minutes.

One that begins at once, in the middle of their epoch, shares it whenever it comes: nobody waits for it. Its place only
keeps what is staged there, as long as nobody else needs the room. What a trial will do is known when it joins; those
that are announced after it are expected to do the same.
"""

from __future__ import annotations

from collections import deque

REMEMBERED = 8
"""How many of the newest arrivals count."""

MARGIN = 2.0
"""A reservation is held for this many times the longest of them: arrivals differ, and on a busy machine by much."""

LEAST_S = 5.0
"""A reservation is held for at least this long, however soon others came."""

MOST_GIVEN_UP = 1000
"""How many reservations that were given up are remembered, to learn from those who come for them after all."""


class ReservationTime:
    """Measures arrivals, and says how long reservations are held because of them.

    Args:
        first_s: how long one is held before any arrival was measured.

    Attributes:
        at_once: whether the last trial that was announced began at once.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._arrivals: deque[float] = deque(maxlen=REMEMBERED)
        self._given_up: dict[str, float] = {}
        self.at_once = False

    def came(self, seconds: float, at_once: bool | None = None) -> None:
        """Note that a trial came ``seconds`` after a reservation was made for it.

        Args:
            seconds: how long it took to come.
            at_once: whether it began at once, in the middle of an epoch if need be; None if it went on where it had
                been, which says nothing of others.
        """
        self._arrivals.append(seconds)
        self.at_once = self.at_once if at_once is None else at_once

    def give_up(self, name: str, since: float) -> None:
        """Note that nobody came for a reservation that was made at ``since``."""
        self._given_up[name] = since
        if len(self._given_up) > MOST_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def joined(self, name: str, now: float, at_once: bool | None = None) -> None:
        """Note that a consumer joined without a reservation: it may be one for which none was held, or not any more."""
        since = self._given_up.pop(name, None)
        if since is not None:
            self.came(now - since, at_once)

    @property
    def has_given_up(self) -> bool:
        """Whether there are reservations that were given up, and for which nobody came yet."""
        return bool(self._given_up)

    def came_late(self, now: float) -> None:
        """Note that a trial came for which nothing is held, whatever its name is.

        If reservations for anybody were given up, it is taken to come for the newest of them.
        """
        if self._given_up:
            _, since = self._given_up.popitem()
            self.came(now - since)

    def forget_given_up(self) -> None:
        """Forget what was given up: nobody will come for it."""
        self._given_up.clear()

    def hold_s(self, epoch_s: float) -> float:
        """Return how long a reservation is held from now on; 0 if it is not worth holding one.

        Args:
            epoch_s: how long prep takes for an epoch, 0 if that is not known. It is what a reservation saves.
        """
        if not self._arrivals:
            return self._first_s
        wanted_s = max(min(LEAST_S, self._first_s), MARGIN * max(self._arrivals))
        if self.at_once:  # then nobody waits for it
            return wanted_s
        # The others stand still meanwhile. Up to what the user allows that is their price for sharing; beyond it they
        # pay it only if it is less than what is saved. A shorter time would be waited in vain.
        return wanted_s if wanted_s <= max(self._first_s, epoch_s) else 0.0
