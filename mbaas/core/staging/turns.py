"""Fair division of workers among the streams of several pipelines.

Workers are shared by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): each stream has a virtual time, the
worker-seconds spent on its blocks divided by its weight, and the stream with the smallest one comes next. A stream's
weight is the number of its trials. So a pipeline that takes ten times as long slows only the trials that use it, and
idle workers always get work. A stream that needed nothing for a while saves up no credit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

UNKNOWN_S = 0.05
"""Assumed seconds of a stream's first part, until one was prepared."""


LEAST_S = 0.01
"""Least seconds charged for a part that was prepared. Room and deliveries cost something, too: without it, a stream
whose parts take no time would always come first.
"""


class Turns:
    """Virtual times of streams; ``weight_of`` returns the weight of a stream, at least 1."""

    def __init__(self, weight_of: Callable[[int], int]) -> None:
        self._weight_of = weight_of
        self._times: dict[int, float] = {}
        self._part_s: dict[int, float] = {}  # estimated seconds of one part
        self._now = 0.0  # virtual time of the part that was assigned last

    def of(self, streams: Iterable[int]) -> dict[int, float]:
        """Return the virtual time of each stream that needs a block now."""
        # A new or idle stream begins at the present.
        for stream in streams:
            self._times[stream] = max(self._times.get(stream, 0.0), self._now)
        return {stream: self._times[stream] for stream in streams}

    def assigned(self, stream: int) -> float:
        """Charge a part that was just assigned, and return the charged seconds for `ended`."""
        part_s = self._part_s.get(stream, UNKNOWN_S)
        self._now = max(self._now, self._times.get(stream, 0.0))
        self._charge(stream, part_s)
        return part_s

    def ended(self, stream: int, charged_s: float, took_s: float | None) -> None:
        """Correct the charge of a part to the seconds that it took; None if it was not prepared."""
        if took_s is None:
            self._charge(stream, -charged_s)
            return
        took_s = max(took_s, LEAST_S)
        self._charge(stream, took_s - charged_s)
        self._part_s[stream] = (self._part_s.get(stream, took_s) + took_s) / 2

    def forget(self, stream: int) -> None:
        """Forget a stream that has ended."""
        self._times.pop(stream, None)
        self._part_s.pop(stream, None)

    def _charge(self, stream: int, seconds: float) -> None:
        self._times[stream] = self._times.get(stream, self._now) + seconds / self._weight_of(stream)
