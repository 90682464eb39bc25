"""A small discrete-event simulator: a clock, threads that serve jobs, cores that threads share, and links."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Then = Callable[[], None]
"""What happens when a job is done."""


LEAST_SHARE = 0.1
"""The share of the cores that is left, however many others take."""


class Clock:
    """Runs events in the order of their times; those of the same time in the order in which they were planned.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, then: Then) -> None:
        """Plan an event."""
        heapq.heappush(self._planned, (self.now + delay_s, next(self._numbers), then))

    def run(self, done: Callable[[], bool]) -> None:
        """Go on until ``done``, or until nothing is planned."""
        while self._planned and not done():
            self.now, _, then = heapq.heappop(self._planned)
            then()


class Cores:
    """Cores that all threads of a machine share, in turns of ``slice_s`` seconds, as an operating system does.

    Args:
        clock: the clock of the simulation.
        cores: how many there are; None if there are always enough.
        taken: how many of them, on average, programs use that are not simulated.
        slice_s: the longest turn.
    """

    def __init__(self, clock: Clock, cores: int | None, *, taken: float = 0.0, slice_s: float = 0.004) -> None:
        self._clock, self._free, self._slice_s = clock, cores, slice_s
        self._waiting: deque[tuple[float, Then]] = deque()
        self._busy_s = 0.0
        self._cores = cores
        self._slowness = 1.0 if cores is None else cores / max(cores - taken, LEAST_SHARE * cores)

    def use(self, cpu_s: float, then: Then) -> None:
        """Use a core for ``cpu_s``."""
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
        """Return the seconds of turns that are over, divided by the number of cores."""
        return self._busy_s / self._cores if self._cores else 0.0


class Thread:
    """Serves jobs one after the other, in the order in which they come; ``servers`` of them at a time.

    Args:
        clock: the clock of the simulation.
        cores: the cores that jobs use.
        servers: how many jobs may be served at a time.
    """

    def __init__(self, clock: Clock, cores: Cores, servers: int = 1) -> None:
        self._clock, self._cores, self._servers, self._free = clock, cores, servers, servers
        self._waiting: deque[tuple[float, float, Then]] = deque()
        self._busy_s, self._since = 0.0, 0.0

    def do(self, cpu_s: float, then: Then, *, idle_s: float = 0.0) -> None:
        """Queue a job that uses a core for ``cpu_s`` after it kept the thread for ``idle_s`` without one."""
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
    """Many links of one speed, each of which carries one transfer after the other.

    Args:
        clock: the clock of the simulation.
        number: how many links there are.
        bytes_per_s: the speed of each; infinite if there is no limit.
    """

    def __init__(self, clock: Clock, number: int, bytes_per_s: float) -> None:
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._free_at: NDArray[np.float64] = np.zeros(number)
        self._given_s: NDArray[np.float64] = np.zeros(number)

    def carry(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Give each link a transfer, float64[number] bytes; return when each ends."""
        length_s = nbytes / self._bytes_per_s
        self._given_s += length_s
        self._free_at = np.maximum(self._free_at, self._clock.now) + length_s
        return self._free_at

    def carry_one(self, link: int, nbytes: float) -> float:
        """Give one link a transfer; return when it ends."""
        length_s = nbytes / self._bytes_per_s
        self._given_s[link] += length_s
        self._free_at[link] = max(self._free_at[link], self._clock.now) + length_s
        return float(self._free_at[link])

    def busy_s(self) -> NDArray[np.float64]:
        """Return the seconds that each link was busy up to now: float64[number]."""
        # what was given to it, less what it has not carried yet
        return self._given_s - np.maximum(self._free_at - self._clock.now, 0.0)
