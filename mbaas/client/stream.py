"""The blocks of a feed, in order, for one consumer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy

from msgspec import Struct

from mbaas.client.batches import BlockView
from mbaas.client.part_fetch import BlockFetch, WholeFetch, unreadable_parts
from mbaas.client.session import ReceivedBlock, Session
from mbaas.client.stalls import StreamStats
from mbaas.memory.part_memory import UnreadableError
from mbaas.samples.fields import Arrays
from mbaas.samples.order import OwnEpoch, Shuffle
from mbaas.wire.blocks import DeliveredBlock, DeliveredPart
from mbaas.wire.consumers import ConsumerReport, Start
from mbaas.wire.samples import BadSample

LOCAL_READ_S = 5.0
"""Timeout to read a block on the reader's own node, in seconds. It normally takes milliseconds.

If several threads of a process read blocks, Ray 2.60 occasionally loses a part for one thread, and getting it never
ends. This happens once in 15,000 to 20,000 blocks of four threads. A second request succeeds.
"""

REMOTE_READ_S = 30.0
"""Timeout in seconds for a block with parts on other nodes, plus transfer time at `SLOWEST_LINK_BYTES_PER_S`."""

SLOWEST_LINK_BYTES_PER_S = 1e6
"""A slower link between nodes counts as broken."""

LOOK_S = 2.0
"""Period in seconds at which a waiting reader checks that the block still exists."""


class Block(Struct, frozen=True):
    """A block of a consumer's own epoch, read by it; ``bad`` lists the samples left out of ``samples``."""

    number: int
    shuffle: Shuffle
    own_epoch: OwnEpoch
    samples: BlockView
    bad: tuple[BadSample, ...]


class Stream:
    """The endless sequence of a feed's blocks for one consumer, from its cursor on."""

    def __init__(self, session: Session, stats: StreamStats) -> None:
        self.session, self.info = session, session.info
        self._stats = stats

    @property
    def cursor(self) -> int:
        """Number of the next block that `next` returns."""
        return self.session.cursor

    # ---- blocks ----

    def next(self) -> Block:
        """Wait for the block at the cursor, return it, and move the cursor past it.

        Raises:
            BadSampleError: the block contains a bad sample and the feed's ``on_bad_sample`` is "raise".
            WaitTimeoutError: no block arrived, and the feed made no progress, within the timeout.
            FeedFailedError: the feed cannot continue.
        """
        began = time.perf_counter()
        arrays: list[Arrays] | None = None
        while arrays is None:
            received = self.session.wait()
            arrays = self._read(received)
        block = received.block
        self._stats.block_came(
            began,
            time.perf_counter(),
            fetch_s=sum(part.meta.fetch_s for part in block.parts),
            prep_s=sum(part.meta.prep_s for part in block.parts),
            peer_idle_s=received.peer_idle_s,
        )
        self._stats.prepared += block.is_new * sum(part.meta.samples for part in block.parts)
        self.session.advance()  # also past a block that ended in an error: a trial that catches the error may continue
        bad = tuple(bad for part in block.parts for bad in part.meta.bad)
        if block.error is not None:
            raise copy(block.error)  # this frame refers to the block: the error itself would make a cycle
        own_epoch = self.session.own_epoch_of(block.number)
        return Block(block.number, block.shuffle, own_epoch, BlockView(arrays), bad)

    def _read(self, received: ReceivedBlock) -> list[Arrays] | None:
        """Return the arrays of a block's parts; none if it could not be made.

        Unless they are copies, they count as held from here on. Return None if they cannot be read because their node
        is gone; they are then requested again.
        """
        block, fetched = received.block, None
        end = time.monotonic() + _longest_read_s(self.session.remote_parts(block))
        while fetched is None:
            try:
                fetched = self._fetch(received).read(LOOK_S)
            except UnreadableError as error:
                # Ray takes long to give up an unreachable node; the coordinator detects it sooner.
                if error.for_good or time.monotonic() > end or self.session.is_given_up(block):
                    self.session.ask_again(block, unreadable_parts(block))
                    return None
        self._stats.read_bytes += fetched.read_bytes
        if received.as_copy:
            return [{name: array.copy() for name, array in part.items()} for part in fetched.parts]
        self.session.hold_arrays(block.number, fetched.parts)
        return fetched.parts

    def _fetch(self, received: ReceivedBlock, slack_s: float = 0.0) -> BlockFetch:
        """Start reading a block unless that has begun; ``slack_s`` is the time until the consumer needs it."""
        if received.fetch is None:
            received.fetch = self._begin_fetch(received.block, slack_s)
        return received.fetch

    def _begin_fetch(self, block: DeliveredBlock, slack_s: float) -> BlockFetch:  # noqa: ARG002 - for RankStream
        return WholeFetch(block, self.session.remote_parts(block))

    def look_ahead(self) -> None:
        """Start copying remote parts of the next block, if it is known. Called after `next` and between minibatches."""
        if self.session.are_remote:
            self.session.take_in_early()
            if self.session.received:
                self._fetch(self.session.received[0])

    def skip_to(self, block: int) -> None:
        """Continue at the later block ``block``; drop blocks received before it."""
        self.session.skip_to(block)

    def next_epoch(self) -> int:
        """Return the first epoch of the feed that is entirely new to a consumer that starts an epoch now."""
        return self.session.next_epoch(self.cursor)

    def skip_epoch(self) -> None:
        """Skip the rest of the current epoch, if the consumer has received any block in it."""
        own = self.session.own_epoch_of(self.cursor)
        if self.cursor > own.first:
            self.skip_to(own.end)

    def start_again(self) -> Start:
        """Return the start of a new stream that continues at the cursor."""
        return self.session.start_at(self.cursor)

    def use_up(self, block: int) -> None:
        """Record that the consumer is done with all blocks below ``block``; the next call or heartbeat reports it."""
        self.session.done = block

    def held_blocks(self) -> int:
        """Return the number of blocks with arrays that are alive in this process."""
        return self.session.held_blocks()

    # ---- heartbeats ----

    def heartbeat(self, report: ConsumerReport) -> None:
        """Send a heartbeat with the blocks held. Called from a separate thread."""
        self.session.heartbeat(report)

    def leave(self, report: ConsumerReport | None) -> None:
        """End the consumer's session."""
        self.session.leave(report)


def _longest_read_s(remote: Sequence[DeliveredPart]) -> float:
    if not remote:
        return LOCAL_READ_S
    return REMOTE_READ_S + sum(part.meta.nbytes for part in remote) / SLOWEST_LINK_BYTES_PER_S
