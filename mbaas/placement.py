"""Decides which node is the home of a sample, and cuts blocks into parts by that.

A sample's home keeps its bytes and prepares it. Homes come from weighted rendezvous hashing: every sample draws a
number on every node, and its home is the node where it draws the smallest. Nodes get samples in proportion to their
weights; a node that comes takes samples from the others only, a node that goes gives its own to the others only.
Nothing is stored for a sample: its home is computed from its id.

Memory is bounded: a node takes the samples with the smallest draws until its bytes are full, the others go to the node
where their draw is second smallest, and so on (rendezvous hashing with bounded loads). One number tells what a node
takes, the largest draw that it still accepts. So all memories together fill up before any sample is left out, and every
node knows what every other keeps.

The coordinator, the cache nodes and the prep workers must all cut a block in the same way. Each has a
`PlacementHistory`, and is told of every new version before anybody uses it.

The hash: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998). The weights: Schindelhauer
and Schomaker, "Weighted Distributed Hash Tables" (2005), logarithmic method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mbaas.errors import ConfigError, PlacementGoneError, PlacementUnknownError
from mbaas.order import Ids, SampleOrder, Shuffle, uniforms

# ---- homes of samples ----

Lengths = Callable[[Ids], NDArray[np.int64]]
"""Bytes of samples: int64[n] -> int64[n]."""

StoredIds = Callable[[Ids, int], Ids]
"""The stored samples that samples of an epoch are: see `mbaas.dataset.Dataset.stored_ids`."""

BINS = 1 << 16
"""The resolution to which a node's limit is found: at most 1/65,536 of what the node could keep stays empty."""

CHUNK = 1 << 18
"""Samples that are looked at together, which bounds the memory that this takes."""

LOOKED_AT = 1 << 21
"""Most samples from which limits are found; those of a larger dataset come from every second, third, ... sample."""

MARGIN = 0.995
"""The share of the memory that is planned for where not every sample is looked at: the others may be longer."""


class NodeWeight(Struct, frozen=True):
    """A node that may be the home of samples.

    Attributes:
        node: its id.
        cache_bytes: the most that it keeps of raw samples; at least 0.
        weight: its speed of preparing, in any unit common to all; above 0.
    """

    node: str
    cache_bytes: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0 or self.cache_bytes < 0:
            raise ConfigError(f"weight must be above 0 and cache_bytes at least 0, got {self}")


class Placement(Struct, frozen=True):
    """Where samples live; made by `place_samples`.

    Attributes:
        version: grows with every change of nodes or weights.
        node_weights: the nodes, in the order of their ids; a home is an index into them.
        limits: the largest draw that each node keeps; infinite if it keeps all that come.
    """

    version: int
    node_weights: tuple[NodeWeight, ...]
    limits: tuple[float, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Ids of the nodes."""
        return tuple(weight.node for weight in self.node_weights)

    def index(self, node: str) -> int:
        """Return the index of a node; -1 if no sample has its home there."""
        return self.nodes.index(node) if node in self.nodes else -1

    def of(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the homes of samples: int64[n] -> int64[n], indices into ``node_weights``."""
        return self.homes_and_kept(sample_ids)[0]

    def homes_and_kept(self, sample_ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return homes as `of` does, and whether they keep the samples in memory, once these were read: bool[n].

        A sample that nobody keeps is at home where its draw is smallest.
        """
        # A single node needs no draws, and no limit: its cache admits samples until it is full, as they come.
        if len(self.node_weights) == 1:
            return np.zeros(len(sample_ids), np.int64), np.ones(len(sample_ids), np.bool_)
        draws = _draws(self.node_weights, sample_ids)
        taken = np.where(draws <= np.array(self.limits), draws, np.inf)
        kept = np.isfinite(taken.min(axis=1))
        return np.where(kept, taken.argmin(axis=1), draws.argmin(axis=1)), kept


def place_samples(node_weights: Sequence[NodeWeight], *, num_samples: int, lengths: Lengths, version: int) -> Placement:
    """Find the limits by which every node's memory suffices.

    Args:
        node_weights: at least one, each node once.
        num_samples: how many the dataset has.
        lengths: gives the bytes of its samples.
        version: the version that the result gets.

    Raises:
        ConfigError: there is no node, or one twice.
    """
    node_weights = tuple(sorted(node_weights, key=lambda weight: weight.node))
    names = [weight.node for weight in node_weights]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"a placement needs at least one node and each node once, got {names}")
    if len(node_weights) == 1:
        return Placement(version, node_weights, (np.inf,))
    step = -(-num_samples // LOOKED_AT)
    budgets = np.array([weight.cache_bytes for weight in node_weights]) * (MARGIN if step > 1 else 1.0) / step
    placement = Placement(version, node_weights, (np.inf,) * len(node_weights))
    # Samples that one node turns away come to others, which may be full then: until nobody has too much. Limits only
    # ever fall, and to one of BINS values, so this ends.
    while (limits := _tightened(placement, budgets, num_samples, step, lengths)) != placement.limits:
        placement = Placement(version, node_weights, limits)
    return placement


def _tightened(
    placement: Placement, budgets: NDArray[np.float64], num_samples: int, step: int, lengths: Lengths
) -> tuple[float, ...]:
    """Lower the limits of nodes that would keep more than they have bytes for; leave those of the others."""
    used = _bytes_by_draw(placement, num_samples, step, lengths)
    limits = []
    for node, budget, bins, limit in zip(placement.node_weights, budgets, used, placement.limits, strict=True):
        filled = np.cumsum(bins)
        if filled[-1] <= budget:
            limits.append(limit)
        else:
            limits.append(_draw_of_bin(int(np.searchsorted(filled, budget, side="right")), node.weight))
    return tuple(limits)


def _bytes_by_draw(placement: Placement, num_samples: int, step: int, lengths: Lengths) -> NDArray[np.float64]:
    """Sum up the bytes that each node keeps, by how small their draws are, the smallest first: float64[nodes, BINS]."""
    used = np.zeros((len(placement.node_weights), BINS))
    for first in range(0, num_samples, CHUNK * step):
        ids = np.arange(first, min(first + CHUNK * step, num_samples), step, dtype=np.int64)
        home, kept = placement.homes_and_kept(ids)
        size = lengths(ids)
        for index, node in enumerate(placement.node_weights):
            mine = kept & (home == index)
            draws = _draws((node,), ids[mine])[:, 0]
            # The inverse of how draws are made from uniform numbers: so bins are equally likely.
            bins = np.minimum((-np.expm1(-draws * node.weight) * BINS).astype(np.int64), BINS - 1)
            used[index] += np.bincount(bins, weights=size[mine], minlength=BINS)
    return used


def _draw_of_bin(number: int, weight: float) -> float:
    """Return the draw at the lower edge of a bin: all smaller ones lie in the bins before."""
    return float(-np.log1p(-number / BINS) / weight) if number else -1.0


def _draws(node_weights: Sequence[NodeWeight], sample_ids: Ids) -> NDArray[np.float64]:
    """Draw a number for each sample on each node: float64[n, nodes].

    Draws are exponential with the node's weight as rate. So the smallest of a row is a node's in proportion to its
    weight, and a node that comes or goes changes no other draw.
    """
    columns = [
        -np.log1p(-uniforms(_key(node.node), 0, sample_ids, substream=0, draws=1)[:, 0]) for node in node_weights
    ]
    return np.stack(columns, axis=1) / np.array([node.weight for node in node_weights])


def _key(node: str) -> int:
    """Derive a node's own seed from its id; not by Python's hash, which differs from process to process."""
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=7).digest(), "big")


# ---- parts of blocks ----

KEPT_VERSIONS = 16
"""The newest versions of a placement that are kept: no block stays staged for as long as this many changes take."""


class BlockPart(NamedTuple):
    """The samples of a block that have one home.

    Attributes:
        home: the node where their bytes are.
        version: of the placement by which the block was cut.
    """

    home: str
    version: int


WHOLE = BlockPart("", 0)
"""All samples of a block."""


class PartRequest(NamedTuple):
    """A part of a certain block, which somebody asks for or will ask for.

    Attributes:
        block: number of the block.
        block_part: which part of it.
        shuffle: of the block's epoch; None for one that is shuffled as a whole.
    """

    block: int
    block_part: BlockPart = WHOLE
    shuffle: Shuffle | None = None


class Holders(Struct, frozen=True, eq=False):
    """Where samples were kept in memory when the placement changed.

    Attributes:
        nodes: their ids.
        index: int16[samples of the dataset], index into ``nodes``; -1 where a sample was kept nowhere.
        decoded_bytes: int64[samples of the dataset], of samples that were kept decoded, 0 for others; None if all are
            others.
    """

    nodes: tuple[str, ...]
    index: NDArray[np.int16]
    decoded_bytes: NDArray[np.int64] | None = None


class Holdings(NamedTuple):
    """What one node keeps.

    Attributes:
        version: of the newest placement that it knows; 0 if it knows none.
        sample_ids: int64[k], ascending.
        decoded_bytes: int64[k], of those that are kept decoded, 0 for others; None if all are others.
    """

    version: int
    sample_ids: Ids
    decoded_bytes: NDArray[np.int64] | None = None


class MovedIn(NamedTuple):
    """What a node has of the samples that others keep and that have their home there now.

    Attributes:
        samples: those that came since it was asked, and not from storage.
        left: those for which the time was too short.
    """

    samples: int = 0
    left: int = 0


class PlacementUpdate(Struct, frozen=True, eq=False):
    """What a cache node must know of the others.

    Attributes:
        placement: the new version.
        holders: who kept what before; None if nobody kept anything.
        caches: node id -> handle of its cache node.
        older: versions by which blocks may have been cut that are not made yet.
    """

    placement: Placement
    holders: Holders | None
    caches: dict[str, Any]
    older: tuple[Placement, ...] = ()


class PlacementHistory:
    """The newest versions of a placement.

    Older ones are kept, because a block that was cut by one of them may have to be made again, with the same parts.

    Args:
        order: whose blocks are cut.
        node: the node whose view this is; "" for one that keeps nothing.
        stored_ids: finds the stored samples of an order whose samples are drawn anew in each epoch. Without it such
            blocks can be cut, but nobody can tell what is in the parts. Homes are those of stored samples.

    Attributes:
        newest: the version by which blocks are cut now; None before the first, when one node has everything.
    """

    def __init__(self, order: SampleOrder, node: str = "", stored_ids: StoredIds | None = None) -> None:
        self._order, self._node, self._stored_ids = order, node, stored_ids
        self._versions: dict[int, Placement] = {}
        self._holders: Holders | None = None
        self.newest: Placement | None = None

    def add(self, placement: Placement, holders: Holders | None = None) -> None:
        """Take in a version; samples that moved since are fetched from ``holders`` once."""
        self._versions[placement.version] = placement
        self.newest = self._versions[max(self._versions)]  # in whatever order versions come
        self._holders = holders
        while len(self._versions) > KEPT_VERSIONS:
            del self._versions[min(self._versions)]

    def add_older(self, placements: Iterable[Placement]) -> None:
        """Take in earlier versions, by which blocks may have been cut that are not made yet."""
        for placement in placements:
            self._versions.setdefault(placement.version, placement)

    @property
    def all(self) -> tuple[Placement, ...]:
        """The versions that are known, oldest first."""
        return tuple(self._versions[version] for version in sorted(self._versions))

    # ---- cutting ----

    def knows(self, block_part: BlockPart) -> bool:
        """Return whether the placement by which the part was cut is known here."""
        return block_part == WHOLE or block_part.version in self._versions

    def parts(self, block: int, shuffle: Shuffle | None = None) -> tuple[BlockPart, ...]:
        """Cut a block into parts by the newest placement, in the order of their homes.

        None is empty, unless samples are drawn anew in each epoch: then each node has a part.
        """
        placement = self.newest
        if placement is None:
            return (WHOLE,)
        if len(placement.node_weights) == 1:  # the common case needs not even the block's samples
            return (BlockPart(placement.nodes[0], placement.version),)
        if self._order.redrawn:  # by weights that are known where parts are made
            present = np.arange(len(placement.nodes))
        else:
            present = np.unique(placement.of(self._order.sample_ids(block, shuffle)))
        return tuple(BlockPart(placement.nodes[index], placement.version) for index in present.tolist())

    def rows(self, request: PartRequest) -> NDArray[np.int64] | None:
        """Return the rows of the block that the part has, ascending: int64[k]; None for all.

        Raises:
            PlacementGoneError: the placement by which it was cut is not known here, and nobody will tell of it.
            PlacementUnknownError: it is not known here yet.
        """
        if request.block_part == WHOLE:
            return None
        if not self.knows(request.block_part):
            version = request.block_part.version
            # Who tells of a version tells of the earlier ones, too, from which parts may still be made.
            is_gone = self.newest is not None and version < self.newest.version
            kind = PlacementGoneError if is_gone else PlacementUnknownError
            raise kind(f"version {version} of the placement is not known here, versions {[*self._versions]} are")
        placement = self._versions[request.block_part.version]
        if len(placement.node_weights) == 1:
            return None
        return np.flatnonzero(placement.of(self._stored(request)) == placement.index(request.block_part.home))

    def ids(self, request: PartRequest) -> Ids:
        """Return the samples of a part, in order: int64[k]."""
        ids, rows = self._order.sample_ids(request.block, request.shuffle), self.rows(request)
        return ids if rows is None else ids[rows]

    def stored(self, request: PartRequest) -> Ids:
        """Return the stored samples that a part needs, each once: int64[k].

        They are its samples, in order; or where each epoch draws its samples, those that were drawn, ascending.
        """
        if not self._order.redrawn:
            return self.ids(request)
        stored, rows = self._stored(request), self.rows(request)
        return np.unique(stored if rows is None else stored[rows])

    def _stored(self, request: PartRequest) -> Ids:
        """Return the stored sample of each row of the whole block: int64[rows]."""
        ids = self._order.sample_ids(request.block, request.shuffle)
        if not self._order.redrawn:
            return ids
        assert self._stored_ids is not None, "made without a dataset, it does not know what was drawn"
        return self._stored_ids(ids, self._order.chance_epoch(request.block, request.shuffle))

    # ---- the view of one node ----

    def own(self, block: int, shuffle: Shuffle | None = None) -> PartRequest:
        """Return this node's own part of a block; it may be empty."""
        part = WHOLE if self.newest is None else BlockPart(self._node, self.newest.version)
        return PartRequest(block, part, shuffle)

    def admits(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples this node is to keep: int64[n] -> bool[n]."""
        placement = self.newest
        if placement is None:
            return np.ones(len(sample_ids), np.bool_)
        home, kept = placement.homes_and_kept(sample_ids)
        return kept & (home == placement.index(self._node))

    def home_share(self, num_stored: int) -> float:
        """Return the share of the stored samples that have their home on this node, 0 to 1; of many an estimate."""
        if self.newest is None or len(self.newest.node_weights) == 1:
            return float(self.newest is None or self._node in self.newest.nodes)
        ids = np.linspace(0, num_stored - 1, min(num_stored, BINS)).astype(np.int64)
        return float(self.is_home(ids).mean())

    def is_home(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples have their home on this node, kept in memory or not: int64[n] -> bool[n]."""
        if self.newest is None:
            return np.ones(len(sample_ids), np.bool_)
        return self.newest.of(sample_ids) == self.newest.index(self._node)

    def former_holders(self, sample_ids: Ids) -> NDArray[np.int16]:
        """Return the index of another node that may still have a sample in memory, -1 if none has: int16[n].

        `holder` gives that node's id.
        """
        if self._holders is None:
            return np.full(len(sample_ids), -1, np.int16)
        index = self._holders.index[sample_ids]
        me = self._holders.nodes.index(self._node) if self._node in self._holders.nodes else -1
        return np.where(index == me, np.int16(-1), index)

    def decoded_bytes(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the bytes of samples that were kept decoded when the placement changed, 0 for others: int64[n]."""
        if self._holders is None or self._holders.decoded_bytes is None:
            return np.zeros(len(sample_ids), np.int64)
        return self._holders.decoded_bytes[sample_ids]

    def lenders(self, request: PartRequest, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the nodes that keep samples of a part now which this node has handed over: int64[n].

        They are indices into the nodes of the newest placement; -1 where there is none. Only a part that was cut before
        samples moved has any: it is still made here, where its samples were.
        """
        newest, part = self.newest, request.block_part
        if newest is None or part.home != self._node or part.version == newest.version:
            return np.full(len(sample_ids), -1, np.int64)
        home, kept = newest.homes_and_kept(sample_ids)
        return np.where(kept & (home != newest.index(self._node)), home, -1)

    def held_elsewhere(self) -> Ids:
        """Return the samples that this node is to keep and that other nodes may still have in memory, ascending."""
        if self._holders is None:
            return np.empty(0, np.int64)
        held = np.flatnonzero(self._holders.index >= 0)
        # draws of all samples on all nodes at once would be gigabytes in a large dataset
        chunks = np.array_split(held, -(-len(held) // CHUNK) or 1)
        return np.concatenate([ids[self.admits(ids) & (self.former_holders(ids) >= 0)] for ids in chunks])

    def lender(self, index: int) -> str:
        """Return the id of a node by its index in `lenders`."""
        assert self.newest is not None
        return self.newest.nodes[index]

    def holder(self, index: int) -> str:
        """Return the id of a node by its index in `former_holders`."""
        assert self._holders is not None
        return self._holders.nodes[index]
