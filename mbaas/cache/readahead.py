"""Read-ahead: the blocks that are read before they are requested, within a budget of bytes.

While a split-off consumer catches up, fetches come from two points of the order at once. Read-ahead therefore follows
several *sequences* of fetches and divides its budget between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mbaas.samples.order import Shuffle
from mbaas.samples.placement import PLAIN, StreamKey

DEPTH_BLOCKS = 64
"""Maximum number of blocks examined ahead of a sequence's head. This bounds the work for blocks that need no bytes."""

SLACK_BLOCKS = 16
"""Tolerance, in blocks, for out-of-order fetches within one sequence."""

IDLE_FETCHES = 64
"""A sequence ends after this many consecutive fetches outside it."""

MAX_SEQUENCES = 4
"""Maximum number of sequences. With more, each one's share of the budget would be too small to help."""


@dataclass
class FetchSequence:
    """Fetches that move forward through the order, slightly out of order, because several workers make them."""

    head: int  # the furthest fetched block
    frontier: int  # the next block to examine; each block in (head, frontier) is scheduled or needs no read
    last_fetch: int  # number of its newest fetch, counted over all sequences
    shuffle: Shuffle | None = None  # shuffle of the head's epoch
    stream: StreamKey = PLAIN  # of its blocks
    pipeline: str = ""  # the one that the newest fetch was for
    lacked: tuple[int, int] = (0, 0)  # the block that last had no room, and the bytes that it needed

    def covers(self, block: int, stream: StreamKey = PLAIN) -> bool:
        """Return whether this sequence scheduled the block and may still fetch it."""
        return stream == self.stream and self.head - SLACK_BLOCKS <= block < self.frontier

    def owns_fetch(self, block: int, stream: StreamKey = PLAIN) -> bool:
        """Return whether a fetch of the block may belong to this sequence: near its fetched or scheduled blocks."""
        is_near = self.head - SLACK_BLOCKS <= block < self.frontier + SLACK_BLOCKS
        return is_near and stream == self.stream


class _Held(NamedTuple):
    block: int
    stream: StreamKey
    nbytes: int


class ReadAhead:
    """The followed sequences, and the bytes held for blocks that were not requested yet."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes  # 0 disables read-ahead
        self.depth_bytes = budget_bytes  # useful bytes to hold, at most the budget; the bytes held now may be more
        self.sequences: list[FetchSequence] = []  # most recently fetched first; at most MAX_SEQUENCES
        self.used_bytes = 0  # total of all held slabs, in [0, budget_bytes]
        self._fetches = 0
        self._held: dict[int, _Held] = {}  # by slab; their bytes add up to used_bytes

    def follow(self, block: int, shuffle: Shuffle | None = None, stream: StreamKey = PLAIN, pipeline: str = "") -> None:
        """Record a fetch of `block`, in an epoch with this shuffle, for a pipeline."""
        self._fetches += 1
        owners = [sequence for sequence in self.sequences if sequence.owns_fetch(block, stream)]
        # If sequences overlap, take the one whose next step this fetch is.
        new = FetchSequence(block, block, 0, stream=stream)
        own = min(owners, key=lambda sequence: abs(block - sequence.head - 1), default=new)
        if block >= own.head:
            own.head, own.shuffle = block, shuffle
        own.frontier = max(own.frontier, block + 1)
        own.last_fetch, own.pipeline = self._fetches, pipeline
        others = [each for each in self.sequences if each is not own and self._fetches - each.last_fetch < IDLE_FETCHES]
        self.sequences = [own, *others][:MAX_SEQUENCES]  # beyond the limit, the longest idle sequence is dropped

    def retreat(self, block: int, stream: StreamKey = PLAIN) -> None:
        """Move frontiers back to `block`, which was scheduled ahead and could not be read."""
        for sequence in self.sequences:
            if sequence.head < block and sequence.covers(block, stream):
                sequence.frontier = block

    def fits(self, sequence: FetchSequence, nbytes: int) -> bool:
        """Return whether ``nbytes`` more fit into the budget and the sequence's share of the depth."""
        # The first block only has to fit the budget: one larger than the share would otherwise never be read ahead.
        own = sum(held.nbytes for held in self._held.values() if sequence.covers(held.block, held.stream))
        part = self.depth_bytes // len(self.sequences)
        return self.used_bytes + nbytes <= self.budget_bytes and (own == 0 or own + nbytes <= part)

    def waits_for_room(self, sequence: FetchSequence) -> bool:
        """Return whether the frontier block had no room, and still has none for the bytes that it needed then."""
        block, nbytes = sequence.lacked
        return block == sequence.frontier and nbytes > 0 and not self.fits(sequence, nbytes)

    def set_depth(self, depth_bytes: int) -> None:
        """Set the depth in bytes, clipped to the budget."""
        self.depth_bytes = max(0, min(depth_bytes, self.budget_bytes))

    def hold(self, slab: int, *, block: int, nbytes: int, stream: StreamKey = PLAIN) -> None:
        self._held[slab] = _Held(block, stream, nbytes)
        self.used_bytes += nbytes

    def release(self, slab: int) -> None:
        """Stop charging a slab that was requested, dropped or cached. No effect if it is not held."""
        held = self._held.pop(slab, None)
        self.used_bytes -= 0 if held is None else held.nbytes

    def held_slabs(self) -> dict[int, int]:
        """Return slab -> bytes of the held slabs."""
        return {slab: held.nbytes for slab, held in self._held.items()}

    def validate(self) -> None:
        """Raise AssertionError if a sum or a sequence is wrong."""
        assert self.used_bytes == sum(self.held_slabs().values()) <= self.budget_bytes, self._held
        assert 0 <= self.depth_bytes <= self.budget_bytes, self.depth_bytes
        assert len(self.sequences) <= MAX_SEQUENCES
        for sequence in self.sequences:
            assert sequence.head < sequence.frontier <= sequence.head + 1 + DEPTH_BLOCKS, sequence
