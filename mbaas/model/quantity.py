"""Numbers with a unit and an interval, measured or computed, and the conversion of results to plain data.

Arithmetic gives the widest possible interval: errors must not be assumed to cancel, because rates of a busy machine are
often off in the same direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any, ClassVar, Literal

from mbaas.base import units
from mbaas.errors import ConfigError

Bound = Literal["low", "value", "high"]
"""The lower end of an interval, the median, or the upper end."""

BOUNDS: tuple[Bound, ...] = ("value", "low", "high")
"""All three, the median first, in the order of `spanning`'s arguments."""

OPPOSITE: dict[Bound, Bound] = {"low": "high", "value": "value", "high": "low"}
"""End of a cost's interval that belongs to an end of a rate's: a slow machine has high costs."""

CONFIDENCE = 0.95
"""Probability that the interval of enough repeated measurements contains the true median."""


class AsJson:
    json_properties: ClassVar[tuple[str, ...]] = ()
    """Properties in the JSON form, after the fields."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `json_properties` by name, as JSON types; an infinite number is None."""
        return {**plain_fields(self), **{name: plain(getattr(self, name)) for name in self.json_properties}}


@dataclass(frozen=True)
class Quantity(AsJson):
    """A number with an interval.

    Attributes:
        value: the median of the measurements, or a result computed from medians.
        low, high: the interval; low <= value <= high.
        unit: such as "samples/s", "bytes/s", "s".
        samples: number of measurements; 0 if given or computed.

    Raises:
        ConfigError: a number is not finite, or the value is outside the interval.
    """

    value: float
    # Without `KW_ONLY`, which msgspec cannot read on Python 3.10.
    low: float = field(kw_only=True)
    high: float = field(kw_only=True)
    unit: str = field(kw_only=True)
    samples: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.low, self.value, self.high))):
            raise ConfigError(f"a quantity must be finite, got {self.low}, {self.value}, {self.high} {self.unit}")
        if not self.low <= self.value <= self.high:
            raise ConfigError(
                f"a value must lie within its interval, got {self.value} {self.unit} outside [{self.low}, {self.high}]"
            )

    def at(self, bound: Bound) -> float:
        return {"low": self.low, "value": self.value, "high": self.high}[bound]

    @property
    def spread(self) -> float:
        """Half the interval's width as a share of the value: 0.05 is ±5 %; 0 if the value is 0."""
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
        """Return the reciprocal of a number above 0: seconds for a rate, or a rate for seconds."""
        # the highest rate takes the fewest seconds, so the ends swap
        return Quantity(1 / self.value, low=1 / self.high, high=1 / self.low, unit=unit, samples=self.samples)

    def plus(self, other: Quantity) -> Quantity:
        """Add low to low and high to high."""
        return Quantity(self.value + other.value, low=self.low + other.low, high=self.high + other.high, unit=self.unit)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Quantity:
        return cls(**plain)


def stated(value: float, *, unit: str) -> Quantity:
    """Return a quantity for a number taken as exact."""
    return Quantity(value, low=value, high=value, unit=unit)


def spanning(value: float, *others: float, unit: str) -> Quantity:
    """Return a computed quantity; its interval spans all values."""
    return Quantity(value, low=min(value, *others), high=max(value, *others), unit=unit)


def measured(measurements: Sequence[float], *, unit: str) -> Quantity:
    """Return the median of repeated measurements with a distribution-free interval.

    The interval reaches from the k-th smallest to the k-th largest of n measurements. It misses the true median with
    probability 2 P(Binomial(n, 1/2) < k) (the sign test). k is the largest number for which this is at most 5 %; fewer
    than six measurements span their extremes. Raises ConfigError if ``measurements`` is empty.
    """
    if not measurements:
        raise ConfigError("a quantity needs at least 1 measurement, got 0")
    # Median and ranks, because measurements on a busy machine are skewed: a disturbed one is much slower, but none is
    # much faster. Mean and standard deviation would describe the disturbance.
    ordered = sorted(measurements)
    rank = _rank(len(ordered))
    return Quantity(median(ordered), low=ordered[rank - 1], high=ordered[-rank], unit=unit, samples=len(ordered))


def _rank(number: int) -> int:
    """Return the largest k with 2 P(Binomial(number, 1/2) < k) <= 1 - CONFIDENCE, at least 1."""
    # in integers, so exact for any number of measurements
    rank, missed = 0, 0
    while 2 * (missed := missed + math.comb(number, rank)) <= (1 - CONFIDENCE) * 2**number:
        rank += 1
    return max(1, rank)


RANGES: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda number: number >= 1,
    "0 or more": lambda number: number >= 0,
    "0 or more and finite": lambda number: 0 <= number < math.inf,
    "above 0": lambda number: number > 0,
    "above 0 and finite": lambda number: 0 < number < math.inf,
}
"""Ranges of numbers as messages name them."""


def check_fields(thing: object, wanted: str, *names: str) -> None:
    """Check numbers, and the low ends of quantities, against one of `RANGES`; None is valid. Raises ConfigError."""
    check_numbers(wanted, **{name: getattr(thing, name) for name in names})


def check_numbers(wanted: str, **values: float | Quantity | None) -> None:
    for name, value in values.items():
        number, unit = (value.low, f" {value.unit}") if isinstance(value, Quantity) else (value, "")
        if number is not None and not RANGES[wanted](number):
            raise ConfigError(f"{name} must be {wanted}, got {units.exact(number)}{unit}", option=name)


def plain(value: Any) -> Any:
    """Convert a value and its contents to JSON types: dicts, lists, strings, finite numbers and None."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # JSON has no infinity (no limit), and strict readers reject Python's extension
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_fields(thing: Any) -> dict[str, Any]:
    return {each.name: plain(getattr(thing, each.name)) for each in fields(thing)}
