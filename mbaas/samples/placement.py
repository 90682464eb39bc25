"""Assign each sample a home node, and cut blocks into parts by home node.

A sample's home node caches its bytes and prepares it. Homes come from weighted rendezvous hashing: every sample draws a
number on every node, and its home is the node with the smallest draw. Nodes get samples in proportion to their weights.
A new node takes samples only from the others; a node that leaves gives its samples only to the others. No table is
stored: a home is computed from the sample id.

Memory is bounded (rendezvous hashing with bounded loads): a node takes the samples with the smallest draws until its
memory is full. The others go to the node of their second smallest draw, and so on. The largest draw that each node
still accepts describes the result. So no sample is left out before all memories are full, and every node can compute
the contents of every other.

The coordinator, the cache nodes and the prep workers must all cut a block in the same way. Each has a
`PlacementHistory`, and receives every new version before any part is cut by it.

Sources: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998); for weights, Schindelhauer
and Schomaker, "Weighted Distributed Hash Tables" (2005), logarithmic method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from mbaas.errors import ConfigError, PlacementGoneError, PlacementUnknownError
from mbaas.samples.order import Ids, SampleOrder, Shuffle, uniforms

# ---- homes of samples ----

Lengths = Callable[[Ids], NDArray[np.int64]]
"""Bytes of samples: int64[n] -> int64[n]."""

StoredIds = Callable[[Ids, int], Ids]
"""Stored samples for the sample ids of an epoch: see `mbaas.dataset.Dataset.stored_ids`."""

BINS = 1 << 16
"""Resolution of a node's limit: at most 1/65,536 of its cacheable bytes stays empty."""

CHUNK = 1 << 18
"""Samples processed together, which bounds memory."""

LOOKED_AT = 1 << 21
"""Upper bound on the samples from which limits are computed; larger datasets use every second, third, ... sample."""

MARGIN = 0.995
"""Fraction of the memory that is planned for if only a subset of the samples is examined: the others may be longer."""


class NodeWeight(Struct, frozen=True):
    """A node that may be the home of samples: memory for raw samples, and prep speed in any common unit, above 0."""

    node: str
    cache_bytes: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0 or self.cache_bytes < 0:
            raise ConfigError(f"weight must be above 0 and cache_bytes at least 0, got {self}")


class Placement(Struct, frozen=True):
    """The homes of all samples. Indices of nodes refer to ``node_weights``, which is sorted by id.

    ``limits`` are the largest draws that each node caches; infinity means no limit.
    """

    version: int
    node_weights: tuple[NodeWeight, ...]
    limits: tuple[float, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(weight.node for weight in self.node_weights)

    def index(self, node: str) -> int:
        """Return the index of a node; -1 if it is not the home of any sample."""
        return self.nodes.index(node) if node in self.nodes else -1

    def of(self, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the homes of samples: int64[n] -> int64[n]."""
        return self.homes_and_kept(sample_ids)[0]

    def homes_and_kept(self, sample_ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return homes as `of` does, and which samples are cached there after they were read: bool[n].

        The home of a sample that is not cached is the node of its smallest draw.
        """
        # A single node needs no draws and no limit: its cache admits samples in order of arrival until it is full.
        if len(self.node_weights) == 1:
            return np.zeros(len(sample_ids), np.int64), np.ones(len(sample_ids), np.bool_)
        draws = _draws(self.node_weights, sample_ids)
        taken = np.where(draws <= np.array(self.limits), draws, np.inf)
        kept = np.isfinite(taken.min(axis=1))
        return np.where(kept, taken.argmin(axis=1), draws.argmin(axis=1)), kept


def place_samples(
    node_weights: Sequence[NodeWeight], *, num_samples: int, lengths: Lengths, version: int, limited: bool = True
) -> Placement:
    """Return a placement that respects every node's memory. Raises ConfigError for no node, or a duplicate.

    If not ``limited``, each node chooses among all samples with their home there which ones it caches.
    """
    node_weights = tuple(sorted(node_weights, key=lambda weight: weight.node))
    names = [weight.node for weight in node_weights]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"a placement needs at least one node and each node once, got {names}")
    if len(node_weights) == 1 or not limited:
        return Placement(version, node_weights, (np.inf,) * len(node_weights))
    step = -(-num_samples // LOOKED_AT)
    budgets = np.array([weight.cache_bytes for weight in node_weights]) * (MARGIN if step > 1 else 1.0) / step
    placement = Placement(version, node_weights, (np.inf,) * len(node_weights))
    # Samples rejected by one node may overfill another, so repeat until all fit. This terminates, because limits only
    # fall, and each takes one of BINS values.
    while (limits := _tightened(placement, budgets, num_samples, step, lengths)) != placement.limits:
        placement = Placement(version, node_weights, limits)
    return placement


def _tightened(
    placement: Placement, budgets: NDArray[np.float64], num_samples: int, step: int, lengths: Lengths
) -> tuple[float, ...]:
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
    """Return the bytes that each node caches, binned by draw, smallest first: float64[nodes, BINS]."""
    used = np.zeros((len(placement.node_weights), BINS))
    for first in range(0, num_samples, CHUNK * step):
        ids = np.arange(first, min(first + CHUNK * step, num_samples), step, dtype=np.int64)
        home, kept = placement.homes_and_kept(ids)
        size = lengths(ids)
        for index, node in enumerate(placement.node_weights):
            mine = kept & (home == index)
            draws = _draws((node,), ids[mine])[:, 0]
            # The inverse of the mapping from uniform numbers to draws, so that bins are equally likely.
            bins = np.minimum((-np.expm1(-draws * node.weight) * BINS).astype(np.int64), BINS - 1)
            used[index] += np.bincount(bins, weights=size[mine], minlength=BINS)
    return used


def _draw_of_bin(number: int, weight: float) -> float:
    return float(-np.log1p(-number / BINS) / weight) if number else -1.0


def _draws(node_weights: Sequence[NodeWeight], sample_ids: Ids) -> NDArray[np.float64]:
    """Return a draw for each sample on each node: float64[n, nodes].

    Draws are exponential with the node's weight as rate, so a node has the smallest draw of a row in proportion to its
    weight. Adding or removing a node changes no other draw.
    """
    columns = [
        -np.log1p(-uniforms(_key(node.node), 0, sample_ids, substream=0, draws=1)[:, 0]) for node in node_weights
    ]
    return np.stack(columns, axis=1) / np.array([node.weight for node in node_weights])


def _key(node: str) -> int:
    # Not Python's hash, which differs between processes.
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=7).digest(), "big")


# ---- parts of blocks ----

KEPT_VERSIONS = 16
"""Number of placement versions that are kept: no block stays staged during as many changes."""


class BlockPart(NamedTuple):
    """The samples of a block with the same home node, cut by a version of the placement."""

    home: str
    version: int


WHOLE = BlockPart("", 0)
"""All samples of a block."""


ENCODED = 0
"""Form of a sample as it is stored. Every other form is decoded: `mbaas.transforms.Pipeline.prefix_forms`."""


class StreamKey(NamedTuple):
    """Properties of a pipeline that its parts depend on, the same for all its blocks; as in `PartRequest`."""

    block_samples: int = 0
    forms: tuple[int, ...] = ()


PLAIN = StreamKey()
"""Blocks of the feed's own size, of samples as they are stored."""


class PartRequest(NamedTuple):
    """A part of a certain block, needed now or later.

    Attributes:
        block: number of the block.
        block_part: the samples of the block that are meant.
        shuffle: the shuffle of its epoch; None if the epoch is shuffled as a whole.
        block_samples: samples in a block, if blocks of its pipeline have another size than the feed's; otherwise 0.
        forms: decoded forms of samples that its pipeline can go on from, in the order of the transforms applied.
    """

    block: int
    block_part: BlockPart = WHOLE
    shuffle: Shuffle | None = None
    block_samples: int = 0
    forms: tuple[int, ...] = ()

    @property
    def stream(self) -> StreamKey:
        """The properties that all parts of its pipeline have in common."""
        return StreamKey(self.block_samples, self.forms)

    def takes(self, forms: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which of n samples in these forms, int32[n], the pipeline can use: bool[n]."""
        takes: NDArray[np.bool_] = forms == ENCODED
        for form in self.forms:
            takes |= forms == form
        return takes


class DecodedSizes(NamedTuple):
    """Forms of n samples, int32[n], and their bytes, int64[n]; both 0 for samples that are not decoded."""

    forms: NDArray[np.int32]
    nbytes: NDArray[np.int64]

    @classmethod
    def none(cls, samples: int) -> DecodedSizes:
        """Return the sizes of samples that are all encoded."""
        return cls(np.zeros(samples, np.int32), np.zeros(samples, np.int64))

    def of(self, rows: Any) -> DecodedSizes:
        """Return some of the samples, selected as by NumPy."""
        return DecodedSizes(self.forms[rows], self.nbytes[rows])

    def put(self, rows: Any, sizes: DecodedSizes) -> None:
        """Replace some of the samples."""
        self.forms[rows], self.nbytes[rows] = sizes


class Holders(Struct, frozen=True, eq=False):
    """Nodes that had samples in memory when the placement changed.

    ``index`` into ``nodes`` is int16[samples of the dataset], -1 for samples that were not in memory. ``decoded`` has
    the forms and sizes of samples that were cached decoded; None without any.
    """

    nodes: tuple[str, ...]
    index: NDArray[np.int16]
    decoded: DecodedSizes | None = None


class Holdings(NamedTuple):
    """The samples cached by one node: ``sample_ids``, int64[k], ascending.

    ``version`` is its newest placement's, 0 without one. ``decoded`` as in `Holders`.
    """

    version: int
    sample_ids: Ids
    decoded: DecodedSizes | None = None


class MovedIn(NamedTuple):
    """Samples that came from their former nodes since the request, and those not in time (``left``)."""

    samples: int = 0
    left: int = 0


class PlacementUpdate(Struct, frozen=True, eq=False):
    """A new placement, with the data that a cache node needs to apply it.

    ``holders`` cached samples before, if any; ``caches`` are handles of cache nodes by node id; unfinished blocks may
    have been cut by ``older`` versions. ``decoded`` is the form in which to keep decoded samples now, an
    `mbaas.wire.samples.DecodedSamples`; None for the one that the node was started with.
    """

    placement: Placement
    holders: Holders | None
    caches: dict[str, Any]
    older: tuple[Placement, ...] = ()
    decoded: Any = None


class PlacementHistory:
    """The newest versions of a placement.

    Older versions are kept, because a block that was cut by one may have to be prepared again with the same parts.

    Args:
        node: the node whose view this is; "" for a process that caches nothing.
        stored_ids: returns the stored samples of an order that draws samples again in each epoch. Without it such
            blocks can be cut, but the contents of parts are unknown. Homes belong to stored samples.
    """

    def __init__(self, order: SampleOrder, node: str = "", stored_ids: StoredIds | None = None) -> None:
        self._order, self._node, self._stored_ids = order, node, stored_ids
        self._versions: dict[int, Placement] = {}
        self._holders: Holders | None = None
        self.newest: Placement | None = None

    def add(self, placement: Placement, holders: Holders | None = None) -> None:
        """Add a version; samples that have moved since are fetched from ``holders`` once."""
        self._versions[placement.version] = placement
        self.newest = self._versions[max(self._versions)]  # versions may arrive in any order
        self._holders = holders
        while len(self._versions) > KEPT_VERSIONS:
            del self._versions[min(self._versions)]

    def add_older(self, placements: Iterable[Placement]) -> None:
        for placement in placements:
            self._versions.setdefault(placement.version, placement)

    @property
    def all(self) -> tuple[Placement, ...]:
        return tuple(self._versions[version] for version in sorted(self._versions))

    # ---- cutting ----

    def knows(self, block_part: BlockPart) -> bool:
        return block_part == WHOLE or block_part.version in self._versions

    def order(self, block_samples: int = 0) -> SampleOrder:
        """Return the order in blocks of this size; 0 for the feed's."""
        return _in_blocks_of(self._order, block_samples) if block_samples else self._order

    def parts(self, block: int, shuffle: Shuffle | None = None, block_samples: int = 0) -> tuple[BlockPart, ...]:
        """Cut a block into parts by the newest placement, in the order of their homes.

        No part is empty, unless samples are drawn again in each epoch: then each node has a part.
        """
        placement = self.newest
        if placement is None:
            return (WHOLE,)
        if len(placement.node_weights) == 1:  # the common case does not need the block's samples
            return (BlockPart(placement.nodes[0], placement.version),)
        if self._order.redrawn:  # the drawn samples are not available here
            present = np.arange(len(placement.nodes))
        else:
            present = np.unique(placement.of(self.order(block_samples).sample_ids(block, shuffle)))
        return tuple(BlockPart(placement.nodes[index], placement.version) for index in present.tolist())

    def rows(self, request: PartRequest) -> NDArray[np.int64] | None:
        """Return the part's rows in the block, ascending: int64[k]; None for all.

        Raises PlacementGoneError or PlacementUnknownError if the placement is no longer available, or not yet.
        """
        if request.block_part == WHOLE:
            return None
        if not self.knows(request.block_part):
            version = request.block_part.version
            # An update includes the earlier versions that are still in use.
            is_gone = self.newest is not None and version < self.newest.version
            kind = PlacementGoneError if is_gone else PlacementUnknownError
            raise kind(f"version {version} of the placement is not known here, versions {[*self._versions]} are")
        placement = self._versions[request.block_part.version]
        if len(placement.node_weights) == 1:
            return None
        return np.flatnonzero(placement.of(self._stored(request)) == placement.index(request.block_part.home))

    def ids(self, request: PartRequest) -> Ids:
        ids, rows = self._ids_of_block(request), self.rows(request)
        return ids if rows is None else ids[rows]

    def stored(self, request: PartRequest) -> Ids:
        """Return the stored samples that a part needs, each once, ascending if epochs draw samples: int64[k]."""
        if not self._order.redrawn:
            return self.ids(request)
        stored, rows = self._stored(request), self.rows(request)
        return np.unique(stored if rows is None else stored[rows])

    def _stored(self, request: PartRequest) -> Ids:
        """Return the stored sample of each row of the whole block: int64[rows]."""
        ids = self._ids_of_block(request)
        if not self._order.redrawn:
            return ids
        assert self._stored_ids is not None, "made without a dataset, so the draws are unknown"
        return self._stored_ids(ids, self.chance_epoch(request))

    def _ids_of_block(self, request: PartRequest) -> Ids:
        return self.order(request.block_samples).sample_ids(request.block, request.shuffle)

    def chance_epoch(self, request: PartRequest) -> int:
        """Return the epoch number that determines the random numbers in a block."""
        return self.order(request.block_samples).chance_epoch(request.block, request.shuffle)

    # ---- the view of one node ----

    def own(self, block: int, shuffle: Shuffle | None = None, stream: StreamKey = PLAIN) -> PartRequest:
        """Return this node's part of a block, which may be empty."""
        return PartRequest(block, self._own_part, shuffle, *stream)

    def is_own(self, request: PartRequest) -> bool:
        """Return whether a part is this node's, by the newest placement."""
        return request.block_part == self._own_part

    @property
    def _own_part(self) -> BlockPart:
        return WHOLE if self.newest is None else BlockPart(self._node, self.newest.version)

    def admits(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples this node must cache: int64[n] -> bool[n]."""
        placement = self.newest
        if placement is None:
            return np.ones(len(sample_ids), np.bool_)
        home, kept = placement.homes_and_kept(sample_ids)
        return kept & (home == placement.index(self._node))

    def home_share(self, num_stored: int) -> float:
        """Return the fraction of the stored samples whose home is this node, 0 to 1; an estimate for large datasets."""
        if self.newest is None or len(self.newest.node_weights) == 1:
            return float(self.newest is None or self._node in self.newest.nodes)
        ids = np.linspace(0, num_stored - 1, min(num_stored, BINS)).astype(np.int64)
        return float(self.is_home(ids).mean())

    def is_home(self, sample_ids: Ids) -> NDArray[np.bool_]:
        """Return which samples have their home on this node, cached or not: int64[n] -> bool[n]."""
        if self.newest is None:
            return np.ones(len(sample_ids), np.bool_)
        return self.newest.of(sample_ids) == self.newest.index(self._node)

    def former_holders(self, sample_ids: Ids) -> NDArray[np.int16]:
        """Return the index of another node that may still have a sample in memory, or -1: int16[n]. See `holder`."""
        if self._holders is None:
            return np.full(len(sample_ids), -1, np.int16)
        index = self._holders.index[sample_ids]
        me = self._holders.nodes.index(self._node) if self._node in self._holders.nodes else -1
        return np.where(index == me, np.int16(-1), index)

    def decoded(self, sample_ids: Ids) -> DecodedSizes:
        """Return the forms and bytes of samples that were cached decoded when the placement changed."""
        if self._holders is None or self._holders.decoded is None:
            return DecodedSizes.none(len(sample_ids))
        return self._holders.decoded.of(sample_ids)

    def lenders(self, request: PartRequest, sample_ids: Ids) -> NDArray[np.int64]:
        """Return the nodes that now cache samples of a part which this node has handed over: int64[n], or -1. See
        `lender`.

        Only a part that was cut before samples moved can have lenders: it is still prepared on this node, the samples'
        former home.
        """
        newest, part = self.newest, request.block_part
        if newest is None or part.home != self._node or part.version == newest.version:
            return np.full(len(sample_ids), -1, np.int64)
        home, kept = newest.homes_and_kept(sample_ids)
        return np.where(kept & (home != newest.index(self._node)), home, -1)

    def held_elsewhere(self) -> Ids:
        """Return the samples that this node must cache and that other nodes may still have in memory, ascending."""
        if self._holders is None:
            return np.empty(0, np.int64)
        held = np.flatnonzero(self._holders.index >= 0)
        # in chunks: draws of all samples on all nodes would take gigabytes for a large dataset
        chunks = np.array_split(held, -(-len(held) // CHUNK) or 1)
        return np.concatenate([ids[self.admits(ids) & (self.former_holders(ids) >= 0)] for ids in chunks])

    def lender(self, index: int) -> str:
        assert self.newest is not None
        return self.newest.nodes[index]

    def holder(self, index: int) -> str:
        assert self._holders is not None
        return self._holders.nodes[index]


@lru_cache(maxsize=256)
def _in_blocks_of(order: SampleOrder, block_samples: int) -> SampleOrder:
    return replace(order, block_samples=block_samples)
