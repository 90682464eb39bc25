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


def number(where: str, value: object, *, least: float = -math.inf) -> float:
    """Return ``value`` as a finite float of at least ``least``."""
    # True is a number in Python, but a mistake here.
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        result = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:  # an integer with hundreds of digits
        result = math.inf
    if not math.isfinite(result):
        raise refused(where, "must be a finite number", value)
    if result < least:
        raise refused(where, f"must be at least {units.exact(least)}", value)
    return result


def fraction(where: str, value: object) -> float:
    """Return ``value`` as a float in [0, 1]."""
    result = number(where, value)
    if not 0.0 <= result <= 1.0:
        raise refused(where, "must be in [0, 1]", value)
    return result


def level(where: str, value: object) -> float:
    """Return ``value`` as a level of a channel, in [0, 255]."""
    result = number(where, value)
    if not 0.0 <= result <= 255.0:
        raise refused(where, "must be in [0, 255]", value)
    return result


def whole(where: str, value: object, *, least: int = 1, most: int = 2**40, unit: str = "") -> int:
    """Return ``value`` as an int in [least, most]; ``unit``, such as " of pixels", is for the message."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or not least <= int(value) <= most:  # type: ignore[call-overload]
        raise refused(where, f"must be a whole number{unit} in [{least:,}, {most:,}]", value)
    return int(value)  # type: ignore[call-overload]


def pixels(where: str, value: object) -> int:
    """Return ``value`` as a length in pixels, at least 1."""
    return whole(where, value, most=MOST_PIXELS, unit=" of pixels")


def one_of(where: str, value: object, *, names: Sequence[str]) -> object:
    if value not in names:
        *others, last = (f'"{name}"' for name in names)
        raise refused(where, f"must be {', '.join(others)} or {last}" if others else f"must be {last}", value)
    return value


def named(where: str, value: object, *, names: Sequence[str]) -> object:
    """Return ``value``, one of ``names``; torchvision's enumerations have them as values."""
    return one_of(where, getattr(value, "value", value), names=names)


def interpolation(where: str, value: object) -> object:
    return named(where, value, names=("nearest", "bilinear"))


def padding_mode(where: str, value: object) -> object:
    return one_of(where, value, names=("constant", "edge", "reflect", "symmetric"))


def flag(where: str, value: object) -> object:
    if not isinstance(value, bool):
        raise refused(where, "must be true or false", value)
    return value


def lengths(where: str, value: object) -> int | tuple[int, ...]:
    """Return ``value`` as a length, or as a tuple of lengths, at least one."""
    if not isinstance(value, (list, tuple)):
        return whole(where, value)
    if not value:
        raise refused(where, "must have a length for at least one axis", value)
    return tuple(whole(where, length) for length in value)


def sequence(where: str, value: object, length: int | None) -> Sequence[object]:
    """Return ``value`` if it is a list or tuple with ``length`` items, or any number of them if it is None."""
    if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
        raise refused(where, f"must hold {length} values", value)
    return value


def numbers(where: str, value: object, *, length: int | None = None) -> tuple[float, ...]:
    """Return ``value`` as a tuple of ``length`` finite floats; None: at least one."""
    if length is None and (not isinstance(value, (list, tuple)) or not value):
        raise refused(where, "must be a list of numbers, at least one", value)
    return tuple(number(where, each) for each in sequence(where, value, length))


def fractions(where: str, value: object, *, length: int) -> tuple[float, ...]:
    """Return ``value`` as a tuple of ``length`` floats in [0, 1]."""
    return tuple(fraction(where, each) for each in sequence(where, value, length))


def height_width(where: str, value: object) -> tuple[int, int]:
    """Return ``value`` as (height, width) in pixels; an integer means a square."""
    if isinstance(value, Integral):
        side = pixels(where, value)
        return side, side
    height, width = sequence(f"{where}, unless it is one integer,", value, 2)
    return pixels(where, height), pixels(where, width)


def side_or_size(where: str, value: object) -> int | tuple[int, int]:
    """Return ``value`` as the length of a side in pixels, or as (height, width)."""
    return pixels(where, value) if isinstance(value, Integral) else height_width(where, value)


def colour(where: str, value: object) -> tuple[float, float, float]:
    """Return ``value`` as levels of red, green and blue in [0, 255]; a number is the level of all three."""
    levels = value if isinstance(value, (list, tuple)) else (value, value, value)
    red, green, blue = sequence(f"{where}, unless it is one number,", levels, 3)
    return level(where, red), level(where, green), level(where, blue)


def paddings(where: str, value: object) -> tuple[int, ...]:
    """Return ``value`` as (left, top, right, bottom) in pixels; one number is for all sides, two for pairs of them."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(given) not in (1, 2, 4):
        raise refused(where, "must hold one, two or four values", value)
    pads = [whole(where, each, least=0, most=MOST_PIXELS, unit=" of pixels") for each in given]
    return tuple(pads * (4 // len(pads)))


def spread(where: str, value: object) -> tuple[float, float]:
    """Return ``value`` as (low, high); a number x means (-x, x)."""
    if isinstance(value, (list, tuple)):
        return interval(where, value)
    widest = number(where, value, least=0.0)
    return 0.0 - widest, widest  # not -widest: the repr of -0.0 differs from 0.0, and so would the fingerprint


def interval(
    where: str, value: object, *, above: float = -math.inf, least: float = -math.inf, upto: float = math.inf
) -> tuple[float, float]:
    """Return ``value`` as (low, high) with low <= high, low > ``above``, low >= ``least`` and high <= ``upto``."""
    low, high = numbers(where, value, length=2)
    if low > high:
        raise refused(where, "must be (low, high) with low <= high", value)
    if low <= above:
        raise refused(where, f"must be above {units.exact(above)}", value)
    if low < least:
        raise refused(where, f"must be at least {units.exact(least)}", value)
    if high > upto:
        raise refused(where, f"must not exceed {units.exact(upto)}", value)
    return low, high
