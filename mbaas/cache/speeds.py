"""Measures how fast bytes come from each place, while they come.

Nothing is read for the sake of measuring: rates of storage, of other nodes and of the disk tier are those of the reads
that are made anyway. Only memory, and a disk tier that was never read, are tried out beforehand (`measure`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

from mbaas.messages import FetchSpeeds

PlaceName = Literal["remote", "disk", "storage"]
"""The places that are measured while they are read, by their names in `FetchSpeeds`."""

ENOUGH_S = 0.05
"""Thread-seconds of reading after which a rate counts."""

FRESH = 0.5
"""Weight of a new rate against the older ones."""


@dataclass(frozen=True)
class Use:
    """Running sums of what came from one place.

    Attributes:
        nbytes: bytes that came.
        thread_s: seconds of all threads that waited for them, unfinished reads included.
        busy_s: seconds in which at least one thread waited.
    """

    nbytes: int = 0
    thread_s: float = 0.0
    busy_s: float = 0.0

    def since(self, before: Use) -> Use:
        """What came after another look at the same sums."""
        return Use(self.nbytes - before.nbytes, self.thread_s - before.thread_s, self.busy_s - before.busy_s)


class PlaceMeter:
    """Measures one place that bytes come from; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = 0
        self._thread_s = self._busy_s = 0.0  # up to _at
        self._using = 0  # threads, since _at
        self._at = 0.0

    def moved(self, nbytes: int) -> None:
        """Counts bytes that have come."""
        with self._lock:
            self._nbytes += nbytes

    @contextmanager
    def using(self) -> Iterator[None]:
        """Counts the time until the block ends as one thread's waiting for bytes from this place."""
        self._change(+1)
        try:
            yield
        finally:
            self._change(-1)

    def use(self) -> Use:
        """The sums up to now."""
        self._change(0)  # so that reads in progress count: a read that hangs must show in the rate
        with self._lock:
            return Use(self._nbytes, self._thread_s, self._busy_s)

    def _change(self, users: int) -> None:
        with self._lock:
            now = perf_counter()
            self._thread_s += self._using * (now - self._at)
            self._busy_s += (now - self._at) if self._using else 0.0
            self._using += users
            self._at = now


class Speedometer:
    """Turns running sums into speeds.

    Attributes:
        speeds: the newest.
    """

    def __init__(self) -> None:
        self.speeds = FetchSpeeds()
        self._counted: dict[PlaceName, Use] = {}  # the sums up to the last rate of each place

    def probed(self, *, local: float, disk: float | None) -> None:
        """Takes in what was tried out; the disk's own reads say more, if there were any."""
        known = self.speeds.disk if self.speeds.disk is not None else disk
        self.speeds = replace(self.speeds, local=local, disk=known)

    def look(self, place: PlaceName, sums: Use) -> None:
        """Takes in the sums of a place by now."""
        new = sums.since(self._counted.get(place, Use()))
        if new.thread_s < ENOUGH_S or not new.nbytes:
            return
        rate = new.nbytes / new.thread_s
        if place in self._counted:
            old = getattr(self.speeds, place)
            rate = old + FRESH * (rate - old)
        self._counted[place] = sums
        self.speeds = replace(self.speeds, **{place: rate})
