"""Numbers with a unit and an interval: what was measured, and what follows from it; and all results as plain data.

Arithmetic takes the widest interval that is possible: rates of one machine are often off the same way at once, because
the machine was busy, so errors must not be taken to cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, is_dataclass
from statistics import median
from typing import Any, Literal

from mbaas.errors import ConfigError

Bound = Literal["low", "value", "high"]
"""The lower end of an interval, the median, the upper end."""

BOUNDS: tuple[Bound, ...] = ("value", "low", "high")
"""All three, the median first, as `spanning` takes them."""

OPPOSITE: dict[Bound, Bound] = {"low": "high", "value": "value", "high": "low"}
"""The end of a cost that goes with an end of a rate: machines are slow where costs are high."""

CONFIDENCE = 0.95
"""Probability that the true median lies within the interval of a measurement that was repeated often enough."""


@dataclass(frozen=True)
class Quantity:
    """A number, and between what it lies.

    Attributes:
        value: the median of the measurements, or what follows from medians.
        low, high: its interval; low <= value <= high.
        unit: such as "samples/s", "bytes/s", "s".
        samples: measurements behind it; 0 if it was stated or computed.

    Raises:
        ConfigError: a number is not finite, or the value lies outside the interval.
    """

    value: float
    _: KW_ONLY
    low: float
    high: float
    unit: str
    samples: int = 0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.low, self.value, self.high))):
            raise ConfigError(f"a quantity must be finite, got {self.low}, {self.value}, {self.high} {self.unit}")
        if not self.low <= self.value <= self.high:
            raise ConfigError(
                f"a value must lie within its interval, got {self.value} {self.unit} outside [{self.low}, {self.high}]"
            )

    def at(self, bound: Bound) -> float:
        """Return one of its three numbers."""
        return {"low": self.low, "value": self.value, "high": self.high}[bound]

    @property
    def spread(self) -> float:
        """Return half the interval as a share of the value: 0.05 is plus or minus 5 %; 0 where the value is 0."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else 0.0

    def scaled(self, factor: float, *, unit: str | None = None) -> Quantity:
        """Multiply by an exact factor of 0 or more."""
        return Quantity(
            self.value * factor,
            low=self.low * factor,
            high=self.high * factor,
            unit=self.unit if unit is None else unit,
            samples=self.samples,
        )

    def inverse(self, *, unit: str) -> Quantity:
        """Return 1 / this, for numbers above 0: the seconds of a rate, and back."""
        # the highest rate has the fewest seconds, so the ends change places
        return Quantity(1 / self.value, low=1 / self.high, high=1 / self.low, unit=unit, samples=self.samples)

    def plus(self, other: Quantity) -> Quantity:
        """Add another of the same unit, low to low and high to high."""
        return Quantity(self.value + other.value, low=self.low + other.low, high=self.high + other.high, unit=self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return a dict with ``value``, ``low``, ``high``, ``unit`` and ``samples``."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Quantity:
        """Read what `to_json` returned."""
        return cls(**plain)


def stated(value: float, *, unit: str) -> Quantity:
    """Make a quantity of a number that somebody gave, taken as exact."""
    return Quantity(value, low=value, high=value, unit=unit)


def spanning(value: float, *others: float, unit: str) -> Quantity:
    """Make a quantity of a computed value, with an interval from the lowest to the highest of it and ``others``."""
    return Quantity(value, low=min(value, *others), high=max(value, *others), unit=unit)


def measured(measurements: Sequence[float], *, unit: str) -> Quantity:
    """Make a quantity of repeated measurements: their median, and an interval that assumes nothing of how they scatter.

    The interval reaches from the k-th smallest to the k-th largest measurement. It misses the true median if fewer
    than k of n fall on one side of it, with probability 2 P(Binomial(n, 1/2) < k) (the sign test); k is the largest
    number with which that is at most 5 %. Fewer than six measurements cannot be that sure: they span their extremes.

    Raises:
        ConfigError: there are none.
    """
    if not measurements:
        raise ConfigError("a quantity needs at least 1 measurement, got 0")
    # The median and ranks, because measurements of a busy machine are skewed: one that was disturbed is much slower,
    # none is much faster, so a mean and a standard deviation would describe the disturbance.
    ordered = sorted(measurements)
    rank = _rank(len(ordered))
    return Quantity(median(ordered), low=ordered[rank - 1], high=ordered[-rank], unit=unit, samples=len(ordered))


def _rank(number: int) -> int:
    """Find the largest k with 2 P(Binomial(number, 1/2) < k) <= 1 - CONFIDENCE, at least 1."""
    # binomial coefficients are whole numbers, so this is exact for any number of measurements
    rank, missed = 0, 0
    while 2 * (missed := missed + math.comb(number, rank)) <= (1 - CONFIDENCE) * 2**number:
        rank += 1
    return max(1, rank)


def plain(value: Any) -> Any:
    """Turn a value and all that it holds into what JSON can say: dicts, lists, texts and finite numbers."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # infinity is what has no limit: JSON has no word for it, and readers that are strict refuse Python's
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_fields(thing: Any) -> dict[str, Any]:
    """Turn a dataclass into a dict of its fields by name, each as `plain` says it."""
    return {each.name: plain(getattr(thing, each.name)) for each in fields(thing)}
