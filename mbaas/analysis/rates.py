"""What was measured of a dataset, a pipeline, a training step and a machine: G, P, S and C of DS-Analyzer (VLDB 2021).

Rates are of one machine with nothing else on it. Everything that a prediction needs beside them is `Setup`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from mbaas import units
from mbaas.allocation.throughput import Fit, ThroughputCurve, blended_rate, fit_curve
from mbaas.analysis.gpu_rates import GpuRates
from mbaas.analysis.quantity import BOUNDS, OPPOSITE, Bound, Quantity, plain, plain_fields, spanning, stated
from mbaas.errors import ConfigError

FREE = stated(0.0, unit="CPU-s")
"""Costs nothing."""

INSTANT = stated(0.0, unit="s")
"""Takes no time."""

NO_CORES = stated(0.0, unit="cores")
"""Keeps none busy."""

LEAST_FREE = 0.5
"""At least so many cores of a node are taken to be left: it may have fewer than the one that was measured."""

TINY = 1e-6
"""A curve never falls below this share of its highest rate, so that no prediction is infinite."""


@dataclass(frozen=True)
class MeasuredCurve:
    """Measured rates against a number of workers or readers, and the piece-wise linear fit through them.

    Attributes:
        points: pairs of a count and the rate measured with it; counts ascend, rates are above 0.

    Raises:
        ConfigError: no points, counts that do not ascend from above 0, or a rate that is not above 0.
    """

    points: tuple[tuple[float, Quantity], ...]

    def __post_init__(self) -> None:
        counts = (0.0, *(count for count, _ in self.points))
        if not self.points or any(not left < right for left, right in pairwise(counts)):
            raise ConfigError(f"a curve needs counts that ascend from above 0, got {list(counts[1:])}")
        if slow := [rate.low for _, rate in self.points if not rate.low > 0]:
            raise ConfigError(f"rates of a curve must be above 0, got {slow[0]} {self.points[0][1].unit}")

    @classmethod
    def linear(cls, rate: Quantity) -> MeasuredCurve:
        """Make a curve of one worker's rate, to which every further worker adds as much."""
        return cls(((1.0, rate),))

    @cached_property
    def fit(self) -> Fit:
        """Fit lines through the medians, and say how well they agree with them."""
        return fit_curve([(count, rate.value) for count, rate in self.points])

    @property
    def most(self) -> float:
        """Return the highest count that was measured; beyond it the curve is a guess."""
        return self.points[-1][0]

    @property
    def fastest(self) -> tuple[float, Quantity]:
        """Return the point with the highest rate: a count and its rate."""
        return max(self.points, key=lambda point: point[1].value)

    @property
    def spread(self) -> tuple[float, float]:
        """Return how far measurements lie below and above the lines, as shares of them: (0.95, 1.02)."""
        return self._factors["low"], self._factors["high"]

    @cached_property
    def worst_error(self) -> float:
        """Return the largest difference of a fitted rate from its median, as a share of the median."""
        return max(abs(self.rate(count) / rate.value - 1) for count, rate in self.points)

    @cached_property
    def _factors(self) -> dict[Bound, float]:
        """Find what the fit has to be multiplied with to lie below, at, and above all measurements."""
        # One factor for all counts, so that an interval is as wide beyond the measured counts as within them. It covers
        # what the fit misses, too, not only how measurements scatter.
        lows = [rate.low / self._fitted(count) for count, rate in self.points]
        highs = [rate.high / self._fitted(count) for count, rate in self.points]
        return {"low": min(1.0, *lows), "value": 1.0, "high": max(1.0, *highs)}

    def rate(self, count: float, bound: Bound = "value") -> float:
        """Return the total rate of ``count``; a fraction is one that helps part of the time."""
        return self._fitted(count) * self._factors[bound]

    def quantity(self, count: float) -> Quantity:
        """Return the total rate of ``count``, with its interval."""
        return spanning(*(self.rate(count, bound) for bound in BOUNDS), unit=self.points[0][1].unit)

    def best_rate(self, count: float, bound: Bound = "value") -> float:
        """Return the highest rate that ``count`` workers or fewer reach."""
        # lines have their highest rate where they bend or where they end
        bends = [knot for knot, _ in self.fit.curve.knots if knot < count]
        return max(self.rate(n, bound) for n in (count, *bends))

    @cached_property
    def _lines(self) -> ThroughputCurve:
        """Take the fit, made flat beyond what was measured if it falls there."""
        # A line that falls would reach 0 somewhere, but nobody uses workers that make prep slower.
        return self.fit.curve.flat_beyond(self.most) if self.fit.curve.slope < 0 else self.fit.curve

    def _fitted(self, count: float) -> float:
        highest = max(rate.value for _, rate in self.points)
        return max(self._lines.rate(count), TINY * highest * count / self.most)

    def scaled(self, factor: float) -> MeasuredCurve:
        """Return the curve with every rate ``factor`` times as high."""
        return MeasuredCurve(tuple((count, rate.scaled(factor)) for count, rate in self.points))

    def to_json(self) -> list[list[Any]]:
        """Return a list of [count, quantity]."""
        listed: list[list[Any]] = plain(self.points)
        return listed

    @classmethod
    def from_json(cls, plain: Sequence[Sequence[Any]]) -> MeasuredCurve:
        """Read what `to_json` returned."""
        return cls(tuple((count, Quantity.from_json(rate)) for count, rate in plain))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """G, P, S, C and what a sample costs, of one machine.

    Attributes:
        samples: number of samples in the dataset (D).
        sample_bytes: mean size of a raw sample.
        pixel_bytes: size of a prepared sample.
        cores: number of cores of the machine.
        batch_size: the size of the minibatches with which the step was measured.
        step: G, samples/s of one trial alone that never waits for data.
        prep: P, samples/s against workers, everything in memory, nobody trains.
        storage: S, samples/s against readers, nothing cached.
        cache: C, bytes/s at which cached samples come from memory.
        disk: bytes/s of the local disk that keeps what memory has no room for; None: there is none.
        decoded_bytes: size of a sample that is kept decoded, after the pipeline's transforms without random draws; None
            where it was not measured what decoded samples bring.
        decoded_prep: P of decoded samples, samples/s against workers; None as ``decoded_bytes``.
        decoded_cpu_s: CPU seconds that a prep worker takes for a decoded sample while all cores are busy; None:
            1 / decoded_prep(1).
        prep_cpu_s: the same of any other sample; None: those of one worker that is busy all the time, 1 / P(1).
        serving_s: seconds a sample that a prep worker of a feed takes longer than one that prepares alone (P): it also
            hands its samples on, and those who take them work beside it.
        read_cpu_s: CPU seconds to read a sample from storage and bring it to a worker, more than if it were cached.
        step_cpu_s: CPU seconds of a trial's step for a sample, on the cores that also prepare; 0 on an accelerator.
        staging_cpu_s: CPU seconds of all but prep workers for a prepared sample, once for all trials.
        delivery_cpu_s: CPU seconds for a prepared sample and each trial that takes it.
        background_cores: cores that the processes of a feed and of Ray keep busy on a node, whatever is done.
        step_overhead_s: seconds of a step that do not depend on its batch size (`step_overhead`).
        on_gpu: what was measured on a GPU; None if nothing was.
        overlap: how well steps, prep and fetch mask each other: 1 perfectly, 0 not at all (one after the other).

    Raises:
        ConfigError: a number that cannot be.
    """

    samples: int
    sample_bytes: float
    pixel_bytes: float
    cores: int
    batch_size: int
    step: Quantity
    prep: MeasuredCurve
    storage: MeasuredCurve
    cache: Quantity
    disk: Quantity | None = None
    decoded_bytes: float | None = None
    decoded_prep: MeasuredCurve | None = None
    decoded_cpu_s: Quantity | None = None
    prep_cpu_s: Quantity | None = None
    serving_s: Quantity = INSTANT
    read_cpu_s: Quantity = FREE
    step_cpu_s: Quantity = FREE
    staging_cpu_s: Quantity = FREE
    delivery_cpu_s: Quantity = FREE
    background_cores: Quantity = NO_CORES
    step_overhead_s: Quantity = INSTANT
    overlap: float = 1.0
    on_gpu: GpuRates | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "cores", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("sample_bytes", "pixel_bytes", "decoded_bytes"):
            nbytes = getattr(self, name)
            if nbytes is not None and not 0 < nbytes < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {nbytes}")
        if (self.decoded_bytes is None) != (self.decoded_prep is None):
            raise ConfigError("decoded_bytes and decoded_prep must both be given, or neither")
        for name in ("step", "cache", "disk"):
            rate = getattr(self, name)
            if rate is not None and not rate.low > 0:
                raise ConfigError(f"{name} must be above 0, got {units.exact(rate.low)} {rate.unit}")
        for name in COSTS:
            cost = getattr(self, name)
            if cost is not None and cost.low < 0:
                raise ConfigError(f"{name} must be 0 or more, got {units.exact(cost.low)} {cost.unit}")
        if self.background_cores.low < 0:
            raise ConfigError(f"background_cores must be 0 or more, got {units.exact(self.background_cores.low)}")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap must be in [0, 1], got {self.overlap}")

    def free_cores(self, cores: int, bound: Bound = "value") -> float:
        """Return what is left of so many cores of a node beside `background_cores`; ``bound`` is of the speed."""
        return max(cores * LEAST_FREE, cores - self.background_cores.at(OPPOSITE[bound]))

    @property
    def dataset_bytes(self) -> float:
        """Return the size of all raw samples together."""
        return self.samples * self.sample_bytes

    @property
    def prepared_cpu_s(self) -> Quantity:
        """Return the CPU seconds to prepare a sample, as measured or from P(1)."""
        # prep does nothing but compute, so a worker that is never short of bytes keeps one core busy
        return self.prep_cpu_s if self.prep_cpu_s is not None else self.prep.quantity(1).inverse(unit="CPU-s")

    def cpu_s(self, decoded: float) -> Quantity:
        """Return the CPU seconds to prepare a sample, on average, if this share of them is kept decoded."""
        if not decoded or self.decoded_prep is None:
            return self.prepared_cpu_s
        cost = self.decoded_cpu_s
        cost = self.decoded_prep.quantity(1).inverse(unit="CPU-s") if cost is None else cost
        return self.prepared_cpu_s.scaled(1 - decoded).plus(cost.scaled(decoded))

    def feed_rate(self, workers: float, bound: Bound = "value", *, decoded: float = 0.0) -> float:
        """Return the samples/s that w workers of a feed prepare: each needs w / P(w) + `serving_s` for one.

        If a share of the samples is kept decoded, the seconds of both forms add up.
        """
        serving_s = self.serving_s.at(OPPOSITE[bound])
        encoded = _served(self.prep.rate(workers, bound), workers, serving_s)
        if not decoded or self.decoded_prep is None:
            return encoded
        return blended_rate(encoded, _served(self.decoded_prep.rate(workers, bound), workers, serving_s), decoded)

    def feed_quantity(self, workers: float) -> Quantity:
        """Return `feed_rate` with its interval."""
        return spanning(*(self.feed_rate(workers, bound) for bound in BOUNDS), unit="samples/s")

    @property
    def feed_points(self) -> tuple[tuple[float, float], ...]:
        """Return `feed_rate` where P was measured: (workers, samples/s)."""
        return tuple((n, _served(rate.value, n, self.serving_s.value)) for n, rate in self.prep.points)

    @property
    def decoded_feed_points(self) -> tuple[tuple[float, float], ...]:
        """Return the same where P of decoded samples was measured; nothing if it was not."""
        points = self.decoded_prep.points if self.decoded_prep is not None else ()
        return tuple((n, _served(rate.value, n, self.serving_s.value)) for n, rate in points)

    def step_s(self, batch_size: int, bound: Bound = "value") -> float:
        """Return the seconds of a trial's step for a sample, in minibatches of another size; ``bound`` is of the speed.

        A step of b samples takes o + b s seconds, so a sample takes s + o / b, where s = 1/G - o / b0 follows from G,
        measured at b0.
        """
        # G is fixed at b0. A larger o leaves less for s, so it makes smaller minibatches slower and larger ones faster:
        # which end of o is the slow one depends on the size.
        smaller = batch_size < self.batch_size
        overhead_s = self.step_overhead_s.at(OPPOSITE[bound] if smaller else bound)
        # not below 0: o and G were measured apart, and each has its own error
        return max(0.0, 1 / self.step.at(bound) - overhead_s / self.batch_size) + overhead_s / batch_size

    def at_pace(self, pace: float) -> Rates:
        """Return the rates while the cores are ``pace`` times as fast; storage, and what steps wait for, stay."""
        waited_s = max(0.0, 1 / self.step.value - self.step_cpu_s.value)
        step_s = waited_s + (1 / self.step.value - waited_s) / pace
        costs = {name: getattr(self, name) for name in COSTS if name != "step_overhead_s"}
        return replace(
            self,
            step=self.step.scaled(1 / step_s / self.step.value),
            prep=self.prep.scaled(pace),
            decoded_prep=None if self.decoded_prep is None else self.decoded_prep.scaled(pace),
            cache=self.cache.scaled(pace),
            background_cores=self.background_cores.scaled(1 / pace),
            **{name: cost.scaled(1 / pace) for name, cost in costs.items() if cost is not None},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Rates:
        """Read what `to_json` returned; fields that a file of an older version lacks have their defaults.

        Raises:
            ConfigError: it lacks fields that have none.
        """
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if lacking := [repr(name) for name in needed if name not in plain]:
            raise ConfigError(f"rates lack {' and '.join(lacking)}")
        return cls(**{name: _read(value) for name, value in plain.items()})


COSTS = (
    "prep_cpu_s",
    "decoded_cpu_s",
    "serving_s",
    "read_cpu_s",
    "step_cpu_s",
    "staging_cpu_s",
    "delivery_cpu_s",
    "step_overhead_s",
)
"""Fields of `Rates` that are times."""


def step_overhead(points: Sequence[tuple[int, Quantity]]) -> Quantity:
    """Find the seconds of a step that do not depend on its batch size, from G at several sizes: (batch size, G).

    The line o + b s through the seconds b / G of a step, by least squares; o is taken as 0 if it would be negative.

    Raises:
        ConfigError: fewer than two batch sizes.
    """
    sizes = [size for size, _ in points]
    if len(set(sizes)) < 2:
        raise ConfigError(f"an overhead needs G at 2 batch sizes at least, got {sorted(set(sizes))}")
    mean = sum(sizes) / len(sizes)
    square = sum((size - mean) ** 2 for size in sizes)
    # the line's height at 0 is a weighted sum of the seconds, so its extremes take each at the end that its weight says
    weights = [1 / len(sizes) - mean * (size - mean) / square for size in sizes]

    def height_s(sign: int) -> float:
        ends: list[Bound] = ["value" if not sign else "low" if sign * weight > 0 else "high" for weight in weights]
        seconds = [size / g.at(end) for (size, g), end in zip(points, ends, strict=True)]
        return max(0.0, sum(w * s for w, s in zip(weights, seconds, strict=True)))

    return Quantity(height_s(0), low=height_s(-1), high=height_s(1), unit="s")


def _served(alone_per_s: float, workers: float, serving_s: float) -> float:
    """Return w / (w / P + serving_s)."""
    return alone_per_s / (1 + alone_per_s * serving_s / workers)


def _read(value: Any) -> Any:
    """Tell by its form what a value of the JSON was: only `GpuRates` name GPUs, all other mappings are quantities, and
    only curves are lists.
    """
    if isinstance(value, Mapping):
        return GpuRates.from_json(value) if "gpus" in value else Quantity.from_json(value)
    return MeasuredCurve.from_json(value) if isinstance(value, Sequence) else value
