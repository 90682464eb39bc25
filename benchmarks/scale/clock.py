"""A small discrete-event simulator: a clock, threads that serve jobs, shared cores, and links."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Then = Callable[[], None]
"""Callback at the end of a job."""


LEAST_SHARE = 0.1
"""Least fraction of the cores that is left for the simulation."""


class Clock:
    """Runs events in the order of their times, and in planning order at equal times.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, then: Then) -> None:
        """Schedule an event."""
        heapq.heappush(self._planned, (self.now + delay_s, next(self._numbers), then))

    def run(self, done: Callable[[], bool]) -> None:
        """Run until ``done`` returns true or no event is scheduled."""
        while self._planned and not done():
            self.now, _, then = heapq.heappop(self._planned)
            then()


class Cores:
    """Cores that all threads of a machine share, in turns of ``slice_s`` seconds, as in an operating system.

    Args:
        clock: the clock of the simulation.
        cores: number of cores; None: unlimited.
        taken: mean number of cores used by programs outside the simulation.
        slice_s: the longest turn.
    """

    def __init__(self, clock: Clock, cores: int | None, *, taken: float = 0.0, slice_s: float = 0.004) -> None:
        self._clock, self._free, self._slice_s = clock, cores, slice_s
        self._waiting: deque[tuple[float, Then]] = deque()
        self._busy_s = 0.0
        self._cores = cores
        self._slowness = 1.0 if cores is None else cores / max(cores - taken, LEAST_SHARE * cores)

    def use(self, cpu_s: float, then: Then) -> None:
        """Use a core for ``cpu_s`` seconds."""
        if self._free is None:
            self._clock.after(cpu_s, then)
            return
        self._waiting.append((cpu_s * self._slowness, then))
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            rest_s, then = self._waiting.popleft()
            turn_s = min(rest_s, self._slice_s)
            self._clock.after(turn_s, lambda r=rest_s - turn_s, t=then, s=turn_s: self._over(s, r, t))  # type: ignore[misc]

    def _over(self, turn_s: float, rest_s: float, then: Then) -> None:
        assert self._free is not None
        self._busy_s += turn_s
        self._free += 1
        if rest_s > 0:
            self._waiting.append((rest_s, then))
        self._serve()
        if rest_s <= 0:
            then()

    def busy_s(self) -> float:
        """Return the seconds of finished turns, divided by the number of cores."""
        return self._busy_s / self._cores if self._cores else 0.0


class Thread:
    """Serves jobs in the order of their arrival, ``servers`` at a time.

    Args:
        clock: the clock of the simulation.
        cores: the cores that jobs use.
        servers: number of jobs served at a time.
    """

    def __init__(self, clock: Clock, cores: Cores, servers: int = 1) -> None:
        self._clock, self._cores, self._servers, self._free = clock, cores, servers, servers
        self._waiting: deque[tuple[float, float, Then]] = deque()
        self._busy_s, self._since = 0.0, 0.0

    def do(self, cpu_s: float, then: Then, *, idle_s: float = 0.0) -> None:
        """Queue a job that blocks the thread for ``idle_s`` without a core, and then uses a core for ``cpu_s``."""
        self._waiting.append((cpu_s, idle_s, then))
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            cpu_s, idle_s, then = self._waiting.popleft()
            self._account()
            self._free -= 1
            if idle_s:
                self._clock.after(idle_s, lambda c=cpu_s, t=then: self._cores.use(c, lambda: self._over(t)))  # type: ignore[misc]
            else:
                self._cores.use(cpu_s, lambda t=then: self._over(t))  # type: ignore[misc]

    def _over(self, then: Then) -> None:
        self._account()
        self._free += 1
        self._serve()
        then()

    def _account(self) -> None:
        self._busy_s += (self._servers - self._free) * (self._clock.now - self._since)
        self._since = self._clock.now

    def busy_s(self) -> float:
        """Return the seconds of service up to now, divided by the number of servers."""
        self._account()
        return self._busy_s / self._servers


class Links:
    """Links of equal speed, each of which carries one transfer at a time.

    Args:
        clock: the clock of the simulation.
        number: number of links.
        bytes_per_s: speed of each link; may be infinite.
    """

    def __init__(self, clock: Clock, number: int, bytes_per_s: float) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._free_at: NDArray[np.float64] = np.zeros(number)
        self._given_s: NDArray[np.float64] = np.zeros(number)

    def carry(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Queue a transfer on each link, float64[number] bytes; return their end times."""
        length_s = nbytes / self._bytes_per_s
        self._given_s += length_s
        self._free_at = np.maximum(self._free_at, self._clock.now) + length_s
        return self._free_at

    def carry_one(self, link: int, nbytes: float) -> float:
        """Queue a transfer on one link; return its end time."""
        length_s = nbytes / self._bytes_per_s
        self._given_s[link] += length_s
        self._free_at[link] = max(self._free_at[link], self._clock.now) + length_s
        return float(self._free_at[link])

    def busy_s(self) -> NDArray[np.float64]:
        """Return the busy seconds of each link so far: float64[number]."""
        # time of all queued transfers, less the part that is not finished
        return self._given_s - np.maximum(self._free_at - self._clock.now, 0.0)
