"""A consumer's end of a feed with lanes: a stream in each, and blocks from them in turn."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from mbaas.client.stream import WANT, Block, BlockStream
from mbaas.errors import BadSampleError, MbaasError
from mbaas.messages import ID_BYTES, ConsumerReport, FeedInfo, Lane

POLL_S = 2.0
"""A wait in one lane that is longer than this gives up what was received ahead in the others."""


class OpenLane(Protocol):
    """Joins a lane."""

    def __call__(self, coordinator: Any, *, start: int) -> BlockStream:
        """Open a stream that begins at the lane's own block ``start``, or where others begin that share it."""


def _want(info: FeedInfo) -> int:
    """Blocks that one call may bring: with one that a consumer still reads, they leave room in a lane for two more."""
    block_bytes = info.order.block_samples * (info.spec.nbytes + ID_BYTES)
    return max(1, min(WANT, info.settings.staging_bytes // info.settings.lanes // block_bytes - 3))


class LaneStream:
    """A `Stream` of all blocks of a feed, in the feed's order, whatever number of lanes it has.

    The first lane decides at which epoch a consumer begins; in the others it joins exactly there. In each a call is in
    flight ahead. A consumer that waits in one lane for long holds back nothing in the others: else two that are out of
    step could wait for each other's memory for ever.

    Args:
        first: the stream of lane 0, which was just opened.
        cursor: the first block.
        open_lane: opens the stream of a further lane.
    """

    def __init__(self, first: BlockStream, cursor: int, open_lane: OpenLane) -> None:
        self.info, self.cursor, self._done = first.info, cursor, cursor
        self._streams = [first]
        lanes = first.lane.lanes
        try:
            for number, coordinator in enumerate(first.info.lanes, 1):
                start = Lane(first.lane.feed_blocks, number, lanes).first_from(cursor)
                self._streams.append(open_lane(coordinator, start=start))
        except MbaasError:
            with contextlib.suppress(MbaasError):
                self.leave(None)
            raise
        for stream in self._streams if lanes > 1 else ():
            stream.poll_s = min(POLL_S, stream.poll_s)
            stream.want = _want(first.info)
            stream.starves = self._hand_back

    # ---- blocks ----

    def next(self) -> Block:
        """The block at the cursor; see `Stream.next`."""
        for stream in self._streams:
            stream.ask_ahead()
        stream = self._stream_of(self.cursor)
        try:
            block = stream.next()
        except BadSampleError:
            self.cursor += 1
            raise
        number = stream.lane.feed_block(block.number)
        if number != self.cursor:
            self._go_to(number)
        self.cursor = number + 1
        return Block(number, block.samples, block.bad)

    def _stream_of(self, block: int) -> BlockStream:
        return next(stream for stream in self._streams if stream.lane.has(block))

    def _go_to(self, block: int) -> None:
        """The first lane had this consumer begin another epoch, with others; the other lanes follow."""
        assert block % self.info.order.blocks_per_epoch == 0, f"moved to block {block}, where no epoch begins"
        for stream in self._streams[1:]:
            stream.skip_to(stream.lane.first_from(block))

    def _hand_back(self) -> None:
        """This consumer waits: give up what it received ahead in the other lanes.

        Not at an epoch's beginning in the first lane: there it may have been moved to another epoch already.
        """
        for stream in self._streams:
            may_be_moved = stream is self._streams[0] and stream.cursor % stream.lane.blocks_per_epoch == 0
            if not stream.lane.has(self.cursor) and not may_be_moved:
                stream.hand_back()

    def look_ahead(self) -> None:
        """See `Stream.look_ahead`."""
        self._stream_of(self.cursor).look_ahead()

    def skip_to(self, block: int) -> None:
        """See `Stream.skip_to`."""
        for stream in self._streams:
            stream.skip_to(stream.lane.first_from(block))
        self.cursor = max(self.cursor, block)

    @property
    def done(self) -> int:
        """All blocks below are used up, as the stream's owner says."""
        return self._done

    @done.setter
    def done(self, block: int) -> None:
        self._done = block
        for stream in self._streams:
            stream.done = stream.lane.first_from(block)

    def held_blocks(self) -> int:
        """See `Stream.held_blocks`."""
        return sum(stream.held_blocks() for stream in self._streams)

    # ---- signs of life ----

    def heartbeat(self, report: ConsumerReport) -> None:
        """See `Stream.heartbeat`; the first lane gets the report, and an error counts only there."""
        refs = [self._streams[0].send_pulse(report)]
        refs += [stream.send_pulse(ConsumerReport()) for stream in self._streams[1:]]
        for stream, ref in zip(self._streams[1:], refs[1:], strict=True):
            with contextlib.suppress(MbaasError):
                stream.hear_pulse(ref)
        self._streams[0].hear_pulse(refs[0])

    def leave(self, report: ConsumerReport | None) -> None:
        """See `Stream.leave`."""
        for stream in self._streams[1:]:
            with contextlib.suppress(MbaasError):
                stream.leave(None)
        self._streams[0].leave(report)
