"""Repetition of a measurement until its interval is small enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mbaas.errors import ConfigError
from mbaas.model.quantity import Quantity, measured
from mbaas.units import duration


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Accuracy target and limits of a measurement.

    Attributes:
        spread: sufficient half-width of the interval, as a share of the value.
        least, most: minimum and maximum number of measurements. With fewer than six, an interval only spans their range
            (`measured`).
        budget_s: time after which no measurement starts, once there are `least`.
        window_s: target seconds of one measurement of a rate.
        is_whole: whether to measure the costs of feeds, and rates for every number of workers, threads and readers. If
            False, rates are measured only for the smallest number and for a feed's default.

    Raises:
        ConfigError: an invalid number.
    """

    spread: float = 0.02
    least: int = 6
    most: int = 30
    budget_s: float = 6.0
    window_s: float = 0.25
    is_whole: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"least must be in [1, most = {self.most}], got {self.least}")
        for name in ("spread", "budget_s", "window_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def is_enough(self, values: list[float], *, unit: str, elapsed_s: float) -> bool:
        """Return whether to stop after these values."""
        if len(values) < self.least:
            return False
        return (
            len(values) >= self.most or elapsed_s >= self.budget_s or measured(values, unit=unit).spread <= self.spread
        )


QUICK = Effort(spread=0.1, least=2, most=4, budget_s=0.5, window_s=0.1, is_whole=False)
"""Effort for a first answer: rates within about 10 %."""


def repeated(
    measure: Callable[[], float], effort: Effort, *, unit: str, clock: Callable[[], float] = time.monotonic
) -> Quantity:
    """Repeat a measurement until it is accurate enough; return the median with its interval.

    The first measurement is discarded: it loads code, fills caches, and gives windows a first estimate of the rate.
    """
    measure()
    values: list[float] = []
    began = clock()
    while not effort.is_enough(values, unit=unit, elapsed_s=clock() - began):
        values.append(measure())
    return measured(values, unit=unit)


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
