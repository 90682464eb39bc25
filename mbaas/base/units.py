"""Parse and format sizes, rates, times and fractions.

Files, options and the command line share one grammar (`parse_bytes`, `parse_bytes_per_s`, `parse_seconds`). Messages,
tables and reports format each kind of number in one way (`size`, `rate`, `seconds`, `percent`, ...). Decimal prefixes
are powers of 1000 ("500 MB"), binary ones of 1024 ("2 GiB"); output is always decimal.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_PREFIXES = ("", "k", "M", "G", "T", "P")
_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)"
_SIZE = re.compile(rf"{_NUMBER}\s*(?:([KMGTP])(I?))?B?", re.IGNORECASE)
_TIME = re.compile(rf"{_NUMBER}\s*([a-zµ]*)")
_SECONDS_IN = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0} | dict.fromkeys(
    ("d", "days"), 86400.0
)

_BOUNDS_IN_JSON = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""pydantic's name of a bound -> JSON Schema's name."""

WANTED_BYTES = "a size such as '2 GiB' or '500 MB', or a whole number of bytes, 0 or more"
WANTED_BYTES_PER_S = "a rate such as '330 MB/s', or a number of bytes per second, 0 or more"
WANTED_SECONDS = "a time such as '30 s', '1.6 ms' or '2 min', or a number of seconds, 0 or more"


def parse_bytes(value: object) -> int | None:
    """Parse ``2048``, ``"2 GiB"`` (1024**3), ``"500 MB"`` (1000**2) or ``"1.5G"``; None if it is not a size.

    "1.5 kB" is a size, half a byte is not.
    """
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        number = float(match[1]) * _factor(match)
        return round(number) if math.isfinite(number) and (match[2] or number.is_integer()) else None
    plain = _plain(value)
    return int(plain) if plain is not None and plain.is_integer() else None


def parse_bytes_per_s(value: object) -> float | None:
    """Parse ``"330 MB/s"``, the same without "/s", or a number; None if it is not a rate.

    Infinity is valid, for unlimited rates.
    """
    if value == math.inf:
        return math.inf
    if not isinstance(value, str):
        return _plain(value)
    match = _SIZE.fullmatch(re.sub(r"\s*/\s*s$", "", value.strip()))
    return _finite(float(match[1]) * _factor(match)) if match is not None else None


def parse_seconds(value: object) -> float | None:
    """Parse ``"1.6 ms"``, ``"30 us"``, ``"2 min"``, ``"1 h"`` or a number of seconds; None if it is not a time."""
    if not isinstance(value, str):
        return _plain(value)
    match = _TIME.fullmatch(value.strip())
    if match is None or match[2] not in _SECONDS_IN:
        return None
    return _finite(float(match[1]) * _SECONDS_IN[match[2]])


def _factor(match: re.Match[str]) -> int:
    letter = match[2].upper().replace("K", "k") if match[2] else ""
    return (1024 if match[3] else 1000) ** _PREFIXES.index(letter)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _plain(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        return None
    return float(value)


@dataclass(frozen=True)
class Unit:
    """Annotation of a pydantic field that accepts strings with units; ``parse`` returns None for invalid ones.

    Many modules import this one, so pydantic is only imported when a field is built.
    """

    wanted: str
    parse: Callable[[object], float | None]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import PydanticCustomError, core_schema

        def read(value: object) -> float:
            number = self.parse(value)
            if number is None:
                raise PydanticCustomError("unit", "must be {wanted}", {"wanted": self.wanted})
            return number

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # For values read by a function, pydantic checks bounds by functions and exports them under its own names.
        number = {_BOUNDS_IN_JSON.get(key, key): value for key, value in handler(schema).items()}
        if "exclusiveMinimum" not in number:
            number = {"minimum": 0, **number}  # no parser accepts a negative number
        return {"anyOf": [number, {"type": "string"}], "description": self.wanted}


BYTES = Unit(WANTED_BYTES, parse_bytes)

Bytes = Annotated[int, BYTES]
BytesPerS = Annotated[float, Unit(WANTED_BYTES_PER_S, parse_bytes_per_s)]
Seconds = Annotated[float, Unit(WANTED_SECONDS, parse_seconds)]


def number(value: float) -> str:
    """Format with three significant digits and thousands separators: "0.0123", "4.5", "12,300"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, digits)}f}".rstrip("0").rstrip(".") if digits > 0 else f"{rounded:,.0f}"


def exact(value: float) -> str:
    """Format all digits, for bounds and configured values: "0.05", "2,147,483,647"."""
    if isinstance(value, float):
        value = float(f"{value:.12g}")  # 0.1 + 0.2 has noise in its last digits
    return f"{value:,}".removesuffix(".0")


def count(value: float) -> str:
    return f"{value:,.0f}"


def counted(amount: int, thing: str) -> str:
    """Format a count with its noun: "1 worker", "3,000 workers"."""
    return f"{amount:,} {thing}" + ("" if amount == 1 else "s")


def some(names: Sequence[str], most: int = 8) -> str:
    """Format the first names, and the number of the others: "cat, dog and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def size(size_bytes: float) -> str:
    """Format bytes: "812 B", "9.63 MB", "40 GB"."""
    return _scaled(size_bytes, "B")


def rate(bytes_per_s: float) -> str:
    """Format bytes per second: "330 MB/s"."""
    return _scaled(bytes_per_s, "B/s")


def seconds(value: float) -> str:
    """Format a length of time: "30 µs", "1.6 ms", "41 s", "12 min", "7.5 h", "3.2 days"."""
    if value < 1000 and value % 1 == 0 and value % 6:  # a configured limit: "130 s", not "2.17 min"
        return f"{value:.0f} s"
    for length, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * length:  # "90 s" is clearer than "1.5 min"
            return f"{number(value / length)} {unit}"
    for length, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * length or value == 0:  # "1 s" instead of "1,000 ms"
            return f"{number(value / length)} {unit}"
    return f"{number(value * 1e6)} µs"


def duration(value: float, *, parts: int = 2) -> str:
    """Format seconds in mixed units: "12 s", "3 min 05 s", "2 h 07 min"; with one part "3 min", "2 h"."""
    for unit, length, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if value >= length:
            rest = f" {value % length // part:02.0f} {below}" if parts > 1 else ""
            return f"{value // length:.0f} {unit}{rest}"
    return f"{value // 1:.0f} s"


def percent(fraction: float, *, signed: bool = False) -> str:
    """Format a fraction of 1: "12 %", "0.4 %", with a sign "+12 %". Small values other than zero keep a decimal."""
    value = 100 * fraction
    decimals = 0 if value == 0 or abs(value) >= 9.95 else 1
    return f"{value:{'+' if signed else ''}.{decimals}f} %"


def interval(low: float, high: float, write: Callable[[float], str] = number) -> str:
    """Format the range of a figure: "21 s to 25 s"; empty if both ends look the same."""
    ends = write(low), write(high)
    return "" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _scaled(value: float, unit: str) -> str:
    for power, prefix in enumerate(_PREFIXES):
        scaled = value / 1000**power
        if abs(scaled) < 999.5 or prefix == _PREFIXES[-1]:  # 999.5 would be rounded to 1,000
            return f"{number(scaled)} {prefix}{unit}"
    raise AssertionError("the last prefix takes every value")
