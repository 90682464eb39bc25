"""Sizes, rates and times as people write them: "120 GB", "107.7 KB", "330 MB/s", "1.6 ms"."""

from __future__ import annotations

import math
import re

_PREFIXES = ("", "K", "M", "G", "T", "P")
_PATTERN = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([KMGTP]?)(I?)B?", re.IGNORECASE)

_OF_A_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "µs": 1_000_000}
_TIME = re.compile(rf"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*({'|'.join(_OF_A_SECOND)})")

WANTED_SIZE = "a size such as '120 GB' or '2 GiB', or a number of bytes"
WANTED_RATE = "a rate such as '330 MB/s', or a number of bytes per second"
WANTED_SECONDS = "a time such as '1.6 ms' or '30 us', or a number of seconds"


def parse_size(value: object) -> float | None:
    """Bytes of ``2048``, ``"2 GiB"`` (1024**3), ``"107.7 KB"`` (1000) or ``"1.5G"``; None if it is no size."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if 0 <= value < math.inf else None
    match = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or (match[3] and not match[2]):
        return None
    return float(match[1]) * (1024 if match[3] else 1000) ** _PREFIXES.index(match[2].upper())


def parse_rate(value: object) -> float | None:
    """Bytes per second of ``"330 MB/s"``, or of a bare number; None if it is no rate."""
    if isinstance(value, str):
        size, slash, unit = value.rpartition("/")
        bare = value.replace(".", "", 1).strip().isdigit()
        return parse_size(size) if slash and unit.strip() == "s" else (float(value) if bare else None)
    return parse_size(value)


def parse_seconds(value: object) -> float | None:
    """Seconds of ``"1.6 ms"``, ``"30 us"``, ``"2 s"``, or of a bare number; None if it is no time."""
    if isinstance(value, str):
        match = _TIME.fullmatch(value.strip())
        return float(match[1]) / _OF_A_SECOND[match[2]] if match is not None else None
    return parse_size(value)
