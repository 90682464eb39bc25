"""Progress of an analysis: phase, findings and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mbaas.units import duration


class Progress:
    """Reports each phase as it begins, with the time passed and the time left.

    The time left is the expected time of the remaining phases. It never increases: on a slow machine it falls more
    slowly.

    Args:
        expected_s: phase -> seconds, in order; a phase may begin several times, or never.
        tell: called with each line.
    """

    def __init__(
        self, expected_s: Mapping[str, float], tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._expected_s, self._tell, self._clock = dict(expected_s), tell, clock
        self._began = clock()
        self._left_s = sum(self._expected_s.values())

    def begin(self, phase: str, text: str, *, done: float = 0.0) -> None:
        """Report the present activity; ``done`` is the finished share of its phase, from 0 to 1."""
        phases = list(self._expected_s)
        now = phases.index(phase)
        left_s = sum(self._expected_s[name] for name in phases[now:]) - done * self._expected_s[phase]
        self._left_s = min(self._left_s, left_s)
        gone_s = self._clock() - self._began
        self._tell(f"{text} ({duration(gone_s)} gone, about {duration(self._left_s)} to go)")

    def found(self, text: str) -> None:
        """Report a result, so that it is visible even if the analysis is stopped."""
        self._tell(f"  {text}")
