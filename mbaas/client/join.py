"""Joins a feed, and joins it again after a feed restart."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from mbaas import units
from mbaas.client.lane_stream import LANE_POLL_S, LaneStream, wanted_blocks
from mbaas.client.rank_group import EnlistedSession, RankGroup, RankSession
from mbaas.client.rank_stream import RankStream, RowStream
from mbaas.client.rpc import call_patiently
from mbaas.client.session import LaneSession, Polling
from mbaas.client.sharding import RankSharding
from mbaas.client.stalls import StreamStats
from mbaas.client.stream import BlockStream, Stream
from mbaas.errors import FeedFailedError, FeedGoneError, MbaasError
from mbaas.messages import ConsumerName, FeedInfo, Lane, Start

RESTART_LOOK_S = 0.2
"""Pause between two checks for a feed restart, in seconds."""

_log = logging.getLogger(__name__)

Find = Callable[[FeedGoneError], Any]
"""Finds a feed's coordinator. Returns None before it has been restarted, and raises if it will not be."""

OpenLane = Callable[[Any, Start], BlockStream]
"""Joins a further lane, given its coordinator and the start in the lane's block numbers."""


def feed_info(coordinator: Any, name: ConsumerName, timeout_s: float) -> FeedInfo:
    """Return the description of a feed before joining it. Wait up to ``timeout_s`` seconds for the feed to open."""
    what = f"consumer {str(name)!r} joins"
    info: FeedInfo = call_patiently(coordinator, coordinator.info.remote, timeout_s, what)
    return info


def open_stream(
    coordinator: Any,
    name: ConsumerName,
    info: FeedInfo,
    *,
    start: Start,
    sharding: RankSharding,
    wait_timeout_s: float,
    stats: StreamStats,
    born: int,
) -> Stream:
    """Join a feed with any number of lanes.

    Args:
        coordinator: the feed's main coordinator, which has the first lane.
        info: result of `feed_info`.
        start: first block, in the feed's numbers.
        wait_timeout_s: longest wait without progress of the feed, in seconds.
        born: creation time of the consumer's loader, Unix time in nanoseconds.
    """
    lane = Lane(info.order.blocks_per_epoch, 0, info.settings.staging.lanes)
    own_start = start.of_lane(lane)
    polling = Polling(wait_timeout_s)
    if lane.lanes > 1:
        polling = Polling(wait_timeout_s, blocks=wanted_blocks(info), poll_s=LANE_POLL_S)
    if name.world_size == 1:
        session = LaneSession(coordinator, name, start=own_start, polling=polling, born=born)
        if lane.lanes == 1:
            session.on_renumbered = sharding.renumber
            return BlockStream(session, stats)

        def open_lane(other: Any, start: Start) -> BlockStream:
            return BlockStream(LaneSession(other, name, start=start, polling=polling, born=born), stats)

        cursor = _first_block(session, start)
        return LaneStream(_in_all_lanes(BlockStream(session, stats), cursor, start, open_lane), cursor)

    # The ranks agree through the session in the first lane, and all streams read by that agreement. So the group is
    # created after that session and before the streams.
    enlisted = EnlistedSession(coordinator, name, sharding, start=own_start, polling=polling, born=born)
    group = RankGroup(enlisted, sharding, wait_timeout_s=wait_timeout_s)

    def open_rank_lane(other: Any, start: Start) -> BlockStream:
        session = RankSession(other, name, start=start, polling=polling, born=born)
        return RowStream(session, stats, group=group, sharding=sharding)

    cursor = _first_block(enlisted, start)
    first = RowStream(enlisted, stats, group=group, sharding=sharding)
    stream = RankStream(_in_all_lanes(first, cursor, start, open_rank_lane), cursor, group=group, stats=stats)

    def renumber(by: int) -> None:
        sharding.renumber(by)
        stream.cursor += by

    enlisted.on_renumbered = renumber
    return stream


def _first_block(first: LaneSession, start: Start) -> int:
    if start.block is not None and start.is_exact and first.lane.lanes > 1:
        return start.block
    # otherwise the first lane has decided
    return first.lane.feed_block(first.cursor)


def _in_all_lanes(first: BlockStream, cursor: int, start: Start, open_lane: OpenLane) -> list[BlockStream]:
    streams = [first]
    try:
        for number, coordinator in enumerate(first.info.lanes, 1):
            lane = Lane(first.lane.feed_blocks, number, first.lane.lanes)
            streams.append(open_lane(coordinator, Start(lane.first_from(cursor), flexible=not start.is_exact)))
    except MbaasError:
        with contextlib.suppress(MbaasError):
            LaneStream(streams, cursor).leave(None)
        raise
    return streams


def await_feed_restart(
    error: FeedGoneError, coordinator: Any, *, find: Find, name: ConsumerName, info: FeedInfo, timeout_s: float
) -> tuple[Any, FeedInfo]:
    """Wait for the restart of a feed whose coordinator is gone. Return its new coordinator and description.

    Raises:
        FeedGoneError: the feed is not restarted in time.
        FeedFailedError: the feed was stopped, or restarted with options that this consumer cannot continue with.
    """
    feed, end, said = info.settings.name, time.monotonic() + timeout_s, False
    while time.monotonic() < end:
        found = find(error)
        if found is not None and found._actor_id != coordinator._actor_id:
            with contextlib.suppress(FeedGoneError):  # it did not start; another one may
                successor = feed_info(found, name, end - time.monotonic())
                _check_same(info, successor, name)
                _log.warning("feed %r was restarted, consumer %r continues", feed, str(name))
                return found, successor
        elif not said:
            said = True
            _log.warning(
                "the program that served feed %r is gone; consumer %r waits up to %s for a feed restart",
                feed, str(name), units.seconds(timeout_s),
            )  # fmt: skip
        time.sleep(RESTART_LOOK_S)
    raise FeedGoneError(
        f"consumer {str(name)!r} waited {units.seconds(timeout_s)} for a restart of feed {feed!r}: "
        "the program that served it is gone"
    ) from error


def _check_same(known: FeedInfo, successor: FeedInfo, name: ConsumerName) -> None:
    """Raise FeedFailedError if the restarted feed makes other blocks, or other minibatches from them."""
    pairs = zip(_essence(known).items(), _essence(successor).values(), strict=True)
    for (what, before), now in pairs:
        if before != now:
            raise FeedFailedError(
                f"feed {known.settings.name!r} was restarted with another {what}: {now!r} instead of {before!r}; "
                f"consumer {str(name)!r} cannot continue there and must join again"
            )


def _essence(info: FeedInfo) -> dict[str, object]:
    return {
        "dataset, pipeline, seed and order": info.fingerprint,
        "engine": info.engine,
        "dali_share": info.settings.dali_share,
        "samples in a block": info.order.block_samples,
        "drop_last": info.settings.drop_last,
        "on_bad_sample": info.settings.on_bad_sample,
    }
