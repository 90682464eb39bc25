"""Quantities, settings and resources as sentences and tables say them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mbaas import units
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
"""Resources of `mbaas.analysis.stages`, where several are named."""

NAMES = {
    **RESOURCES,
    "steps' cores": "the processor that the training steps share",
    "accelerators": "the accelerator that trials share",
    "prep": "prep (decoding and transforming)",
    "network": "the network between nodes",
    "memory": "memory that holds the cache",
    "disk": "the local disk that holds the cache",
}
"""Resources as a verdict names them, where no table or picture beside it explains them."""


def cell(resource: str) -> str:
    """Name a resource in a table."""
    return {"step": "training step", "cores": "shared cores", "disk": "local disk"}.get(resource, resource)


def none_decoded(share: float) -> str:
    """Say why no samples are kept decoded; decoding is ``share`` of prep, below 0 where it is faster than what it
    saves.
    """
    if share <= 0:
        return "samples that are decoded are prepared no faster, so none are kept decoded"
    return f"decoding is only {units.percent(share)} of prep, so no samples are kept decoded"


def either(resources: Sequence[str]) -> str:
    """Name several resources: "prep, memory or storage"."""
    *others, last = (RESOURCES[name] for name in resources)
    return f"{', '.join(others)} or {last}" if others else last


def between(quantity: Quantity) -> str:
    """Write the ends of an interval without the value and the unit: "238 to 262"; nothing if they read the same."""
    return units.interval(quantity.low, quantity.high)


def with_interval(quantity: Quantity, write: Callable[[float], str] = units.number) -> str:
    """Write a value and between what it lies: "250 (238 to 262)"."""
    interval = units.interval(quantity.low, quantity.high, write)
    return f"{write(quantity.value)} ({interval})" if interval else write(quantity.value)


def duration(quantity: Quantity) -> str:
    """Write a time and between what it lies: "4 s (3.8 s to 4.2 s)"."""
    return with_interval(quantity, units.seconds)


def setting(parameter: str, value: float) -> str:
    """Write a value of a field of `Setup` in a table: "40 MB", "2 times", "3"."""
    if "bytes" in parameter:
        return units.size(value)
    return f"{units.number(value)} times" if parameter.endswith("_factor") else units.number(value)


def amount(parameter: str, value: float) -> str:
    """Write a value of a field of `Setup` in a sentence: "4 prep workers", "2 times the measured speed"."""
    # what people count has a plural; a number of bytes or a factor says by itself what it is
    things = {"prep_workers": "prep worker", "trials": "trial", "nodes": "node"}
    if parameter in things:
        return units.counted(round(value), things[parameter])
    return setting(parameter, value) + (" the measured speed" if parameter.endswith("_factor") else "")


def sentence(clause: str) -> str:
    """Make a clause a sentence: it begins with a capital letter and ends with a full stop."""
    return f"{clause[:1].upper()}{clause[1:].rstrip('.')}."
