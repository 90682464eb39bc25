"""Streams of a feed: one for the feed's pipeline, and one for each other pipeline that consumers brought.

All streams have the same samples in the same order: an epoch is shuffled equally in all of them. They differ in the
pipeline, and so in the size of prepared samples and blocks. In the core, a block number tells its stream: stream *s*
has the numbers from ``s << STREAM_BITS`` on. Consumers and workers know only numbers that count from 0 in each stream
(`Stream.local`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from mbaas.wire.consumers import Resumption

CallT = TypeVar("CallT", bound=Struct)

STREAM_BITS = 64
"""Bits of a block number within its stream: more than a stream will ever need, also for side epochs."""

FEED_STREAM = 0
"""Number of the stream of the feed's own pipeline."""


class Stream(Struct, frozen=True):
    """The blocks of one pipeline.

    Attributes:
        number: unique in the feed; `FEED_STREAM` for the feed's pipeline.
        blocks_per_epoch: blocks in one epoch.
        block_samples: samples per block; the last block of an epoch may have fewer.
        bytes_of: block, numbered from 0 in this stream -> staged size in bytes.
        keeps_all: whether all epochs are identical and one epoch fits the staging budget.
    """

    number: int
    blocks_per_epoch: int
    block_samples: int
    bytes_of: Callable[[int], int]
    keeps_all: bool = False

    @property
    def first(self) -> int:
        """The first block."""
        return self.number << STREAM_BITS

    @property
    def block_bytes(self) -> int:
        """Size of a whole block in bytes; the last block of an epoch may be smaller."""
        return self.bytes_of(0)

    def local(self, block: int) -> int:
        """Return a block's number within this stream."""
        return block - self.first

    def epoch_of(self, block: int) -> int:
        """Return the number of the block's epoch."""
        return (block - self.first) // self.blocks_per_epoch

    def index_of(self, block: int) -> int:
        """Return the block's number within its epoch."""
        return (block - self.first) % self.blocks_per_epoch

    def position_of(self, block: int) -> int:
        """Return the number of samples of the block's epoch before the block."""
        return self.index_of(block) * self.block_samples

    def begin_of(self, epoch: int) -> int:
        """Return the first block of an epoch."""
        return self.first + epoch * self.blocks_per_epoch

    def at(self, epoch: int, position: int) -> int:
        """Return the block of an epoch that contains a position."""
        return self.begin_of(epoch) + position // self.block_samples


class StreamTable(dict[int, Stream]):
    """The streams of a feed, by number; ``feed`` is that of the feed's pipeline."""

    def __init__(self, feed: Stream) -> None:
        super().__init__({feed.number: feed})

    def of(self, block: int) -> Stream:
        """Return the stream of a block."""
        return self[block >> STREAM_BITS]

    def bytes_of(self, block: int) -> int:
        """Return the staged size of a block in bytes."""
        stream = self.of(block)
        return stream.bytes_of(stream.local(block))


def in_core(call: CallT, stream: Stream) -> CallT:
    """Return a consumer's call with the block numbers of the core."""
    by = stream.first
    if not by:
        return call
    changes: dict[str, Any] = {name: value + by for name in _BLOCKS if (value := getattr(call, name, None)) is not None}
    if (unheld := getattr(call, "unheld", None)) is not None:
        changes["unheld"] = unheld[0] + by, unheld[1] + by
    resumed: Resumption | None = getattr(call, "resumed", None)
    if resumed is not None:
        changes["resumed"] = replace(resumed, start=resumed.start + by, own_epoch=resumed.own_epoch.moved(by))
    return replace(call, **changes)


_BLOCKS = ("cursor", "released", "done", "began", "start", "block")
"""Names of the fields of calls that are block numbers."""


def stream_number(block: int) -> int:
    """Return the number of a block's stream."""
    return block >> STREAM_BITS


def local_block(block: int) -> int:
    """Return a block's number within its stream."""
    return block & ((1 << STREAM_BITS) - 1)


def shown_block(block: int) -> str:
    """Return a block's number for users: "17", or "17 of pipeline 2"."""
    number = block >> STREAM_BITS
    return f"{local_block(block)} of pipeline {number}" if number else str(block)


def block_name(block: int) -> str:
    """Return the name of a block for users: "block 17", or "block 17 of pipeline 2"."""
    return f"block {shown_block(block)}"


def block_number(name: str) -> int | None:
    """Return the number of the block with that name; None if it is not a block's name."""
    found = re.fullmatch(r"block (\d+)(?: of pipeline (\d+))?", name)
    return None if found is None else (int(found[2] or 0) << STREAM_BITS) + int(found[1])
