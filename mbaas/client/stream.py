"""Streams give one consumer the blocks of a feed in order: what each of them can do, and the one for a single lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from mbaas.client.batches import BlockView
from mbaas.client.part_fetch import BlockFetch, WholeFetch, unreadable_parts
from mbaas.client.rpc import UnreadableError
from mbaas.client.session import LaneSession, ReceivedBlock
from mbaas.client.stalls import StreamStats
from mbaas.errors import BadSampleError
from mbaas.fields import Arrays
from mbaas.messages import BadSample, ConsumerReport, DeliveredBlock, DeliveredPart, FeedInfo, Lane, Start
from mbaas.order import Shuffle

LOCAL_READ_S = 5.0
"""Longest time in which a block on the reader's own node is read before it is unreadable. It takes milliseconds. But
where several threads of a process read blocks, Ray 2.60 now and then forgets a part for one of them (once in 15,000 to
20,000 blocks of four threads): getting it never ends. When it is asked for again, it comes.
"""

REMOTE_READ_S = 30.0
"""The same for a block of which parts are on other nodes, which may be unreachable. To this the time is added that they
take at `SLOWEST_LINK_BYTES_PER_S`.
"""

SLOWEST_LINK_BYTES_PER_S = 1e6
"""A link between nodes that is slower than this counts as broken."""

LOOK_S = 2.0
"""Period at which a reader that waits asks whether the block is still there."""


class Block(Struct, frozen=True):
    """A block in the consumer's hands.

    Attributes:
        number: the block's.
        shuffle: of the block's epoch.
        samples: of the block.
        bad: samples of it that were left out as bad.
    """

    number: int
    shuffle: Shuffle
    samples: BlockView
    bad: tuple[BadSample, ...]


class Stream(Protocol):
    """The blocks of a feed for one consumer, from its cursor on, without end.

    Attributes:
        info: what the consumer knows of the feed.
    """

    info: FeedInfo

    @property
    def cursor(self) -> int:
        """Number of the next block that `next` returns."""

    def next(self) -> Block:
        """Wait for the block at the cursor, and move past it.

        Raises:
            BadSampleError: the block holds a bad sample and the feed's ``on_bad_sample`` is "raise".
            WaitTimeoutError: no block came, and the feed made no progress, for the time that was set.
            FeedFailedError: the feed cannot go on.
        """

    def look_ahead(self) -> None:
        """Begin what can be begun for the next block; called after `next` and between minibatches."""

    def next_epoch(self) -> int:
        """Return the number of the feed's first epoch of which a consumer has seen nothing that begins one now."""

    def skip_epoch(self) -> None:
        """Give up the rest of the epoch that the consumer is in, if it had anything of it."""

    def start_again(self) -> Start:
        """Return where a stream begins that goes on at the cursor."""

    def use_up(self, block: int) -> None:
        """Note that the consumer is done with all blocks below ``block``; the next call or heartbeat says so."""

    def held_blocks(self) -> int:
        """Return how many blocks of its sessions have arrays that are alive in this process."""

    def heartbeat(self, report: ConsumerReport) -> None:
        """Tell the service that this consumer lives and what it holds; called from a thread of its own."""

    def leave(self, report: ConsumerReport | None) -> None:
        """End the consumer's sessions."""


class BlockStream:
    """A `Stream` of one lane's own blocks; in most feeds these are all of its blocks.

    Args:
        session: the consumer's session in the lane, which was just opened.
        stats: where waits and bytes are counted.

    Attributes:
        session: the session.
    """

    def __init__(self, session: LaneSession, stats: StreamStats) -> None:
        self.session, self.info = session, session.info
        self._stats = stats

    @property
    def lane(self) -> Lane:
        """The lane whose own blocks are counted here."""
        return self.session.lane

    @property
    def cursor(self) -> int:
        """See `Stream.cursor`."""
        return self.session.cursor

    # ---- blocks ----

    def next(self, while_waiting: Callable[[], None] | None = None) -> Block:
        """See `Stream.next`; ``while_waiting`` is called whenever a call brought nothing."""
        began = time.perf_counter()
        arrays: list[Arrays] | None = None
        while arrays is None:
            received = self.session.wait(while_waiting)
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
        self.session.advance()  # also past a block that ended in an error: a trial that catches it may go on
        bad = tuple(bad for part in block.parts for bad in part.meta.bad)
        if not arrays:
            raise block.error or BadSampleError(bad[0].uri, bad[0].reason)
        return Block(block.number, block.shuffle, BlockView(arrays), bad)

    def _read(self, received: ReceivedBlock) -> list[Arrays] | None:
        """Return the arrays of a block's parts, which count as held from here on, unless they are to be copies.

        There are none if the block ended in an error.

        Return None if they cannot be read because the node where they lay is gone: they are asked for again.
        """
        block, fetched = received.block, None
        end = time.monotonic() + _longest_read_s(self.session.remote_parts(block))
        while fetched is None:
            try:
                fetched = self._fetch(received).read(LOOK_S)
            except UnreadableError as error:
                # Ray takes long to give up an unreachable node; a consumer that asks the coordinator need not wait for
                # that.
                if error.for_good or time.monotonic() > end or self.session.is_given_up(block):
                    self.session.ask_again(block, unreadable_parts(block))
                    return None
        self._stats.read_bytes += fetched.read_bytes
        if received.as_copy:
            return [{name: array.copy() for name, array in part.items()} for part in fetched.parts]
        self.session.hold_arrays(block.number, fetched.parts)
        return fetched.parts

    def _fetch(self, received: ReceivedBlock, slack_s: float = 0.0) -> BlockFetch:
        """Begin to read a block, unless that was begun; the consumer does not need it for ``slack_s`` seconds."""
        if received.fetch is None:
            received.fetch = self._begin_fetch(received.block, slack_s)
        return received.fetch

    def _begin_fetch(self, block: DeliveredBlock, slack_s: float) -> BlockFetch:  # noqa: ARG002 - for RowStream
        return WholeFetch(block, self.session.remote_parts(block))

    def look_ahead(self) -> None:
        """Have the next block's parts come from other nodes, if it is known; where they lie here, do nothing."""
        if self.session.are_remote:
            self.session.take_in_early()
            if self.session.received:
                self._fetch(self.session.received[0])

    def skip_to(self, block: int) -> None:
        """Go on at ``block``, which lies ahead; what was received before it is let go."""
        self.session.skip_to(block)

    def next_epoch(self) -> int:
        """See `Stream.next_epoch`."""
        return self.session.next_epoch(self.cursor)

    def skip_epoch(self) -> None:
        """See `Stream.skip_epoch`."""
        own = self.session.own_epoch_of(self.cursor)
        if self.cursor > own.first:
            self.skip_to(own.end)

    def start_again(self) -> Start:
        """See `Stream.start_again`."""
        return self.session.start_at(self.cursor)

    def use_up(self, block: int) -> None:
        """See `Stream.use_up`."""
        self.session.done = block

    def held_blocks(self) -> int:
        """See `Stream.held_blocks`."""
        return self.session.held_blocks()

    # ---- signs of life ----

    def heartbeat(self, report: ConsumerReport) -> None:
        """See `Stream.heartbeat`."""
        self.session.hear_heartbeat(self.session.send_heartbeat(report))

    def leave(self, report: ConsumerReport | None) -> None:
        """See `Stream.leave`."""
        self.session.leave(report)


def _longest_read_s(remote: Sequence[DeliveredPart]) -> float:
    """Return how long a block may take of which these parts are on other nodes."""
    if not remote:
        return LOCAL_READ_S
    return REMOTE_READ_S + sum(part.meta.nbytes for part in remote) / SLOWEST_LINK_BYTES_PER_S
