"""Placement: which node is the home of a sample, and how blocks are cut into parts by it.

A sample's home keeps its bytes and prepares it. Homes come from weighted rendezvous hashing: every sample draws a
number on every node, and its home is the node where it draws the best. Nodes get samples in proportion to their
weights; a node that comes takes samples from the others only, a node that goes gives its own to the others only.
Nothing is stored for a sample: its home is computed from its id.

Memory is bounded: a node takes the samples that draw best there until its bytes are full, the others go to the node
where they draw second best, and so on (rendezvous hashing with bounded loads). One number tells what a node takes, the
worst draw that it still accepts. So all memories together fill up before any sample is left out, and every node knows
what every other keeps.

The coordinator, the cache nodes and the prep workers must all cut a block in the same way. Each has a
`PlacementHistory`, and is told of every new version before anybody uses it.

The hash: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998). The weights: Schindelhauer
and Schomaker, "Weighted Distributed Hash Tables" (2005), logarithmic method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError, StateError
from mbaas.order import Ids, SampleOrder, uniforms

# ---- homes of samples ----

Lengths = Callable[[Ids], NDArray[np.int64]]
"""Bytes of samples: int64[n] -> int64[n]."""

BINS = 1 << 16
"""A node's limit is found to this resolution: at most 1/65,536 of its share stays empty."""

CHUNK = 1 << 18
"""Samples that are looked at together: bounds memory."""

LOOKED_AT = 1 << 21
"""Of larger datasets, limits are found from so many samples."""

MARGIN = 0.995
"""Of larger datasets, so much of the memory is planned for: the samples that were not looked at may be longer."""


@dataclass(frozen=True)
class NodeWeight:
    """A node that may be the home of samples.

    Attributes:
        node: its id.
        cache_bytes: for raw samples.
        weight: its speed of preparing, in any unit common to all; above 0.
    """

    node: str
    cache_bytes: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0 or self.cache_bytes < 0:
            raise ConfigError(f"weight must be above 0 and cache_bytes at least 0, got {self}")


@dataclass(frozen=True)
class Placement:
    """Where samples live; made by `place_samples`.

    Attributes:
        version: grows with every change of hosts.
        hosts: in the order of their ids; a home is an index into them.
        limits: of each host: the worst draw that it keeps, infinite if it keeps all that come.
    """

    version: int
    node_weights: tuple[NodeWeight, ...]
    limits: tuple[float, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the hosts."""
        return tuple(host.node for host in self.node_weights)

    def index(self, node: str) -> int:
        """Index of a host; -1 if the node is none."""
        return self.nodes.index(node) if node in self.nodes else -1

    def of(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Homes of samples: int64[n] -> int64[n], indices into ``node_weights``."""
        return self.homes_and_kept(sample_ids)[0]

    def kept(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """bool[n], whether the sample's home keeps it in memory, once it was read."""
        return self.homes_and_kept(sample_ids)[1]

    def homes_and_kept(self, sample_ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """`of` and `kept` in one go. A sample that nobody keeps has the host where it draws best as home."""
        if len(self.node_weights) == 1:
            return np.zeros(len(sample_ids), np.int64), np.ones(len(sample_ids), np.bool_)
        draws = _draws(self.node_weights, sample_ids)
        taken = np.where(draws <= np.array(self.limits), draws, np.inf)
        kept = np.isfinite(taken.min(axis=1))
        return np.where(kept, taken.argmin(axis=1), draws.argmin(axis=1)), kept


def place_samples(node_weights: Sequence[NodeWeight], *, num_samples: int, lengths: Lengths, version: int) -> Placement:
    """Find the limits by which every host's memory suffices.

    Args:
        hosts: at least one, each node once.
        num_samples: of the dataset.
        lengths: bytes of its samples.
        version: of the result.

    Raises:
        ConfigError: no hosts, or a node twice.
    """
    node_weights = tuple(sorted(node_weights, key=lambda host: host.node))
    if not node_weights or len({host.node for host in node_weights}) != len(node_weights):
        raise ConfigError(
            f"homes need at least one host and each node once, got {[host.node for host in node_weights]}"
        )
    if len(node_weights) == 1:  # nothing to choose: its cache admits what comes first
        return Placement(version, node_weights, (np.inf,))
    step = -(-num_samples // LOOKED_AT)
    budgets = np.array([host.cache_bytes for host in node_weights]) * (MARGIN if step > 1 else 1.0) / step
    placement = Placement(version, node_weights, (np.inf,) * len(node_weights))
    while (limits := _tightened(placement, budgets, num_samples, step, lengths)) != placement.limits:
        placement = Placement(version, node_weights, limits)
    return placement


def _tightened(
    placement: Placement, budgets: NDArray[np.float64], num_samples: int, step: int, lengths: Lengths
) -> tuple[float, ...]:
    """Limits that are lower where a host would keep more than it has bytes for; unchanged where it fits."""
    used = _bytes_by_draw(placement, num_samples, step, lengths)
    limits = []
    for host, budget, bins, limit in zip(placement.node_weights, budgets, used, placement.limits, strict=True):
        filled = np.cumsum(bins)
        if filled[-1] <= budget:
            limits.append(limit)
        else:
            limits.append(_draw_of_bin(int(np.searchsorted(filled, budget, side="right")), host.weight))
    return tuple(limits)


def _bytes_by_draw(placement: Placement, num_samples: int, step: int, lengths: Lengths) -> NDArray[np.float64]:
    """float64[hosts, BINS]: bytes that each host keeps, by how good their draws are, best first."""
    used = np.zeros((len(placement.node_weights), BINS))
    for first in range(0, num_samples, CHUNK * step):
        ids = np.arange(first, min(first + CHUNK * step, num_samples), step, dtype=np.int64)
        home, kept = placement.homes_and_kept(ids)
        size = lengths(ids)
        for index, host in enumerate(placement.node_weights):
            mine = kept & (home == index)
            draws = _draws((host,), ids[mine])[:, 0]
            bins = np.minimum((-np.expm1(-draws * host.weight) * BINS).astype(np.int64), BINS - 1)
            used[index] += np.bincount(bins, weights=size[mine], minlength=BINS)
    return used


def _draw_of_bin(number: int, weight: float) -> float:
    """The draw at the lower edge of a bin: all better ones lie in the bins before."""
    return float(-np.log1p(-number / BINS) / weight) if number else -1.0


def _draws(node_weights: Sequence[NodeWeight], sample_ids: Ids) -> NDArray[np.float64]:
    """float64[n, hosts], exponential with the host's weight as rate: the smallest of a row wins, and a host wins in
    proportion to its weight.
    """
    columns = [-np.log1p(-uniforms(_key(host.node), 0, sample_ids, stream=0, draws=1)[:, 0]) for host in node_weights]
    return np.stack(columns, axis=1) / np.array([host.weight for host in node_weights])


def _key(node: str) -> int:
    """A node's own seed, from its id."""
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=7).digest(), "big")


# ---- parts of blocks ----

KEPT_VERSIONS = 16
"""Older homes are forgotten; a block is staged for less long than so many changes take."""


class BlockPart(NamedTuple):
    """The samples of a block that have one home.

    Attributes:
        home: the node where their bytes are.
        version: of the homes by which the block was cut.
    """

    home: str
    version: int


WHOLE = BlockPart("", 0)
"""All samples of a block."""


class PartRequest(NamedTuple):
    """A share of a block, which somebody wants or will want."""

    block: int
    block_part: BlockPart = WHOLE


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
class PlacementUpdate:
    """What a cache node must know of the others: the homes, who kept what before, and every node's cache node."""

    placement: Placement
    holders: Holders | None
    caches: dict[str, Any]


class PlacementHistory:
    """Homes of several versions.

    Args:
        sweep: the order.
        node: the node whose view this is; "" for one that keeps nothing.

    Attributes:
        newest: the homes by which blocks are cut now; None before the first, when one node has everything.
    """

    def __init__(self, order: SampleOrder, node: str = "") -> None:
        self._order, self._node = order, node
        self._versions: dict[int, Placement] = {}
        self._holders: Holders | None = None
        self.newest: Placement | None = None

    def add(self, placement: Placement, holders: Holders | None = None) -> None:
        """Take in a version; samples that moved since are fetched from ``holders`` once."""
        self._versions[placement.version] = placement
        self.newest = self._versions[max(self._versions)]
        self._holders = holders
        while len(self._versions) > KEPT_VERSIONS:
            del self._versions[min(self._versions)]

    # ---- cutting ----

    def knows(self, block_part: BlockPart) -> bool:
        """Whether the share's version is known."""
        return block_part == WHOLE or block_part.version in self._versions

    def parts(self, block: int) -> tuple[BlockPart, ...]:
        """The shares that a block is cut into now, in the order of their homes; none is empty."""
        placement = self.newest
        if placement is None:
            return (WHOLE,)
        if len(placement.node_weights) == 1:
            return (BlockPart(placement.nodes[0], placement.version),)
        present = np.unique(placement.of(self._order.sample_ids(block)))
        return tuple(BlockPart(placement.nodes[index], placement.version) for index in present.tolist())

    def rows(self, request: PartRequest) -> NDArray[np.int64] | None:
        """Which rows of the block the share has, ascending: int64[k]; None for all.

        Raises:
            StateError: the share's version is not known here (any more).
        """
        if request.block_part == WHOLE:
            return None
        if not self.knows(request.block_part):
            raise StateError(
                f"homes of version {request.block_part.version} are not known, those of {[*self._versions]} are"
            )
        placement = self._versions[request.block_part.version]
        if len(placement.node_weights) == 1:
            return None
        return np.flatnonzero(
            placement.of(self._order.sample_ids(request.block)) == placement.index(request.block_part.home)
        )

    def ids(self, request: PartRequest) -> Ids:
        """The samples of a share, in order: int64[k]."""
        ids, rows = self._order.sample_ids(request.block), self.rows(request)
        return ids if rows is None else ids[rows]

    # ---- the view of one node ----

    def own(self, block: int) -> PartRequest:
        """This node's own share of a block; it may be empty."""
        return PartRequest(block, WHOLE if self.newest is None else BlockPart(self._node, self.newest.version))

    def admits(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """bool[n], which samples this node is to keep."""
        placement = self.newest
        if placement is None:
            return np.ones(len(sample_ids), np.bool_)
        home, kept = placement.homes_and_kept(sample_ids)
        return kept & (home == placement.index(self._node))

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
