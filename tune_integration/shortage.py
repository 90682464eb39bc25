"""The reason why no trial of a search can start: requested resources against those held by feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]
"""Quantities by Ray's names: "CPU", "GPU", and the cluster's custom resources."""

HELD_BY_FEEDS = (("CPU",), ("GPU",), ("CPU", "GPU"))
"""Resources that trials may lack because prep workers hold them: one kind, or both."""

ROUNDING = 1e-6
"""Ray counts in ten thousandths, and returns floats."""


@dataclass(frozen=True)
class Node:
    """Total and free resources of a node."""

    total: Resources
    free: Resources


def why_none_starts(
    bundles: Sequence[Resources],
    nodes: Sequence[Node],
    held: Mapping[str, Resources],
    *,
    asks: str = "each trial requests",
) -> str | None:
    """Return a sentence if feeds hold the resources that trials need; None if they do not, or if the cluster is too
    small.

    Args:
        bundles: resources requested by a trial; all of a bundle must be free on one node.
        nodes: of the cluster.
        held: feed -> resources reserved by its prep workers.
        asks: subject and verb for the request.
    """
    if _fit(bundles, [node.free for node in nodes]):
        return None
    # Resources that would suffice if they were all free; feeds hold no other kinds.
    lacking = next((names for names in HELD_BY_FEEDS if _fit(bundles, [_with_all(node, names) for node in nodes])), ())
    lacks = [lack for name in lacking if (lack := _lack(name, bundles, nodes, held, asks))]
    if not lacks:
        return None
    return f"{'; '.join(lacks)}: serve the feeds with fewer prep workers, or reduce the resources of each trial"


def _with_all(node: Node, names: Sequence[str]) -> Resources:
    return {**node.free, **{name: node.total.get(name, 0.0) for name in names}}


def _lack(
    name: str, bundles: Sequence[Resources], nodes: Sequence[Node], held: Mapping[str, Resources], asks: str
) -> str | None:
    """Return a clause with the shortage of one resource and the feeds that hold it; None if no feed does."""
    holders = [f"{feed!r} {its[name]:g}" for feed, its in sorted(held.items()) if its.get(name, 0.0) > 0]
    if not holders:
        return None
    largest = max(bundles, key=lambda bundle: bundle.get(name, 0.0))
    asked = f"{sum(bundle.get(name, 0.0) for bundle in bundles):g} {name}"
    if len(bundles) > 1:
        asked += f" in {len(bundles)} bundles of at most {largest[name]:g}"
    free = sum(node.free.get(name, 0.0) for node in nodes)
    total = sum(node.total.get(name, 0.0) for node in nodes)
    return (
        f"{asks} {asked}, {free:g} of {total:g} are free{_most_on_one(name, largest, nodes)}, "
        f"and prep workers of feeds hold {' and '.join(holders)}"
    )


def _most_on_one(name: str, bundle: Resources, nodes: Sequence[Node]) -> str:
    # Free amounts on several nodes cannot be combined for one bundle.
    if len(nodes) == 1:
        return ""
    others = {other: amount for other, amount in bundle.items() if other != name and amount > 0}
    rooms = [node.free.get(name, 0.0) for node in nodes if _has(node.free, others)]
    beside = "".join(f" with {amount:g} {other}" for other, amount in sorted(others.items()))
    return f", at most {max(rooms, default=0.0):g} on one node{beside}"


def _fit(bundles: Sequence[Resources], rooms: Sequence[Resources]) -> bool:
    """Return whether all bundles fit: the largest first, each where the least is left."""
    left = [dict(room) for room in rooms]
    for bundle in sorted(bundles, key=_size, reverse=True):
        fitting = [room for room in left if _has(room, bundle)]
        if not fitting:
            return False
        room = min(fitting, key=_size)
        for name, amount in bundle.items():
            room[name] = room.get(name, 0.0) - amount
    return True


def _size(what: Resources) -> tuple[float, float, float]:
    # GPUs first: they are few, and bundles without GPUs should leave these nodes free
    return what.get("GPU", 0.0), what.get("CPU", 0.0), sum(what.values())


def _has(room: Resources, wanted: Resources) -> bool:
    return all(room.get(name, 0.0) >= amount - ROUNDING for name, amount in wanted.items())
