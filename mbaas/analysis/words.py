"""Numbers as sentences say them."""

from __future__ import annotations

import math

from rich.filesize import decimal

from mbaas.analysis.quantity import Quantity


def number(value: float) -> str:
    """Three significant digits, thousands apart: "0.0123", "4.5", "12,300"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, digits)
    return f"{rounded:,.{max(0, digits)}f}".rstrip("0").rstrip(".") if digits > 0 else f"{rounded:,.0f}"


def size(size_bytes: float) -> str:
    """Decimal units: "1.5 GB"."""
    return f"{size_bytes:.0f} B" if size_bytes < 1000 else decimal(round(size_bytes))


def seconds(value: float) -> str:
    """Of an epoch or a job: "41 s", "12 min", "7.5 h", "3.2 days"."""
    for length, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * length:
            return f"{number(value / length)} {unit}"
    return f"{number(value)} s"


def interval(quantity: Quantity) -> str:
    """Between what a number of seconds lies: "21 s to 25 s"; empty if it is known exactly."""
    low, high = seconds(quantity.low), seconds(quantity.high)
    return "" if low == high else f"{low} to {high}"


def share(fraction: float) -> str:
    """Of 1: "12 %", "0.4 %"."""
    percent = 100 * fraction
    return f"{percent:.0f} %" if percent == 0 or percent >= 9.95 else f"{percent:.1f} %"


def counted(amount: int, thing: str) -> str:
    """ "1 worker", "3 workers"."""
    return f"{amount:,} {thing}" + ("" if amount == 1 else "s")
