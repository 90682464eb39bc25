"""Lanes: a feed whose blocks are dealt out to several coordinators in turn.

Block i of an epoch belongs to lane i mod L. In each epoch a lane has the same number of blocks, so its own blocks,
numbered on over all epochs, are a stream like that of a whole feed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lane:
    """One lane, and its blocks: its own block 0, 1, 2, ... against their numbers in the feed.

    Attributes:
        feed_blocks: blocks in an epoch of the feed; at least ``lanes``.
        number: of the lane, in [0, lanes).
        lanes: of the feed.
    """

    feed_blocks: int
    number: int = 0
    lanes: int = 1

    @property
    def blocks_per_epoch(self) -> int:
        """The lane's own blocks in an epoch."""
        return -(-(self.feed_blocks - self.number) // self.lanes)

    def feed_block(self, own: int) -> int:
        """The feed's number of the lane's own block."""
        epoch, index = divmod(own, self.blocks_per_epoch)
        return epoch * self.feed_blocks + index * self.lanes + self.number

    def first_from(self, block: int) -> int:
        """The lane's own number of its first block that is, or comes after, the feed's ``block``."""
        epoch, index = divmod(block, self.feed_blocks)
        return epoch * self.blocks_per_epoch - (self.number - index) // self.lanes

    def has(self, block: int) -> bool:
        """Whether the feed's ``block`` is one of the lane's."""
        return block % self.feed_blocks % self.lanes == self.number
