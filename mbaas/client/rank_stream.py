"""A rank's stream: agrees with the other ranks on beginnings and plans, and reads the rank's samples of each block."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec.structs import replace

from mbaas.base.units import seconds
from mbaas.calls import encoding
from mbaas.client.part_fetch import PartFetch, RemoteRows, plan_fetch
from mbaas.client.stream import Block, Stream
from mbaas.errors import ConfigError, FeedGoneError, FeedRestartingError, StateError, WaitTimeoutError
from mbaas.memory.part_memory import UnreadableError, refs_of
from mbaas.samples.order import Shuffle
from mbaas.wire.blocks import DeliveredBlock
from mbaas.wire.consumers import POLL_S, Delivery, Start
from mbaas.wire.ranks import RankCall, RankOrders, RankPlan, RankReport

LEFT_OVER_LEASES = 1.5
"""Leases after which ranks of an earlier run of the trial are gone; their batch size may have differed."""


class RankStream(Stream):
    """The blocks of a feed for one rank of a data-parallel trial.

    Blocks contain at least the rank's own samples, as selected by `mbaas.client.sharding.RankSharding`, to which each
    epoch's plan is added. The rank is reported to the others through the coordinator. All ranks of a trial stay in side
    epochs, so that no rank gets an epoch ahead of the others.
    """

    _report: RankReport  # the last one
    _caches: Mapping[str, Any] = MappingProxyType({})  # node id -> its cache node, which sends rows
    _has_begun = False  # all ranks have agreed on the first block

    # ---- blocks ----

    def next(self) -> Block:
        """See `Stream.next`; the block has all samples of this rank, and may have others.

        Raises:
            WaitTimeoutError: also if ranks are missing for too long.
            ConfigError: other ranks have another batch size.
            StateError: other ranks read the epoch in another order, or by a plan that was lost.
        """
        if not self._has_begun:
            began = time.perf_counter()
            self._begin()
            # The wait for other ranks, which neither faster fetch nor faster prep can shorten.
            self._stats.wait_s += time.perf_counter() - began
        return super().next()

    def _begin(self) -> None:
        """Wait for all ranks, and move to the block at which they begin."""
        start = self._agree(self.cursor, None, self._wait_timeout_s).start
        self._report = replace(self._report, floats=False)  # the session can no longer start at another epoch
        self._has_begun = True
        if start > self.cursor:
            self.skip_to(start)
        elif start < self.cursor:  # a session's cursor never moves back, so a new session is needed
            self.rejoin(Start(start))
            self.done = start

    def _begin_fetch(self, block: DeliveredBlock) -> PartFetch:
        if block.error is not None:  # nothing to divide among ranks
            return super()._begin_fetch(block)
        number = block.number
        plan, ids = self._plan(number, block.shuffle), self._sharding.order.sample_ids(number, block.shuffle)
        bad_ids = [bad.sample_id for part in block.parts for bad in part.meta.bad]
        bad_rows = np.flatnonzero(np.isin(ids, bad_ids))
        rows = self._sharding.shard(number, block.shuffle, self.own_epoch_of(number), bad_ids).rows
        fetch_plan = plan_fetch(block, rows, ids[rows], placement=plan.placement, node=self.node, helpers=self._caches)

        def ask(node: str, asked: RemoteRows) -> Any:
            refs = refs_of(part.address.held() for part in asked.parts)
            return self._caches[node].pick.remote(refs, asked.rows, bad_rows)

        return PartFetch(fetch_plan, self.info.spec, rows, ask)

    def look_ahead(self) -> None:
        """Start fetching the next block's rows, if the block is known and all ranks have joined."""
        self._take_in_early()
        if not self.received or self.received[0].block.error is not None:
            return
        following = self.received[0]
        # An epoch's first block needs that epoch's plan, which ranks that lag have not requested yet. Fetching ahead is
        # not worth waiting for them.
        try:
            self._plan(following.number, following.shuffle, 0.0)
        except (WaitTimeoutError, UnreadableError, FeedGoneError, FeedRestartingError, StateError):
            return  # others are done with the feed or not there yet; `next` raises any lasting error
        self._fetch(following)

    def runs_short(self, *, are_remote: bool) -> bool:  # noqa: ARG002 - wherever blocks come from
        """Return whether at most one block is left: a rank must have the next block to fetch its rows in time."""
        return super().runs_short(are_remote=True)

    # ---- sessions ----

    def _receive(self, delivery: Delivery) -> None:
        # a single rank must not be moved to another epoch, unlike a single consumer
        if delivery.blocks[0].number != self.following:
            self._join(self.start_at(self.following), self._wait_timeout_s)
        else:
            super()._receive(delivery)

    def _join(self, start: Start, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        super()._join(start, timeout_s)
        # Every new session is reported, because a restarted coordinator has lost all ranks. A restored trial's ranks
        # start at the position of its state.
        self._report = RankReport(
            name=self._name,
            batch_size=self._sharding.batch_size,
            session=self.number,
            node=self.node,
            cursor=self.cursor,
            floats=not start.is_exact,
            aside=self.aside,
            due=start.block if start.flexible else None,
            pipeline=self.info.pipeline if self.info.difference else "",
            blocks_per_epoch=self.info.order.blocks_per_epoch,
        )
        self._call_patiently("enlist_rank", encoding.encode(self._report), end - time.monotonic(), "joins")

    # ---- agreement with the other ranks ----

    def _plan(self, block: int, shuffle: Shuffle, wait_s: float | None = None) -> RankPlan:
        """Return the plan that divides the minibatches of the epoch of ``block``.

        Wait up to ``wait_s`` seconds for missing ranks, by default as long as for blocks. Raises `UnreadableError` if
        this rank's session has ended.
        """
        epoch = self._sharding.order.epoch_of(block)
        plan = self._sharding.plans.get(epoch)
        if plan is None or plan.shuffle != shuffle:
            self._agree(block, shuffle, self._wait_timeout_s if wait_s is None else wait_s)
        return self._sharding.plans[epoch]

    def _agree(self, block: int, shuffle: Shuffle | None, wait_s: float) -> RankOrders:
        """Request the plan for a block's epoch, which exists once all ranks have joined."""
        began, order = time.monotonic(), self._sharding.order
        left_over_s = min(wait_s, LEFT_OVER_LEASES * self.info.settings.timeouts.lease_s)
        waited_s, poll_s = 0.0, min(wait_s, POLL_S)
        epoch = order.epoch_of(block)
        while (orders := self._orders(epoch, shuffle, poll_s, max(0.0, wait_s - waited_s))).plan is None:
            report, waited_s = self._report, time.monotonic() - began
            is_unknown = report.rank in orders.missing  # this rank itself: its session has ended
            if is_unknown and self._has_begun:
                # The block was read in that session. The next call for blocks decides whether this consumer may
                # continue.
                raise UnreadableError(for_good=True)
            if is_unknown and waited_s < wait_s:
                cursor = self.cursor
                self.rejoin(Start(cursor, flexible=True) if report.floats else self.start_at(cursor))
            elif orders.others and waited_s >= left_over_s:
                rank, what = min(orders.others.items())
                raise ConfigError(
                    f"all ranks of trial {report.name.trial!r} must have the same batch_size and pipeline, rank "
                    f"{report.rank} has batch_size {report.batch_size} and rank {rank} has {what}"
                )
            elif orders.ahead and waited_s >= left_over_s:
                ranks = ", ".join(map(str, orders.ahead))
                raise StateError(
                    f"rank {report.rank} of trial {report.name.trial!r} is in epoch {epoch - report.aside} of the "
                    f"feed, which rank {ranks} has finished, and the plan by which they divided it is lost: load a "
                    "state of the same minibatch in all ranks, or restart the trial under another name"
                )
            elif waited_s >= wait_s:
                missing = ", ".join(map(str, orders.missing))
                raise WaitTimeoutError(
                    f"rank {report.rank} of trial {report.name.trial!r} waited {seconds(wait_s)} for the other ranks: "
                    f"of {report.name.world_size} that must join feed {self.info.settings.name!r}, rank {missing} "
                    "did not"
                )
        # a floating rank may have been placed at another epoch than requested
        epoch = order.epoch_of(orders.start if self._report.floats else block)
        self._sharding.add_plan(epoch, orders.plan)
        self._caches = orders.caches
        return orders

    def _orders(self, epoch: int, shuffle: Shuffle | None, poll_s: float, timeout_s: float) -> RankOrders:
        """Return the coordinator's instructions to the ranks for an epoch with this shuffle, if known.

        The coordinator answers within ``poll_s`` seconds. If it is silent or restarting, wait up to ``timeout_s`` more.
        """
        asked = encoding.encode(RankCall(self._report, epoch, poll_s, shuffle))
        what = "asks how minibatches are shared out"
        return self._call_patiently("rank_orders", asked, poll_s + timeout_s, what)
