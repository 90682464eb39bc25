"""A consumer's stream of a feed with several lanes: it has a stream in each, and takes blocks from them in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mbaas.client.session import WANTED_BLOCKS
from mbaas.client.stream import Block, BlockStream
from mbaas.errors import BadSampleError, MbaasError, PrepFailedError
from mbaas.messages import ConsumerReport, FeedInfo, Start

LANE_POLL_S = 2.0
"""Wait in one lane after which a consumer returns the blocks received ahead in the others, in seconds."""


def wanted_blocks(info: FeedInfo) -> int:
    """Return the most blocks per call in a feed with lanes.

    A lane has only its part of the staging memory, and one consumer must not fill it. The limit leaves space for two
    more blocks, next to these and one that the consumer still reads.
    """
    block_bytes = info.order.block_samples * info.spec.nbytes
    lane_blocks = info.settings.staging_bytes // info.settings.staging.lanes // block_bytes
    return max(1, min(WANTED_BLOCKS, lane_blocks - 3))


class LaneStream:
    """A `Stream` of all blocks of a feed, in the feed's order, for any number of lanes.

    The first lane decides the epoch at which a consumer begins; it joins the other lanes at exactly that epoch. One
    call per lane is in flight ahead. A consumer that waits long in one lane hands back the blocks received ahead in
    the others. Otherwise two consumers out of step could deadlock, each waiting for memory held by the other.
    """

    def __init__(self, streams: Sequence[BlockStream], cursor: int) -> None:
        self._streams = streams
        self.info, self.cursor = streams[0].info, cursor

    # ---- blocks ----

    def next(self) -> Block:
        """See `Stream.next`."""
        # in all lanes before the wait in one, so that the others prepare blocks meanwhile
        for stream in self._streams:
            stream.session.ask_ahead()
        stream = self._stream_of(self.cursor)
        try:
            block = stream.next(self._hand_back)
        except (BadSampleError, PrepFailedError):
            self.cursor += 1  # the lane's stream is past the bad block, so follow it
            raise
        number = stream.lane.feed_block(block.number)
        if number != self.cursor:
            self._go_to(number)
        self.cursor = number + 1
        return Block(number, block.shuffle, block.samples, block.bad)

    def _stream_of(self, block: int) -> BlockStream:
        return next(stream for stream in self._streams if stream.lane.has(block))

    def _go_to(self, block: int) -> None:
        # the first lane has chosen another epoch
        assert block % self.info.order.blocks_per_epoch == 0, f"moved to block {block}, where no epoch begins"
        for stream in self._streams[1:]:
            stream.skip_to(stream.lane.first_from(block))

    def _hand_back(self) -> None:
        for stream in self._streams:
            # At an epoch's start the first lane may already have moved this consumer to another epoch.
            may_be_moved = stream is self._streams[0] and stream.cursor % stream.lane.blocks_per_epoch == 0
            if not stream.lane.has(self.cursor) and not may_be_moved:
                stream.session.hand_back()

    def look_ahead(self) -> None:
        """See `Stream.look_ahead`."""
        self._stream_of(self.cursor).look_ahead()

    def skip_to(self, block: int) -> None:
        """Continue at ``block``, the first of an epoch; drop blocks received before it."""
        for stream in self._streams:
            stream.skip_to(stream.lane.first_from(block))
        self.cursor = max(self.cursor, block)

    def next_epoch(self) -> int:
        """See `Stream.next_epoch`."""
        if len(self._streams) > 1:
            return self.info.order.epoch_of(self.cursor)
        return self._streams[0].session.next_epoch(self.cursor)

    def skip_epoch(self) -> None:
        """See `Stream.skip_epoch`."""
        blocks = self.info.order.blocks_per_epoch
        self.skip_to(-(-self.cursor // blocks) * blocks)

    def start_again(self) -> Start:
        """See `Stream.start_again`."""
        return Start(self.cursor) if len(self._streams) > 1 else self._streams[0].session.start_at(self.cursor)

    def use_up(self, block: int) -> None:
        """See `Stream.use_up`."""
        for stream in self._streams:
            stream.use_up(stream.lane.first_from(block))

    def held_blocks(self) -> int:
        """See `Stream.held_blocks`."""
        return sum(stream.held_blocks() for stream in self._streams)

    # ---- heartbeats ----

    def heartbeat(self, report: ConsumerReport) -> None:
        """See `Stream.heartbeat`. Only the first lane gets the report, and only its errors are raised."""
        first, *others = [stream.session for stream in self._streams]
        answer = first.send_heartbeat(report)
        answers = [session.send_heartbeat(ConsumerReport()) for session in others]
        for session, ref in zip(others, answers, strict=True):
            with contextlib.suppress(MbaasError):  # a failed lane raises its error when blocks are requested
                session.hear_heartbeat(ref)
        first.hear_heartbeat(answer)

    def leave(self, report: ConsumerReport | None) -> None:
        """See `Stream.leave`. The first lane, which stores the consumer's report, is left last."""
        for stream in self._streams[1:]:
            with contextlib.suppress(MbaasError):
                stream.leave(None)
        self._streams[0].leave(report)
