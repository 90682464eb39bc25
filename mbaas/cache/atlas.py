"""The atlas: how blocks are cut into shares, and from where a node gets bytes that it does not have.

Everybody who must cut a block in the same way (coordinator, cache nodes, prep workers) has one, and is told every new
version of the homes before anybody uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.homes import CHUNK, Homes
from mbaas.errors import StateError
from mbaas.order import Ids, Sweep

KEPT_VERSIONS = 16
"""Older homes are forgotten; a block is staged for less long than so many changes take."""


class Share(NamedTuple):
    """The samples of a block that have one home.

    Attributes:
        home: the node where their bytes are.
        version: of the homes by which the block was cut.
    """

    home: str
    version: int


WHOLE = Share("", 0)
"""All samples of a block."""


class Wanted(NamedTuple):
    """A share of a block, which somebody wants or will want."""

    block: int
    share: Share = WHOLE


@dataclass(frozen=True, eq=False)
class Holders:
    """Where samples were kept in memory when homes changed.

    Attributes:
        nodes: ids of the nodes.
        index: int16[samples of the dataset], index into ``nodes``; -1 where a sample was kept nowhere.
    """

    nodes: tuple[str, ...]
    index: NDArray[np.int16]


class Holdings(NamedTuple):
    """What one node keeps: the newest version of homes that it knows (0 for none), and int64[k] samples, ascending."""

    version: int
    sample_ids: Ids


@dataclass(frozen=True, eq=False)
class Survey:
    """What a cache node must know of the others: the homes, who kept what before, and every node's cache node."""

    homes: Homes
    holders: Holders | None
    caches: dict[str, Any]


class Atlas:
    """Homes of several versions.

    Args:
        sweep: the order.
        node: the node whose view this is; "" for one that keeps nothing.

    Attributes:
        newest: the homes by which blocks are cut now; None before the first, when one node has everything.
    """

    def __init__(self, sweep: Sweep, node: str = "") -> None:
        self._sweep, self._node = sweep, node
        self._versions: dict[int, Homes] = {}
        self._holders: Holders | None = None
        self.newest: Homes | None = None

    def add(self, homes: Homes, holders: Holders | None = None) -> None:
        """Take in a version; samples that moved since are fetched from ``holders`` once."""
        self._versions[homes.version] = homes
        self.newest = self._versions[max(self._versions)]
        self._holders = holders
        while len(self._versions) > KEPT_VERSIONS:
            del self._versions[min(self._versions)]

    # ---- cutting ----

    def knows(self, share: Share) -> bool:
        """Whether the share's version is known."""
        return share == WHOLE or share.version in self._versions

    def shares(self, block: int) -> tuple[Share, ...]:
        """The shares that a block is cut into now, in the order of their homes; none is empty."""
        homes = self.newest
        if homes is None:
            return (WHOLE,)
        if len(homes.hosts) == 1:
            return (Share(homes.nodes[0], homes.version),)
        present = np.unique(homes.of(self._sweep.sample_ids(block)))
        return tuple(Share(homes.nodes[index], homes.version) for index in present.tolist())

    def rows(self, wanted: Wanted) -> NDArray[np.int64] | None:
        """Which rows of the block the share has, ascending: int64[k]; None for all.

        Raises:
            StateError: the share's version is not known here (any more).
        """
        if wanted.share == WHOLE:
            return None
        if not self.knows(wanted.share):
            raise StateError(f"homes of version {wanted.share.version} are not known, those of {[*self._versions]} are")
        homes = self._versions[wanted.share.version]
        if len(homes.hosts) == 1:
            return None
        return np.flatnonzero(homes.of(self._sweep.sample_ids(wanted.block)) == homes.index(wanted.share.home))

    def ids(self, wanted: Wanted) -> Ids:
        """The samples of a share, in order: int64[k]."""
        ids, rows = self._sweep.sample_ids(wanted.block), self.rows(wanted)
        return ids if rows is None else ids[rows]

    # ---- the view of one node ----

    def own(self, block: int) -> Wanted:
        """This node's own share of a block; it may be empty."""
        return Wanted(block, WHOLE if self.newest is None else Share(self._node, self.newest.version))

    def admits(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """bool[n], which samples this node is to keep."""
        homes = self.newest
        if homes is None:
            return np.ones(len(sample_ids), np.bool_)
        home, kept = homes.homes_and_keeps(sample_ids)
        return kept & (home == homes.index(self._node))

    def is_home(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """bool[n], which samples have their home on this node, kept in memory or not."""
        if self.newest is None:
            return np.ones(len(sample_ids), np.bool_)
        return self.newest.of(sample_ids) == self.newest.index(self._node)

    def sources(self, sample_ids: Ids) -> NDArray[np.int16]:
        """int16[n], index of the peer (see `peer`) that may still have the sample in memory; -1 for storage."""
        if self._holders is None:
            return np.full(len(sample_ids), -1, np.int16)
        index = self._holders.index[sample_ids]
        me = self._holders.nodes.index(self._node) if self._node in self._holders.nodes else -1
        return np.where(index == me, np.int16(-1), index)

    def elsewhere(self) -> Ids:
        """The samples that this node is to keep and that other nodes may still have in memory, ascending."""
        if self._holders is None:
            return np.empty(0, np.int64)
        held = np.flatnonzero(self._holders.index >= 0)
        parts = np.array_split(held, -(-len(held) // CHUNK) or 1)
        return np.concatenate([ids[self.admits(ids) & (self.sources(ids) >= 0)] for ids in parts])

    def peer(self, source: int) -> str:
        """The node of a source."""
        assert self._holders is not None
        return self._holders.nodes[source]
