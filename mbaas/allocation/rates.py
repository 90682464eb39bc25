"""How fast so many workers, or threads, are together.

A curve gives the total rate of d workers. For few of them it is a line through the origin (no contention), then it
bends (contention), then it is flat or falls (saturation): the three stages of A-Dloader ("A Data-Loader Tunable Knob
to Shorten GPU Idleness", 2022), and the rise, peak and fall of Lobster's prep threads (ICPP 2022).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError

MOST_COUNT = 4096
"""Nobody is offered more workers or threads than this."""

PEAK_TOLERANCE = 0.02
"""A rate this close to the highest counts as the peak: measured rates scatter by about as much."""

ROUNDING = 1e-9
"""Relative; rates that are equal on paper may differ by this much."""

Rates = NDArray[np.float64]
Stage = Literal["no contention", "contention", "saturation"]


@dataclass(frozen=True)
class Peak:
    """The smallest count that is as fast as any, and its rate."""

    count: int
    rate_per_s: float


class RateCurve(ABC):
    """A total rate against the number of workers or threads."""

    @abstractmethod
    def rates(self, counts: Rates) -> Rates:
        """Total rates, float64[n], of so many workers, float64[n]; 0 of none."""

    def rate(self, count: float) -> float:
        """Total rate of ``count`` workers together; a fraction is a worker that helps part of the time."""
        return float(self.rates(np.array([count], dtype=np.float64))[0])

    def smallest_reaching(self, rate_per_s: float, *, most: int = MOST_COUNT) -> int | None:
        """The smallest count in [1, most] that is at least this fast; None if none is."""
        reached = self.rates(np.arange(1.0, most + 1)) >= rate_per_s * (1 - ROUNDING)
        return int(reached.argmax()) + 1 if reached.any() else None

    def fraction_reaching(self, rate_per_s: float, *, most: int = MOST_COUNT) -> float | None:
        """Like `smallest_reaching`, with the fraction of the last worker that is really needed (A-Dloader's d')."""
        count = self.smallest_reaching(rate_per_s, most=most)
        if count is None:
            return None
        below, reached = self.rates(np.array([count - 1.0, count]))
        return count - 1 + float(np.clip((rate_per_s - below) / (reached - below), 0, 1)) if reached > below else count

    def peak(self, *, most: int = MOST_COUNT) -> Peak:
        """The smallest count in [1, most] whose rate is within `PEAK_TOLERANCE` of the highest there."""
        rates = self.rates(np.arange(1.0, most + 1))
        index = int((rates >= rates.max() * (1 - PEAK_TOLERANCE)).argmax())
        return Peak(index + 1, float(rates[index]))


@dataclass(frozen=True)
class StageCurve(RateCurve):
    """Straight lines from the origin through ``knots``, and on with ``slope``, never below 0.

    Attributes:
        knots: (count, rate) where the line bends, counts ascending; up to two for three stages.
        slope: rate that one more worker adds beyond the last knot; negative where more workers are slower.
    """

    knots: tuple[tuple[float, float], ...]
    slope: float

    def __post_init__(self) -> None:
        counts = (0.0, *(count for count, _ in self.knots))
        if any(not left < right for left, right in pairwise(counts)):
            raise ConfigError(f"counts of knots must ascend from above 0, got {list(counts[1:])}")
        if any(not 0 <= rate < math.inf for _, rate in self.knots):
            raise ConfigError(f"rates of knots must be 0 or more and finite, got {[rate for _, rate in self.knots]}")
        if not math.isfinite(self.slope) or (not self.knots and self.slope < 0):
            raise ConfigError(f"slope must be finite, and 0 or more without knots, got {self.slope}")

    @classmethod
    def linear(cls, worker_per_s: float) -> StageCurve:
        """No contention: every worker adds ``worker_per_s``."""
        return cls((), worker_per_s)

    def rates(self, counts: Rates) -> Rates:
        at = np.array([(0.0, 0.0), *self.knots])
        beyond = at[-1, 1] + self.slope * (counts - at[-1, 0])
        within = np.interp(counts, at[:, 0], at[:, 1])
        rates: Rates = np.where(counts <= at[-1, 0], within, np.maximum(beyond, 0.0))
        return rates

    def stage(self, count: float) -> Stage:
        """The stage at ``count``: what one more worker adds, against what the first one added.

        At least 95 % of it is no contention, at most 5 % is saturation.
        """
        at = np.array([(0.0, 0.0), *self.knots])
        slopes = [*(np.diff(at[:, 1]) / np.diff(at[:, 0])).tolist(), self.slope]
        added = slopes[int(np.searchsorted(at[:, 0], count, side="right")) - 1]
        if added >= 0.95 * slopes[0]:
            return "no contention"
        return "saturation" if added <= 0.05 * slopes[0] else "contention"
