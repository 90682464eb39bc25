"""Says what an analysis is at, what it found, and for how much longer it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mbaas.units import duration


class Progress:
    """Tells of each phase as it begins, how much time is gone, and how much is left.

    The time left is what is expected of the phases to come. It never rises: on a slow machine it falls more slowly.

    Args:
        expected_s: phase -> seconds, in the order in which they come; one may be begun several times, or not at all.
        tell: gets each line.
    """

    def __init__(
        self, expected_s: Mapping[str, float], tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected_s, self._tell, self._clock = dict(expected_s), tell, clock
        self._began = clock()
        self._left_s = sum(self._expected_s.values())

    def begin(self, phase: str, text: str, *, done: float = 0.0) -> None:
        """Tell what is measured now; ``done`` is the share of its phase that is over, from 0 to 1."""
        phases = list(self._expected_s)
        now = phases.index(phase)
        left_s = sum(self._expected_s[name] for name in phases[now:]) - done * self._expected_s[phase]
        self._left_s = min(self._left_s, left_s)
        gone_s = self._clock() - self._began
        self._tell(f"{text} ({duration(gone_s)} gone, about {duration(self._left_s)} to go)")

    def found(self, text: str) -> None:
        """Tell what was measured, so that it is there if the analysis is stopped."""
        self._tell(f"  {text}")
