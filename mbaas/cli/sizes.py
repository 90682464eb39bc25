"""Sizes as people write them."""

from __future__ import annotations

import re

_PREFIXES = ("", "K", "M", "G", "T", "P")
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?)B?", re.IGNORECASE)

WANTED = "a size such as '2 GiB' or '500 MB', or a whole number of bytes"


def parse_bytes(value: object) -> int | None:
    """Bytes of ``2048``, ``"2 GiB"`` (1024**3), ``"500 MB"`` (1000**2) or ``"1.5G"``; None if it is no size."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value >= 0 else None
    match = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or (match[3] and not match[2]):
        return None
    base = 1024 if match[3] else 1000
    return round(float(match[1]) * base ** _PREFIXES.index(match[2].upper()))
