"""Joins a feed: builds the stream of a consumer, which may be a rank of a data-parallel trial."""

from __future__ import annotations

from typing import Any

from mbaas.calls.client import call_patiently
from mbaas.client.rank_group import RankGroup, RankSession
from mbaas.client.rank_stream import RankStream
from mbaas.client.session import Session
from mbaas.client.sharding import RankSharding
from mbaas.client.stalls import StreamStats
from mbaas.client.stream import Stream
from mbaas.messages import ConsumerName, FeedInfo, Start


def feed_info(coordinator: Any, name: ConsumerName, timeout_s: float) -> FeedInfo:
    """Return the description of a feed before joining it. Wait up to ``timeout_s`` seconds for the feed to open."""
    what = f"consumer {str(name)!r} joins"
    info: FeedInfo = call_patiently(coordinator, coordinator.info.remote, timeout_s, what)
    return info


def open_stream(
    coordinator: Any,
    name: ConsumerName,
    *,
    start: Start,
    sharding: RankSharding,
    wait_timeout_s: float,
    stats: StreamStats,
    born: int,
) -> Stream:
    """Join a feed.

    Args:
        start: position of the first block.
        wait_timeout_s: longest wait without progress of the feed, in seconds.
        born: creation time of the consumer's loader, Unix time in nanoseconds.
    """
    if name.world_size == 1:
        session = Session(coordinator, name, start=start, wait_timeout_s=wait_timeout_s, born=born)
        session.on_renumbered = sharding.renumber
        return Stream(session, stats)
    rank = RankSession(coordinator, name, sharding, start=start, wait_timeout_s=wait_timeout_s, born=born)
    rank.on_renumbered = sharding.renumber
    group = RankGroup(rank, sharding, wait_timeout_s=wait_timeout_s)
    return RankStream(rank, stats, group=group, sharding=sharding)
