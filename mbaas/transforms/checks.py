"""Checks of transform parameters when a transform is constructed.

Each check returns the value in its canonical type, so that equal settings have equal reprs and fingerprints. ``where``
names the transform and the parameter in messages: "Resize's size".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from mbaas.base import units
from mbaas.errors import ConfigError, shown

MOST_PIXELS = 65_535
"""Longest side that a transform may produce: the limit of JPEG."""


def refused(where: str, must: str, value: object) -> ConfigError:
    """Return the error for an invalid parameter; `ConfigError.option` locates its line in configuration files."""
    parameter = where.partition("'s ")[2].partition(",")[0]
    return ConfigError(f"{where} {must}, got {shown(value)}", option=parameter)


def number(where: str, value: object) -> float:
    """Return ``value`` as a finite float."""
    # True is a number in Python, but a mistake here.
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        result = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:  # an integer with hundreds of digits
        result = math.inf
    if not math.isfinite(result):
        raise refused(where, "must be a finite number", value)
    return result


def fraction(where: str, value: object) -> float:
    """Return ``value`` as a float in [0, 1]."""
    result = number(where, value)
    if not 0.0 <= result <= 1.0:
        raise refused(where, "must be in [0, 1]", value)
    return result


def whole(where: str, value: object, *, least: int, most: int) -> int:
    """Return ``value`` as an int in [least, most]."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= int(value) <= most:  # type: ignore[call-overload]
        raise refused(where, f"must be a whole number in [{least:,}, {most:,}]", value)
    return int(value)  # type: ignore[call-overload]


def pixels(where: str, value: object) -> int:
    """Return ``value`` as a length in pixels, at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise refused(where, "must be a whole number of pixels, at least 1", value)
    result = int(value)
    if result > MOST_PIXELS:
        raise refused(where, f"must be at most {MOST_PIXELS:,} pixels", result)
    return result


def sequence(where: str, value: object, length: int) -> Sequence[object]:
    """Return ``value`` if it is a list or tuple with ``length`` items."""
    if not isinstance(value, (list, tuple)) or len(value) != length:
        raise refused(where, f"must hold {length} values", value)
    return value


def height_width(where: str, value: object) -> tuple[int, int]:
    """Return ``value`` as (height, width) in pixels; an integer means a square."""
    if isinstance(value, Integral):
        side = pixels(where, value)
        return side, side
    height, width = sequence(f"{where}, unless it is one integer,", value, 2)
    return pixels(where, height), pixels(where, width)


def interval(
    where: str, value: object, *, above: float | None = None, upto: float | None = None
) -> tuple[float, float]:
    """Return ``value`` as (low, high) with low <= high, low > ``above`` and high <= ``upto``."""
    low, high = (number(where, bound) for bound in sequence(where, value, 2))
    if low > high:
        raise refused(where, "must be (low, high) with low <= high", value)
    if above is not None and low <= above:
        raise refused(where, f"must be above {units.exact(above)}", value)
    if upto is not None and high > upto:
        raise refused(where, f"must not exceed {units.exact(upto)}", value)
    return low, high
