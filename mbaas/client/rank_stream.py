"""A rank's end of the protocol: of each block it reads its own samples, one block ahead of their use."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mbaas.client.figures import StreamStats
from mbaas.client.lane_stream import LaneStream, OpenLane
from mbaas.client.part_fetch import PartFetch, RemoteRows, nbytes, plan_fetch
from mbaas.client.rank_group import RankGroup
from mbaas.client.rpc import UnreadableError
from mbaas.client.sharding import RankSharding
from mbaas.client.stream import Block, BlockStream
from mbaas.errors import WaitTimeoutError
from mbaas.messages import ROW, Arrays, ConsumerReport, DeliveredBlock, Delivery

PACE_MEMORY = 0.8
"""How much of the pace that was measured before is kept with every block."""


class RowStream(BlockStream):
    """One lane's blocks, of which it reads at least the rank's own samples.

    Args:
        coordinator, consumer, start, flexible, wait_timeout_s, figures: as for `BlockStream`.
        team: of the rank; it hears of each session in the first lane.
    """

    def __init__(
        self,
        coordinator: Any,
        consumer: str,
        *,
        team: RankGroup,
        start: int | None,
        flexible: bool,
        wait_timeout_s: float,
        figures: StreamStats,
    ) -> None:
        self._team = team
        self._errands: dict[int, PartFetch] = {}  # by block; begun, and not read yet
        super().__init__(
            coordinator, consumer, start=start, flexible=flexible, wait_timeout_s=wait_timeout_s, figures=figures
        )

    def _enter(self, start: int | None, flexible: bool) -> None:
        super()._enter(start, flexible)
        self._errands.clear()
        if self.lane.number == 0:
            self._team.enlist(self, floats=start is None or flexible)

    # ---- reading ----

    def _arrays(self, block: DeliveredBlock, timeout_s: float) -> list[Arrays]:
        if not all(part.payload for part in block.parts):
            return []
        errand = self._errand(block)
        own, others = errand.fetch(timeout_s)
        del self._errands[block.number]
        self._figures.local_bytes += errand.own_bytes(own)
        self._figures.remote_bytes += sum(map(nbytes, others))
        return own + others or [self._nothing()]

    def _errand(self, block: DeliveredBlock, left_s: float = 0.0) -> PartFetch:
        """What was begun for a block, or is begun now; the trial works ``left_s`` seconds until it needs it."""
        errand = self._errands.get(block.number)
        if errand is None or errand.block is not block:
            errand = self._errands[block.number] = self._set_out(block, left_s)
        return errand

    def _set_out(self, block: DeliveredBlock, left_s: float) -> PartFetch:
        team, number = self._team, self.lane.feed_block(block.number)
        plan, ids = team.plan(number), self.info.order.sample_ids(number)
        bad_ids = [bad.sample_id for part in block.parts for bad in part.meta.bad]
        bad_rows = np.flatnonzero(np.isin(ids, bad_ids))
        rows = team.course.leg(number, bad_ids).rows
        route = plan_fetch(block, rows, ids[rows], placement=plan.placement, node=self.node, helpers=team.caches)

        def ask(node: str, wish: RemoteRows) -> Any:
            payloads = [part.payload[0] for part in wish.parts]
            return team.caches[node].pick.remote(self._consumer, payloads, wish.rows, bad_rows, left_s)

        return PartFetch(block, rows, route, ask)

    def _nothing(self) -> Arrays:
        """A part without rows."""
        spec, ids = self.info.spec, np.empty(0, np.int64)
        return {"image": np.empty((0, *spec.shape), spec.dtype), "label": ids, "sample_id": ids, ROW: ids}

    # ---- one block ahead ----

    def look_ahead(self) -> None:
        """Begin to fetch the next block's rows, if it is known and all ranks are there."""
        self._take_what_came()
        if not self._queue or not all(part.payload for part in self._queue[0].parts):
            return
        block = self._queue[0]
        try:
            self._team.plan(self.lane.feed_block(block.number), 0.0)
        except (WaitTimeoutError, UnreadableError):  # others are done with the feed, or on their way
            return
        self._errand(block, self._team.pace_s)

    @property
    def _spare(self) -> int:
        """One, wherever blocks come from: the rank must know the next one to fetch its rows in time."""
        return 1

    def _bring(self, block: DeliveredBlock) -> None:
        """Errands bring what is needed."""

    def _take(self, delivery: Delivery) -> None:
        """Take in blocks; a rank alone may not be moved to another epoch, as single consumers are."""
        if delivery.blocks[0].number != self._received:
            self._enter(self._received, False)
        else:
            super()._take(delivery)

    # ---- what is not wanted after all ----

    def skip_to(self, block: int) -> None:
        """Go on at ``block``; what was begun for blocks before it is let go, too."""
        super().skip_to(block)
        self._errands = {number: errand for number, errand in self._errands.items() if number >= block}

    def hand_back(self) -> None:
        """Give up what was received, and begun, ahead of its use."""
        self._errands.clear()
        super().hand_back()

    def leave(self, report: ConsumerReport | None) -> None:
        """Give the place back, and what was begun."""
        self._errands.clear()
        super().leave(report)


class RankStream(LaneStream):
    """The blocks of a feed for one rank of a data-parallel trial, whatever number of lanes it has.

    Blocks hold at least the rank's own samples; see `mbaas.client.sharding.RankSharding` for which these are.

    Args:
        first, cursor, open_lane: as for `LaneStream`; its streams are `RowStream`s.
        team: of the rank.
        figures: where waits are counted.
    """

    def __init__(
        self, first: RowStream, cursor: int, open_lane: OpenLane, *, team: RankGroup, figures: StreamStats
    ) -> None:
        self._team, self._figures = team, figures
        self._handed_out: float | None = None
        super().__init__(first, cursor, open_lane)

    @property
    def course(self) -> RankSharding:
        """Which samples are the rank's; set before the first block is asked for."""
        return self._team.course

    @course.setter
    def course(self, course: RankSharding) -> None:
        self._team.course = course

    def next(self) -> Block:
        """The block at the cursor; it has all samples that are this rank's, and may have others.

        Raises:
            WaitTimeoutError: also if not all ranks have joined in time.
        """
        began = time.perf_counter()
        if self._handed_out is not None:
            self._team.pace_s += (1 - PACE_MEMORY) * (began - self._handed_out - self._team.pace_s)
        if not self._team.has_begun:
            self._begin()
            self._figures.waited_s += time.perf_counter() - began
        block = super().next()
        self._handed_out = time.perf_counter()
        return block

    def _begin(self) -> None:
        """Begin where the others begin."""
        first = self._streams[0]
        start = self._team.begin(self.cursor)
        block = first.lane.feed_block(start)
        if start > first.cursor:
            self.skip_to(block)
        elif start < first.cursor:
            for stream in self._streams:
                stream.rejoin(stream.lane.first_from(block))
            self.cursor = self.done = block
