"""A rank's stream: reads the rank's samples of each block, and starts fetching them one block ahead."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mbaas.client.part_fetch import BlockFetch, PartFetch, RemoteRows, plan_fetch
from mbaas.client.rank_group import RankGroup, RankSession
from mbaas.client.sharding import RankSharding
from mbaas.client.stalls import StreamStats
from mbaas.client.stream import Block, Stream
from mbaas.errors import FeedGoneError, FeedRestartingError, StateError, WaitTimeoutError
from mbaas.memory.part_memory import UnreadableError, refs_of
from mbaas.wire.blocks import DeliveredBlock
from mbaas.wire.consumers import Start

STEP_MEMORY = 0.8
"""Weight of earlier measurements in the moving average of the trial's time per block."""


class RankStream(Stream):
    """The blocks of a feed for one rank of a data-parallel trial.

    Blocks contain at least the rank's own samples, as selected by `mbaas.client.sharding.RankSharding`.
    """

    session: RankSession

    def __init__(self, session: RankSession, stats: StreamStats, *, group: RankGroup, sharding: RankSharding) -> None:
        super().__init__(session, stats)
        self._group, self._sharding = group, sharding
        self._handed_out_at: float | None = None

    def next(self) -> Block:
        """See `Stream.next`; the block has all samples of this rank, and may have others.

        Raises:
            WaitTimeoutError: also if not all ranks have joined in time.
        """
        began = time.perf_counter()
        if self._handed_out_at is not None:
            self._group.step_s += (1 - STEP_MEMORY) * (began - self._handed_out_at - self._group.step_s)
        if not self._group.has_begun:
            self._begin()
            # The wait for other ranks, which neither faster fetch nor faster prep can shorten.
            self._stats.wait_s += time.perf_counter() - began
        block = super().next()
        self._handed_out_at = time.perf_counter()
        return block

    def _begin(self) -> None:
        start = self._group.begin(self.cursor)
        if start > self.cursor:
            self.skip_to(start)
        elif start < self.cursor:  # a session's cursor never moves back, so a new session is needed
            self.session.rejoin(Start(start))
            self.use_up(start)

    def _begin_fetch(self, block: DeliveredBlock, slack_s: float) -> BlockFetch:
        if block.error is not None:  # nothing to divide among ranks
            return super()._begin_fetch(block, slack_s)
        group, number = self._group, block.number
        plan, ids = group.plan(number, block.shuffle), self._sharding.order.sample_ids(number, block.shuffle)
        bad_ids = [bad.sample_id for part in block.parts for bad in part.meta.bad]
        bad_rows = np.flatnonzero(np.isin(ids, bad_ids))
        rows = self._sharding.shard(number, block.shuffle, self.session.own_epoch_of(number), bad_ids).rows
        fetch_plan = plan_fetch(
            block, rows, ids[rows], placement=plan.placement, node=self.session.node, helpers=group.caches
        )

        def ask(node: str, asked: RemoteRows) -> Any:
            refs = refs_of(part.address.held() for part in asked.parts)
            return group.caches[node].pick.remote(self.session.consumer, refs, asked.rows, bad_rows, slack_s)

        return PartFetch(rows, fetch_plan, self.info.spec, ask)

    def look_ahead(self) -> None:
        """Start fetching the next block's rows, if the block is known and all ranks have joined."""
        self.session.take_in_early()
        if not self.session.received:
            return
        following = self.session.received[0]
        if following.block.error is not None:
            return
        # An epoch's first block needs that epoch's plan, which ranks that lag have not requested yet. Fetching ahead is
        # not worth waiting for them.
        try:
            self._group.plan(following.block.number, following.block.shuffle, 0.0)
        except (WaitTimeoutError, UnreadableError, FeedGoneError, FeedRestartingError, StateError):
            return  # others are done with the feed or not there yet; `next` raises any lasting error
        self._fetch(following, self._group.step_s)
