"""Total rate against the number of workers: one kind of curve for prep, storage, disks and memory.

For few workers a curve is a line through the origin (no contention). Then it bends (contention), and then it is flat or
falls (saturation). These are the three stages of A-Dloader ("A Data-Loader Tunable Knob to Shorten GPU Idleness",
2022), and the rise, peak and fall of Lobster's prep threads (ICPP 2022). NoPFS's rates against threads (SC 2021) are
curves that are flat beyond their last point.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.model.quantity import BOUNDS, Bound, Quantity, measured, plain, spanning

MOST_COUNT = 4096
"""Largest number of workers or threads that searches consider."""

PEAK_TOLERANCE = 0.02
"""A rate this close to the highest counts as the peak: measured rates scatter by about as much."""

ROUNDING = 1e-9
"""Relative tolerance for rounding errors."""

SATURATED = 0.05
"""Workers are saturated where one more adds at most this share of the rate that the first one adds."""

NOISE = 0.01
"""Scatter of a good measurement, as a share of the highest rate. Smaller errors do not justify another stage."""

GRID = 17
"""Evenly spaced knot candidates, in addition to the measured counts and their midpoints."""

ROUNDS = 20
"""Rounds of reweighting. By then, consecutive rounds differ by far less than `NOISE`."""

Floats = NDArray[np.float64]
Stage = Literal["no contention", "contention", "saturation"]


class Peak(Struct, frozen=True):
    """The smallest count at the highest rate (within `PEAK_TOLERANCE`), and its rate."""

    count: int
    rate_per_s: float


class ThroughputCurve(Struct, frozen=True):
    """Total rate against the number of workers: lines from the origin through ``knots``, never below 0.

    ``knots`` are (count, rate) at each bend, counts ascending, usually samples/s or bytes/s; three stages need at most
    two. ``slope`` is the rate that one more worker adds beyond the last; negative if more workers are slower.
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
    def linear(cls, worker_per_s: float) -> ThroughputCurve:
        return cls((), worker_per_s)

    @classmethod
    def flat(cls, total_per_s: float) -> ThroughputCurve:
        """Return the curve on which one worker is as fast as many."""
        return cls(((1.0, total_per_s),), 0.0)

    @classmethod
    def through(cls, points: Mapping[int, float]) -> ThroughputCurve:
        """Return the curve through (count -> rate), proportional before the first point and flat after the last."""
        if not points or min(points.values()) <= 0:
            raise ConfigError(f"a table of rates must have points above 0, got {dict(points)}")
        return cls(tuple(sorted((float(count), rate) for count, rate in points.items())), 0.0)

    def rates(self, counts: Floats) -> Floats:
        """float64[n] counts -> float64[n] total rates."""
        at = np.array([(0.0, 0.0), *self.knots])
        beyond = at[-1, 1] + self.slope * (counts - at[-1, 0])
        within = np.interp(counts, at[:, 0], at[:, 1])
        rates: Floats = np.where(counts <= at[-1, 0], within, np.maximum(beyond, 0.0))
        return rates

    def rate(self, count: float) -> float:
        """Return the total rate of ``count`` workers; a fraction is a worker that helps part of the time."""
        # Equal to `rates` bit for bit, in a tenth of the time: models evaluate single counts thousands of times.
        knots = ((0.0, 0.0), *self.knots)
        index = bisect_right(knots, count, key=itemgetter(0)) - 1
        at, rate = knots[index]
        if count == at:
            return rate
        if index == len(knots) - 1:
            return max(rate + self.slope * (count - at), 0.0)
        following, following_rate = knots[index + 1]
        return (following_rate - rate) / (following - at) * (count - at) + rate

    def rate_of_each(self, count: int) -> float:
        return self.rate(count) / count

    def workers_for(self, rate_per_s: float) -> float:
        """Return the workers that reach a rate, with a fraction of the last one (A-Dloader's d').

        If no number of workers reaches it, this is the count at the peak.
        """
        if not self.knots and self.slope:  # a line has no limit
            return rate_per_s / self.slope
        # Tries every count up to the last bend, because a curve that falls may reach a rate at one count and miss it at
        # the next. Beyond that bend the curve is one line.
        last = math.ceil(self.knots[-1][0]) if self.knots else 0
        rates = self.rates(np.arange(last + 1.0))
        reached = rates[1:] >= rate_per_s * (1 - ROUNDING)
        if reached.any():
            count = int(reached.argmax()) + 1
            below, above = rates[count - 1 : count + 1]
            return count - 1 + float(np.clip((rate_per_s - below) / (above - below), 0, 1)) if above > below else count
        beyond = last + (rate_per_s - float(rates[-1])) / self.slope if self.slope > 0 else math.inf
        return beyond if beyond <= MOST_COUNT else float(self.peak().count)

    def peak(self, *, most: int = MOST_COUNT) -> Peak:
        """Return the smallest count in [1, most] within `PEAK_TOLERANCE` of the highest rate in that range."""
        rates = self.rates(np.arange(1.0, most + 1))
        index = int((rates >= rates.max() * (1 - PEAK_TOLERANCE)).argmax())
        return Peak(index + 1, float(rates[index]))

    def stage(self, count: float) -> Stage:
        """Return the stage at ``count``, by the rate that one more worker adds relative to the first worker.

        At least 95 % is no contention, at most 5 % is saturation.
        """
        at = np.array([(0.0, 0.0), *self.knots])
        slopes = [*(np.diff(at[:, 1]) / np.diff(at[:, 0])).tolist(), self.slope]
        added = slopes[int(np.searchsorted(at[:, 0], count, side="right")) - 1]
        if added >= 0.95 * slopes[0]:
            return "no contention"
        return "saturation" if added <= SATURATED * slopes[0] else "contention"

    def scaled(self, factor: float) -> ThroughputCurve:
        return ThroughputCurve(tuple((count, rate * factor) for count, rate in self.knots), self.slope * factor)

    def flat_beyond(self, most: float) -> ThroughputCurve:
        return ThroughputCurve((*(knot for knot in self.knots if knot[0] < most), (most, self.rate(most))), 0.0)

    def capped(self, most_per_s: float) -> ThroughputCurve:
        """Return the lower of this curve and a rate that no number of workers exceeds."""
        if math.isinf(most_per_s):
            return self
        knots: dict[float, float] = {}
        for (count, rate), (following, following_rate) in pairwise(((0.0, 0.0), *self.knots)):
            if (rate - most_per_s) * (following_rate - most_per_s) < 0:
                share = (most_per_s - rate) / (following_rate - rate)
                knots[count + share * (following - count)] = most_per_s
            knots[following] = min(following_rate, most_per_s)
        last, last_rate = self.knots[-1] if self.knots else (0.0, 0.0)
        if (most_per_s - last_rate) * self.slope > 0:
            knots[last + (most_per_s - last_rate) / self.slope] = most_per_s
        return ThroughputCurve(tuple(knots.items()), min(self.slope, 0.0))

    def to_saturation(self) -> ThroughputCurve:
        """Return the curve that stays flat from where one more worker adds at most `SATURATED` of the first one's."""
        at = ((0.0, 0.0), *self.knots)
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(at)] + [self.slope]
        flat = next((i for i, slope in enumerate(slopes) if slope <= SATURATED * slopes[0]), None)
        return self if not flat else ThroughputCurve(self.knots[:flat], 0.0)

    def elsewhere_beyond(self, count: float) -> ThroughputCurve:
        """Return the curve whose workers beyond ``count`` are each as fast as the first: they have other machines."""
        knots = (*(knot for knot in self.knots if knot[0] < count), (count, self.rate(count)))
        return ThroughputCurve(knots, self.knots[0][1] / self.knots[0][0] if self.knots else self.slope)

    def over(self, machines: float) -> ThroughputCurve:
        """Return the curve of d workers spread over n machines, contending only within each: n P(d / n).

        A machine with twice the cores counts as two. For n = 1 / m, it is the rate of one of m machines that each
        have d workers on something shared: P(m d) / m.
        """
        return ThroughputCurve(tuple((count * machines, rate * machines) for count, rate in self.knots), self.slope)

    def blended(self, other: ThroughputCurve, share: float) -> ThroughputCurve:
        """Return the curve of workers that prepare ``share`` of the samples at the rates of ``other``; seconds add up.

        Exact at whole counts up to the last knot of both curves, and for lines from the origin; elsewhere linear.
        """
        if share in (0, 1):
            return other if share else self
        last = max((count for count, _ in (*self.knots, *other.knots)), default=0.0)
        counts = sorted({count for count, _ in (*self.knots, *other.knots)} | set(range(1, math.floor(last) + 1)))
        rates = [blended_rate(self.rate(count), other.rate(count), share) for count in (*counts, last + 1)]
        return ThroughputCurve(tuple(zip(counts, rates, strict=False)), rates[-1] - (rates[-2] if counts else 0.0))


def whole(workers: float) -> int:
    """Return the number of workers rounded up; 3.0000000004 are 3."""
    return math.ceil(workers * (1 - ROUNDING))


def blended_rate(rate: float, other: float, share: float) -> float:
    """Return the rate if ``share`` of the samples has the rate ``other``: the seconds of both kinds add up."""
    return 1 / ((1 - share) / rate + share / other) if rate and other else 0.0


class Fit(Struct, frozen=True):
    """A fitted curve, in the unit of the measured rates; beyond the highest measured count it is a guess.

    ``r_squared`` is the explained share of the variance; below 0.8 the curve is hardly better than the mean rate.
    """

    curve: ThroughputCurve
    r_squared: float


def fit_curve(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit a curve to measured (count, rate) pairs, in any order; repeats of a count are replaced by their median.

    Candidates are all continuous piecewise linear functions from the origin with up to two knots on a grid, that bend
    down and have one peak. Errors count quadratically up to `NOISE` and linearly beyond (Huber), so that a measurement
    disturbed by another process does not bend the curve. More stages, and an end that is not flat, must justify their
    parameters (Schwarz's criterion). Fewer than three counts allow fewer stages; one count gives a line.
    """
    measured = np.array(points, dtype=np.float64).reshape(-1, 2)
    # Medians, because a single disturbed window would shift a mean. Each count weighs the same, however often it was
    # measured.
    counts = np.unique(measured[:, 0])
    rates = np.array([np.median(measured[measured[:, 0] == count, 1]) for count in counts])
    x_unit, y_unit = counts[-1], rates.max() or 1.0  # so that `NOISE` is a share of the highest rate in any unit
    best = _best(counts / x_unit, rates / y_unit)
    at = np.concatenate([[0.0], best.knots])
    heights = np.maximum(np.cumsum(np.diff(at) * best.slopes[:-1]), 0.0)
    knots = tuple(zip((best.knots * x_unit).tolist(), (heights * y_unit).tolist(), strict=True))
    curve = ThroughputCurve(knots, float(best.slopes[-1] * y_unit / x_unit))
    errors = measured[:, 1] - curve.rates(measured[:, 0])
    total = float(((measured[:, 1] - measured[:, 1].mean()) ** 2).sum())
    explained = 1 - float((errors**2).sum()) / total if total else float(np.allclose(errors, 0))
    return Fit(curve, explained)


class _Lines(Struct, frozen=True):
    """One candidate, in units of the highest count and rate: float64[k] knots, float64[k + 1] slopes.

    ``deviation`` is the mean absolute error, at least `NOISE`.
    """

    knots: Floats
    slopes: Floats
    deviation: float
    parameters: int


def _best(x: Floats, y: Floats) -> _Lines:
    free = [_closest(x, y, knots, flat_end=False) for knots in _knots(x)]
    # A flat end must rest on at least two measured counts, because any line fits one.
    flat = [_closest(x, y, knots[knots[:, -1] <= x[-2]], flat_end=True) for knots in _knots(x)[1:]]
    points = float(len(x))

    def criterion(lines: _Lines) -> float:
        return 2 * points * float(np.log(lines.deviation)) + lines.parameters * float(np.log(points))

    return min((lines for lines in (*free, *flat) if lines is not None), key=criterion)


def _knots(x: Floats) -> list[Floats]:
    """Return candidates with zero, one and two knots, [m, k]; each line between knots contains a measured count."""
    grid = np.union1d(np.union1d(x, (x[1:] + x[:-1]) / 2), np.linspace(x[0], x[-1], GRID))[:-1]
    left, right = np.triu_indices(len(grid), 1)
    own = np.searchsorted(x, grid[right], side="right") > np.searchsorted(x, grid[left], side="right")
    pairs = np.stack([grid[left], grid[right]], axis=1)[own]
    return [knots for knots in (np.empty((1, 0)), grid[:, None], pairs) if len(knots)]


def _closest(x: Floats, y: Floats, knots: Floats, *, flat_end: bool) -> _Lines | None:
    """Fit all candidates [m, k] of one kind by reweighted least squares; return the best one with a single peak."""
    number, lines = len(knots), knots.shape[1] + 1
    begins = np.hstack([np.zeros((number, 1)), knots])[:, None, :]
    lengths = np.hstack([knots, np.full((number, 1), np.inf)])[:, None, :] - begins
    basis = np.clip(x[None, :, None] - begins, 0.0, lengths)[:, :, : lines - flat_end]
    # Robust weights can leave a line between two knots without a point. The ridge keeps such a candidate from being
    # singular.
    ridge = 1e-12 * np.eye(basis.shape[2])
    weights = np.ones(basis.shape[:2])
    for _ in range(ROUNDS):
        weighted = (basis * weights[:, :, None]).transpose(0, 2, 1)
        solved = np.linalg.solve(weighted @ basis + ridge, weighted @ y[:, None])
        fitted = (basis @ solved)[:, :, 0]
        errors = np.abs(y - fitted)
        weights = NOISE / np.maximum(errors, NOISE)  # Huber weights: a point weighs less the larger its error
    slopes: Floats = np.hstack([solved[:, :, 0], np.zeros((number, int(flat_end)))])
    allowed = _one_peak(slopes) & (fitted[:, -1] >= -1e-9)
    if not allowed.any():
        return None
    loss = np.where(errors <= NOISE, errors**2 / 2, NOISE * (errors - NOISE / 2)).sum(axis=1)
    index = int(np.where(allowed, loss.round(9), np.inf).argmin())  # in a tie, the smallest knots
    deviation = float(np.maximum(errors[index], NOISE).mean())
    return _Lines(knots[index], slopes[index], deviation, 2 * lines - 1 - flat_end)


def _one_peak(slopes: Floats) -> NDArray[np.bool_]:
    """Return which candidates rise first, bend down while rising, and never rise again after a fall: bool[m]."""
    # Workers that contend cannot suddenly help each other: a second rise would fit noise.
    later = slopes[:, 1:] <= np.maximum(slopes[:, :-1], 0.0) + 1e-9
    allowed: NDArray[np.bool_] = (slopes[:, 0] >= 0) & later.all(axis=1)
    return allowed


TINY = 1e-6
"""Lower limit of a curve, as a share of its highest rate. It keeps predictions finite."""


@dataclass(frozen=True)
class MeasuredCurve:
    """Rates above 0, measured at ascending counts of workers or readers, with a piecewise linear fit."""

    points: tuple[tuple[float, Quantity], ...]

    def __post_init__(self) -> None:
        counts = (0.0, *(count for count, _ in self.points))
        if not self.points or any(not left < right for left, right in pairwise(counts)):
            raise ConfigError(f"a curve needs counts that ascend from above 0, got {list(counts[1:])}")
        if slow := [rate.low for _, rate in self.points if not rate.low > 0]:
            raise ConfigError(f"rates of a curve must be above 0, got {slow[0]} {self.points[0][1].unit}")

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], *, unit: str) -> MeasuredCurve:
        """Return the curve of (count, rate) pairs in any order; repeated counts give an interval."""
        if not points or any(not 0 < number < math.inf for point in points for number in point):
            raise ConfigError(f"a curve needs points (count, rate), all above 0 and finite, got {list(points)}")
        rates: dict[float, list[float]] = {}
        for count, rate in sorted(points):
            rates.setdefault(float(count), []).append(rate)
        return cls(tuple((count, measured(found, unit=unit)) for count, found in rates.items()))

    @classmethod
    def linear(cls, rate: Quantity) -> MeasuredCurve:
        return cls(((1.0, rate),))

    @cached_property
    def fit(self) -> Fit:
        return fit_curve([(count, rate.value) for count, rate in self.points])

    @property
    def most(self) -> float:
        """The highest measured count; beyond it the curve is an extrapolation."""
        return self.points[-1][0]

    @property
    def fastest(self) -> tuple[float, Quantity]:
        """The point with the highest rate: (count, rate)."""
        return max(self.points, key=lambda point: point[1].value)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest ratio of a measurement to the fit, for example (0.95, 1.02)."""
        return self._factors["low"], self._factors["high"]

    @cached_property
    def worst_error(self) -> float:
        return max(abs(self.rate(count) / rate.value - 1) for count, rate in self.points)

    @cached_property
    def _factors(self) -> dict[Bound, float]:
        # One factor for all counts, so that intervals are as wide beyond the measured counts as within them. The
        # factors cover the error of the fit as well as the scatter of the measurements.
        lows = [rate.low / self._fitted(count) for count, rate in self.points]
        highs = [rate.high / self._fitted(count) for count, rate in self.points]
        return {"low": min(1.0, *lows), "value": 1.0, "high": max(1.0, *highs)}

    def rate(self, count: float, bound: Bound = "value") -> float:
        """Return the total rate of ``count`` workers; a fraction is a worker that helps part of the time."""
        return self._fitted(count) * self._factors[bound]

    def quantity(self, count: float) -> Quantity:
        return spanning(*(self.rate(count, bound) for bound in BOUNDS), unit=self.points[0][1].unit)

    def best_rate(self, count: float, bound: Bound = "value") -> float:
        """Return the highest rate that ``count`` or fewer workers reach."""
        # a piecewise linear curve peaks at a knot or at its end
        bends = [knot for knot, _ in self.fit.curve.knots if knot < count]
        return max(self.rate(n, bound) for n in (count, *bends))

    @cached_property
    def _lines(self) -> ThroughputCurve:
        # If the fit falls beyond the measured counts, continue it flat: workers that slow prep down would not be used,
        # and a falling line would reach 0.
        return self.fit.curve.flat_beyond(self.most) if self.fit.curve.slope < 0 else self.fit.curve

    def _fitted(self, count: float) -> float:
        highest = max(rate.value for _, rate in self.points)
        return max(self._lines.rate(count), TINY * highest * count / self.most)

    def scaled(self, factor: float) -> MeasuredCurve:
        return MeasuredCurve(tuple((count, rate.scaled(factor)) for count, rate in self.points))

    def to_json(self) -> list[list[Any]]:
        listed: list[list[Any]] = plain(self.points)
        return listed

    @classmethod
    def from_json(cls, plain: Sequence[Sequence[Any]]) -> MeasuredCurve:
        return cls(tuple((count, Quantity.from_json(rate)) for count, rate in plain))
