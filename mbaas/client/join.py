"""Joining a feed: the stream that fits it and the consumer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mbaas.client.figures import StreamStats
from mbaas.client.lane_stream import LaneStream
from mbaas.client.rank_group import RankGroup
from mbaas.client.rank_stream import RankStream, RowStream
from mbaas.client.stream import BlockStream, Stream
from mbaas.messages import FeedInfo, Lane


def open_stream(
    coordinator: Any,
    consumer: str,
    *,
    start: int | None,
    flexible: bool,
    wait_timeout_s: float,
    figures: StreamStats,
    info: FeedInfo | None,
    team: RankGroup | None = None,
) -> Stream:
    """Join a feed, whatever number of lanes it has.

    Args:
        coordinator: the feed's main one.
        consumer, start, flexible, wait_timeout_s, figures: as for `BlockStream`.
        info: of the feed, if it is known; needed with a ``start``.
        team: of a rank of a data-parallel trial.
    """
    own_start = start
    if start is not None and info is not None:
        own_start = Lane(info.order.blocks_per_epoch, 0, info.settings.lanes).first_from(start)
    kind: Callable[..., Any] = BlockStream if team is None else partial(RowStream, team=team)
    enter = partial(kind, consumer=consumer, wait_timeout_s=wait_timeout_s, figures=figures)
    first = enter(coordinator, start=own_start, flexible=flexible)
    if team is None and not first.info.lanes:
        return first
    is_exact = start is not None and not flexible
    cursor = start if start is not None and is_exact else first.lane.feed_block(first.cursor)
    open_lane = partial(enter, flexible=not is_exact)
    if team is None:
        return LaneStream(first, cursor, open_lane)
    return RankStream(first, cursor, open_lane, team=team, figures=figures)
