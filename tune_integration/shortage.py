"""Why no trial of a search can start: what each asks for, against what feeds hold of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Resources = Mapping[str, float]
"""Quantities by Ray's names: "CPU", "GPU", and what a cluster has besides."""

ROUNDING = 1e-6
"""Ray counts in ten thousandths, and hands out floats."""


@dataclass(frozen=True)
class Node:
    """What a node of the cluster has, and what of it nobody has taken."""

    total: Resources
    free: Resources


def why_none_starts(bundles: Sequence[Resources], nodes: Sequence[Node], held: Mapping[str, Resources]) -> str | None:
    """Say in a sentence that feeds hold what trials need; None if they do not, or if nobody could give it.

    Args:
        bundles: what a trial asks for; each bundle must be free on one node.
        nodes: of the cluster.
        held: feed -> what its prep workers reserve.
    """
    lacks = [lack for name in ("CPU", "GPU") if (lack := _lack(name, bundles, nodes, held))]
    if not lacks:
        return None
    return f"{'; '.join(lacks)}: serve the feeds with fewer prep workers, or give each trial less"


def _lack(name: str, bundles: Sequence[Resources], nodes: Sequence[Node], held: Mapping[str, Resources]) -> str | None:
    """Say of one resource that too little of it is free, and which feeds hold some of it."""
    asked = [bundle.get(name, 0.0) for bundle in bundles]
    totals, free = [node.total.get(name, 0.0) for node in nodes], [node.free.get(name, 0.0) for node in nodes]
    holders = [f"{feed!r} {its[name]:g}" for feed, its in sorted(held.items()) if its.get(name, 0.0) > 0]
    if _fits(asked, free) or not _fits(asked, totals) or not holders:
        return None
    # A bundle must be free on one node: what lies on many adds up to nothing.
    where = f", at most {max(free):g} on one node" if len(nodes) > 1 else ""
    return (
        f"each trial asks for {sum(asked):g} {name}, {sum(free):g} of {sum(totals):g} are free{where}, "
        f"and prep workers of feeds hold {' and '.join(holders)}"
    )


def _fits(asked: Sequence[float], there: Sequence[float]) -> bool:
    """Return whether there is enough, as far as sums and the largest bundle tell."""
    return sum(asked) <= sum(there) + ROUNDING and max(asked, default=0.0) <= max(there, default=0.0) + ROUNDING
