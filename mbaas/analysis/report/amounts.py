"""Rates, shares and settings as the report writes them."""

from __future__ import annotations

from mbaas.analysis import words
from mbaas.analysis.quantity import Quantity

RESOURCES = {
    "step": "the training step",
    "steps' cores": "the processor that steps share",
    "accelerators": "the accelerators",
    "prep": "prep",
    "cores": "the processor that prep and training share",
    "network": "the network",
    "memory": "memory",
    "disk": "the local disk",
    "storage": "storage",
}
"""Those of `mbaas.analysis.stages` in a sentence, shorter than `mbaas.analysis.answers.NAMES`."""

SHORT = {
    **{name: name for name in RESOURCES},
    "step": "training step",
    "cores": "shared cores",
    "disk": "local disk",
}
"""The same in a table."""


def between(quantity: Quantity) -> str:
    """The ends of an interval without a unit: "238 to 262"; empty if they read the same."""
    low, high = words.number(quantity.low), words.number(quantity.high)
    return "" if low == high else f"{low} to {high}"


def with_interval(quantity: Quantity, *, unit: str = "") -> str:
    """ "250 (238 to 262)", with the unit after the value."""
    return _bracketed(f"{words.number(quantity.value)}{unit}", between(quantity))


def seconds(quantity: Quantity) -> str:
    """ "4 s (3.8 s to 4.2 s)"."""
    return _bracketed(words.seconds(quantity.value), words.interval(quantity))


def setting(parameter: str, value: float) -> str:
    """A value of a field of `Setup`: "40.0 MB", "2 times", "3"."""
    if "bytes" in parameter:
        return words.size(value)
    return f"{words.number(value)} times" if parameter.endswith("_factor") else words.number(value)


def amount(parameter: str, value: float) -> str:
    """The same in a sentence: "4 prep workers", "2 times the measured speed"."""
    things = {"prep_workers": "prep worker", "trials": "trial", "nodes": "node"}
    if parameter in things:
        return words.counted(round(value), things[parameter])
    return setting(parameter, value) + (" the measured speed" if parameter.endswith("_factor") else "")


def sentence(clause: str) -> str:
    """A clause as a sentence: it begins with a capital letter and ends with a full stop."""
    return f"{clause[:1].upper()}{clause[1:].rstrip('.')}."


def listed(names: list[str]) -> str:
    """ "prep", "prep or storage", "prep, memory or storage"."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _bracketed(value: str, interval: str) -> str:
    return f"{value} ({interval})" if interval else value
