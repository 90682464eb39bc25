"""Quantities, settings and resources as text for sentences and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mbaas.base import units
from mbaas.model.quantity import Quantity

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
"""Names of the resources in `mbaas.model.pace`, for lists of several."""

NAMES = {
    **RESOURCES,
    "steps' cores": "the processor that the training steps share",
    "accelerators": "the accelerator that trials share",
    "prep": "prep (decoding and transforming)",
    "network": "the network between nodes",
    "memory": "memory that holds the cache",
    "disk": "the local disk that holds the cache",
}
"""Longer names of resources for a verdict, which has no table or chart to explain them."""


def cell(resource: str) -> str:
    return {"step": "training step", "cores": "shared cores", "disk": "local disk"}.get(resource, resource)


def none_decoded(share: float) -> str:
    """Return the reason why no samples are cached decoded.

    ``share`` is decoding's share of prep; it is below 0 if decoded samples take longer to prepare.
    """
    if share <= 0:
        return "samples that are decoded are prepared no faster, so none are kept decoded"
    return f"decoding is only {units.percent(share)} of prep, so no samples are kept decoded"


def either(resources: Sequence[str]) -> str:
    """Format as in "prep, memory or storage"."""
    *others, last = (RESOURCES[name] for name in resources)
    return f"{', '.join(others)} or {last}" if others else last


def between(quantity: Quantity) -> str:
    """Format as in "238 to 262", without unit; empty if both ends look the same."""
    return units.interval(quantity.low, quantity.high)


def with_interval(quantity: Quantity, write: Callable[[float], str] = units.number) -> str:
    """Format as in "250 (238 to 262)"."""
    interval = units.interval(quantity.low, quantity.high, write)
    return f"{write(quantity.value)} ({interval})" if interval else write(quantity.value)


def duration(quantity: Quantity) -> str:
    """Format as in "4 s (3.8 s to 4.2 s)"."""
    return with_interval(quantity, units.seconds)


def setting(parameter: str, value: float) -> str:
    """Format a parameter's value for a table: "40 MB", "330 MB/s", "2 times", "1,281,167"."""
    if parameter.endswith("_per_s"):
        return units.rate(value)
    if parameter.endswith("_bytes"):
        return units.size(value)
    return f"{units.number(value)} times" if parameter.endswith("_factor") else units.exact(value)


def amount(parameter: str, value: float) -> str:
    """Format a `Setup` field for a sentence: "4 prep workers", "2 times the measured speed"."""
    # counts need a noun; bytes and factors are clear without one
    things = {"prep_workers": "prep worker", "trials": "trial", "pipelines": "pipeline", "nodes": "node"}
    if parameter in things:
        return units.counted(round(value), things[parameter])
    return setting(parameter, value) + (" the measured speed" if parameter.endswith("_factor") else "")


def sentence(clause: str) -> str:
    return f"{clause[:1].upper()}{clause[1:].rstrip('.')}."
