"""Fair division of workers among the streams of several pipelines.

Workers are shared by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A stream's virtual time is the
worker-seconds spent on its blocks divided by its weight, the number of its trials. The stream with the smallest virtual
time is next. So a pipeline that takes ten times as long slows only the trials that use it, and idle workers always get
work. An idle stream does not accumulate credit.

Streams at the same position need the same samples, which are then read from storage once for all of them. So a stream
that is behind others pays less until it catches up, provided that it can keep pace with them at the full price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

UNKNOWN_S = 0.05
"""Assumed seconds per part, until a stream's first part has been prepared."""


LEAST_S = 0.01
"""Minimum seconds charged for a prepared part, because space and deliveries cost something, too. Without it, a stream
whose parts take no time would always be first.
"""


CATCH_UP_PRICE = 0.5
"""Share of the price that a stream pays while catching up: it gets twice its share of the workers."""

IN_REACH = 0.5
"""Largest distance to catch up, in epochs. Streams further apart do not share reads."""

SIMILAR = 1.25
"""Streams can stay together if their epoch times differ by at most this factor."""


class Progress(NamedTuple):
    """A part's position in epochs, and the sizes of its block and of the part, as shares of an epoch."""

    position: float
    block: float
    part: float


class Charge(NamedTuple):
    """A part's estimated seconds, and the share of them that its stream pays."""

    part_s: float
    price: float


class Turns:
    """Virtual times of streams; ``weight_of`` returns the weight of a stream, at least 1."""

    def __init__(self, weight_of: Callable[[int], int]) -> None:
        self._weight_of = weight_of
        self._times: dict[int, float] = {}
        self._part_s: dict[int, float] = {}  # estimated seconds of one part
        self._progress: dict[int, Progress] = {}  # of the furthest part of each stream
        self._now = 0.0  # virtual time of the part that was assigned last

    def of(self, streams: Iterable[int]) -> dict[int, float]:
        """Return the virtual time of each stream that needs a block now."""
        # A new or idle stream starts at the current virtual time.
        for stream in streams:
            self._times[stream] = max(self._times.get(stream, 0.0), self._now)
        return {stream: self._times[stream] for stream in streams}

    def assigned(self, stream: int, progress: Progress | None = None) -> Charge:
        """Charge a part that was just assigned, and return the charge for `ended`.

        ``progress`` is None for a part of a side epoch, which is prepared for one consumer alone.
        """
        part_s, price = self._part_s.get(stream, UNKNOWN_S), 1.0
        if progress is not None:
            self._progress[stream] = max(progress, self._progress.get(stream, progress))
            price = CATCH_UP_PRICE if self._catches_up(stream) else 1.0
        self._now = max(self._now, self._times.get(stream, 0.0))
        self._charge(stream, price * part_s)
        return Charge(part_s, price)

    def ended(self, stream: int, charge: Charge, took_s: float | None) -> None:
        """Correct a part's charge to the seconds that it took. Refund it for None: the part was not prepared."""
        if took_s is None:
            self._charge(stream, -charge.price * charge.part_s)
            return
        took_s = max(took_s, LEAST_S)
        self._charge(stream, charge.price * (took_s - charge.part_s))
        self._part_s[stream] = (self._part_s.get(stream, took_s) + took_s) / 2

    def _catches_up(self, stream: int) -> bool:
        own, speed = self._progress[stream], self._speed(stream)
        return any(
            own.block < other.position - own.position <= IN_REACH and self._speed(ahead) <= SIMILAR * speed
            for ahead, other in self._progress.items()
        )

    def _speed(self, stream: int) -> float:
        # Relative epochs per second, if workers are divided by weight.
        part_s = self._part_s.get(stream, UNKNOWN_S)
        return self._weight_of(stream) * self._progress[stream].part / part_s

    def forget(self, stream: int) -> None:
        """Forget a stream that has ended."""
        self._times.pop(stream, None)
        self._progress.pop(stream, None)
        self._part_s.pop(stream, None)

    def _charge(self, stream: int, seconds: float) -> None:
        self._times[stream] = self._times.get(stream, self._now) + seconds / self._weight_of(stream)
