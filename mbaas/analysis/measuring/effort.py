"""Repetition of a measurement until its interval is small enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mbaas.errors import ConfigError
from mbaas.model.quantity import Quantity, measured


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
