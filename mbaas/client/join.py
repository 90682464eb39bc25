"""Joins a feed: the options of a consumer, and the stream for the feed's lanes and the consumer's rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mbaas.client.collate import Collate
from mbaas.client.lane_stream import LANE_POLL_S, LaneStream, wanted_blocks
from mbaas.client.rank_group import EnlistedSession, RankGroup, RankSession
from mbaas.client.rank_stream import RankStream, RowStream
from mbaas.client.rpc import call_patiently
from mbaas.client.session import LaneSession, Polling
from mbaas.client.sharding import RankSharding
from mbaas.client.stalls import StreamStats
from mbaas.client.stream import BlockStream, Stream
from mbaas.core import calls
from mbaas.errors import ConfigError, MbaasError, shown
from mbaas.messages import ConsumerName, FeedInfo, JoinStart, Lane, Start

OpenLane = Callable[[Any, Start], BlockStream]
"""Joins a further lane, given its coordinator and the start in the lane's block numbers."""


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Options of a consumer, the same for `mbaas.join` and `tune_integration.get_loader`."""

    batch_size: int | None = None
    """Samples in a global minibatch, which the ranks of a trial divide. Default: the feed's."""

    format: Literal["torch", "numpy"] = "torch"
    """Private tensors ("torch"), or read-only arrays without a copy ("numpy")."""

    device: Any = None
    """Torch device that minibatches are copied to."""

    collate: Collate = "list"
    """Batching of fields whose values differ in length, such as boxes. "list": a list of arrays, one per sample; "pad":
    one array, with shorter values padded with zeros, and their lengths as ``NAME_length`` int64[n]; "packed": all
    values concatenated, and ``NAME_bounds`` int64[n + 1], so that sample i has the values from bounds[i] to bounds[i +
    1]. Padded images of different sizes have zeros to the right and below, and ``image_size`` int64[n, 2]. Packed
    images are pixels [total, 3], also with ``image_size``. Masks are batched like their images."""

    start: JoinStart | None = None
    """"epoch" waits for the next epoch that other consumers begin. "now" begins immediately, in the middle of their
    epoch if necessary, and each of its own epochs still contains every sample once. While any consumer is out of phase,
    epochs are shuffled within the segments defined by its starting position (`mbaas.order.Shuffle`). Ranks, and feeds
    with several lanes, always use "epoch". Default: "epoch", and "now" for `tune_integration.get_loader`."""

    state: dict[str, Any] | None = None
    """A result of `mbaas.Loader.state_dict` to resume from. The same as `mbaas.Loader.load_state_dict`, but without
    preparing minibatches at another position first. None: no state."""

    rank: int | None = None
    """Rank in a data-parallel trial: each rank gets its part of every minibatch (see `mbaas.Loader`), and is listed as
    ``consumer[rank]``. All ranks pass the same ``consumer`` and ``world_size``. An epoch begins when all have joined.
    Default: a single consumer; in a Ray Train worker, `tune_integration.get_loader` uses the worker's rank."""

    world_size: int | None = None
    """Number of ranks of the trial."""

    wait_timeout_s: float = 300.0
    """Time limit for a wait without progress of the feed, and for the restart of a feed whose program died without
    stopping it."""

    def __post_init__(self) -> None:
        # Without pydantic, because each trial runs this.
        rank, world_size = self.ranks
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, world_size - 1], world_size was {world_size} and rank was {rank}")
        if self.start is not None and self.start not in get_args(JoinStart):
            raise ConfigError(f'start must be "epoch" or "now", got {shown(self.start)}')
        if self.collate not in get_args(Collate):
            raise ConfigError(f'collate must be "list", "pad" or "packed", got {shown(self.collate)}')
        if self.start == "now" and world_size > 1:
            raise ConfigError(
                f'start must be "epoch" for ranks, which begin together, got "now" for {world_size} ranks'
            )
        calls.number("wait_timeout_s", self.wait_timeout_s)

    @property
    def ranks(self) -> tuple[int, int]:
        """Rank and world size: (0, 1) for a single consumer."""
        rank, world_size = self.rank, self.world_size
        if rank is None and world_size is None:
            return 0, 1
        if type(rank) is not int or type(world_size) is not int:
            raise ConfigError(
                f"rank and world_size must both be whole numbers, or both be left out, got rank={rank!r} and "
                f"world_size={world_size!r}"
            )
        return rank, world_size


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
