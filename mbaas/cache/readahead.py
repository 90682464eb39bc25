"""Read-ahead: which blocks are read before anybody asks for them, within a budget of bytes.

The order is known: after block g come fetches of g + 1, g + 2, ... They come a little out of order, because
several workers make them; and from two points of the order at once while a consumer that fell behind is served again.
So read-ahead follows *sequences* of fetches, and divides its budget between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbaas.errors import ConfigError
from mbaas.order import Shuffle

DEPTH_BLOCKS = 64
"""How far ahead of a sequence's head blocks are looked at; what costs no bytes is bounded by this."""

SLACK_BLOCKS = 16
"""How far out of order the fetches of one sequence may come."""

IDLE_FETCHES = 64
"""A sequence is over after this many fetches in a row that were not its own."""

MAX_SEQUENCES = 4
"""Sequences that are followed at most: more would divide the budget into parts that are of use to none."""


@dataclass
class FetchSequence:
    """A sequence of fetches that move forwards in the order, a little out of order.

    Attributes:
        head: the furthest block that was fetched.
        frontier: the next block to look at; each one in (head, frontier) was scheduled or needs no storage.
        shuffle: of the head's epoch.
        last_fetch: the number of its newest fetch, counted over all sequences.
    """

    head: int
    frontier: int
    last_fetch: int
    shuffle: Shuffle | None = None

    def covers(self, block: int) -> bool:
        """Tell whether the block was scheduled for this sequence and may still be fetched by it."""
        return self.head - SLACK_BLOCKS <= block < self.frontier

    def owns_fetch(self, block: int) -> bool:
        """Tell whether a fetch of the block may be one of this sequence: near what was fetched, or scheduled ahead."""
        return self.head - SLACK_BLOCKS <= block < self.frontier + SLACK_BLOCKS


class ReadAhead:
    """The sequences that are followed, and the bytes that are held for blocks that nobody has asked for yet.

    Attributes:
        budget_bytes: the most that may be held; 0 reads nothing ahead.
        depth_bytes: what is worth holding, at most `budget_bytes`; what is held already may be more.
        sequences: the one with the newest fetch first; at most MAX_SEQUENCES.
        used_bytes: the sum over all slabs that are held; in [0, budget_bytes].
    """

    def __init__(self, budget_bytes: int) -> None:
        """
        Raises:
            ConfigError: the budget is negative.
        """
        if budget_bytes < 0:
            raise ConfigError(f"readahead_bytes must be at least 0, got {budget_bytes}")
        self.budget_bytes = self.depth_bytes = budget_bytes
        self.sequences: list[FetchSequence] = []
        self.used_bytes = 0
        self._fetches = 0
        self._held: dict[int, tuple[int, int]] = {}  # slab -> (block, bytes); adds up to used_bytes

    def follow(self, block: int, shuffle: Shuffle | None = None) -> None:
        """Note that somebody fetched `block`, of an epoch with this shuffle."""
        self._fetches += 1
        owners = [sequence for sequence in self.sequences if sequence.owns_fetch(block)]
        # Where two sequences overlap, the fetch is the next step of one of them.
        own = min(owners, key=lambda sequence: abs(block - sequence.head - 1), default=FetchSequence(block, block, 0))
        if block >= own.head:
            own.head, own.shuffle = block, shuffle
        own.frontier = max(own.frontier, block + 1)
        own.last_fetch = self._fetches
        others = [other for other in self.sequences if other is not own and self._is_alive(other)]
        self.sequences = [own, *others][:MAX_SEQUENCES]  # if there are too many, the one that is idle longest goes

    def _is_alive(self, sequence: FetchSequence) -> bool:
        return self._fetches - sequence.last_fetch < IDLE_FETCHES

    def retreat(self, block: int) -> None:
        """Look at `block` again, which was scheduled ahead and could not be read, and at all after it."""
        for sequence in self.sequences:
            if sequence.head < block < sequence.frontier:
                sequence.frontier = block

    def fits(self, sequence: FetchSequence, nbytes: int) -> bool:
        """Tell whether ``nbytes`` more may be held for a sequence: within the budget, and its part of the depth.

        The first block fits wherever the budget has room, however small the part: a block that is larger than its part
        would otherwise never be read ahead.
        """
        own = sum(size for block, size in self._held.values() if sequence.covers(block))
        part = self.depth_bytes // len(self.sequences)
        return self.used_bytes + nbytes <= self.budget_bytes and (own == 0 or own + nbytes <= part)

    def set_depth(self, depth_bytes: int) -> None:
        """Read so far ahead from now on, within the budget."""
        self.depth_bytes = max(0, min(depth_bytes, self.budget_bytes))

    def hold(self, slab: int, *, block: int, nbytes: int) -> None:
        """Charge a slab that is read ahead for `block`."""
        self._held[slab] = (block, nbytes)
        self.used_bytes += nbytes

    def release(self, slab: int) -> None:
        """Hold a slab no more: it is asked for, dropped, or part of the cache. Nothing happens if it is not held."""
        self.used_bytes -= self._held.pop(slab, (0, 0))[1]

    def held_slabs(self) -> dict[int, int]:
        """Tell what is held: slab -> its bytes."""
        return {slab: nbytes for slab, (_, nbytes) in self._held.items()}

    def validate(self) -> None:
        """Check the sums, and where each sequence stands.

        Raises:
            AssertionError: a sum or an order is wrong.
        """
        assert self.used_bytes == sum(self.held_slabs().values()) <= self.budget_bytes, self._held
        assert 0 <= self.depth_bytes <= self.budget_bytes, self.depth_bytes
        assert len(self.sequences) <= MAX_SEQUENCES
        for sequence in self.sequences:
            assert sequence.head < sequence.frontier <= sequence.head + 1 + DEPTH_BLOCKS, sequence
