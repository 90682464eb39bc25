"""One rank's view of its data-parallel trial: agrees on the starting block and on the division of samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from mbaas.base.units import seconds
from mbaas.calls import encoding
from mbaas.calls.client import call_patiently
from mbaas.client.session import Session
from mbaas.client.sharding import RankSharding
from mbaas.errors import ConfigError, StateError, WaitTimeoutError
from mbaas.memory.part_memory import UnreadableError
from mbaas.samples.order import Shuffle
from mbaas.wire.consumers import POLL_S, ConsumerName, Delivery, Start
from mbaas.wire.ranks import RankCall, RankOrders, RankPlan, RankReport

LEFT_OVER_LEASES = 1.5
"""Leases after which ranks of an earlier run of the trial are gone; their batch size may have differed."""


class RankSession(Session):
    """A rank's session, reported to the other ranks through the coordinator; ``report`` is the last report.

    All ranks of a trial stay in side epochs, so that no rank gets an epoch ahead of the others.
    """

    report: RankReport

    def __init__(
        self,
        coordinator: Any,
        name: ConsumerName,
        sharding: RankSharding,
        *,
        start: Start,
        wait_timeout_s: float,
        born: int,
    ) -> None:
        self._sharding = sharding
        super().__init__(coordinator, name, start=start, wait_timeout_s=wait_timeout_s, born=born)

    def runs_short(self, *, are_remote: bool) -> bool:  # noqa: ARG002 - wherever blocks come from
        """Return whether at most one block is left: a rank must have the next block to fetch its rows in time."""
        return super().runs_short(are_remote=True)

    def _receive(self, delivery: Delivery) -> None:
        # a single rank must not be moved to another epoch, unlike a single consumer
        if delivery.blocks[0].number != self.following:
            self._join(self.start_at(self.following), self._wait_timeout_s)
        else:
            super()._receive(delivery)

    def _join(self, start: Start, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        super()._join(start, timeout_s)
        # a restored trial's ranks start at the position of its state
        self._enlist(end - time.monotonic(), start)

    def _enlist(self, timeout_s: float, start: Start) -> None:
        # Every new session is reported, because a restarted coordinator has lost all ranks.
        self.report = RankReport(
            name=self._name,
            batch_size=self._sharding.batch_size,
            session=self.number,
            node=self.node,
            cursor=self.cursor,
            floats=not start.is_exact,
            aside=self.aside,
            due=start.block if start.flexible else None,
        )
        call_patiently(
            self._coordinator,
            lambda: self._coordinator.enlist_rank.remote(encoding.encode(self.report)),
            timeout_s,
            f"consumer {self.consumer!r} joins",
        )

    def stay(self) -> None:
        """Fix the start: the ranks have begun, so this session can no longer start at another epoch."""
        self.report = replace(self.report, floats=False)

    def orders(self, epoch: int, shuffle: Shuffle | None, poll_s: float, timeout_s: float) -> RankOrders:
        """Return the coordinator's instructions to the ranks for an epoch with this shuffle, if known.

        The coordinator answers within ``poll_s`` seconds. If it is silent or restarting, wait up to ``timeout_s`` more.
        """
        asked = encoding.encode(RankCall(self.report, epoch, poll_s, shuffle))
        orders: RankOrders = call_patiently(
            self._coordinator,
            lambda: self._coordinator.rank_orders.remote(asked),
            poll_s + timeout_s,
            f"consumer {self.consumer!r} asks how minibatches are shared out",
        )
        return orders


class RankGroup:
    """Coordinates one rank with the others, through the feed's coordinator.

    It adds each epoch's plan to ``sharding``. ``wait_timeout_s`` is the longest wait for missing ranks, in seconds.

    Attributes:
        caches: node id -> its cache node, which sends rows.
        has_begun: True once all ranks have agreed on the first block.
        step_s: measured seconds of the trial's work per block.
    """

    def __init__(self, first: RankSession, sharding: RankSharding, *, wait_timeout_s: float) -> None:
        self._first, self._sharding, self._wait_timeout_s = first, sharding, wait_timeout_s
        self.caches: Mapping[str, Any] = {}
        self.has_begun = False
        self.step_s = 0.0

    def begin(self, block: int) -> int:
        """Wait for all ranks, and return the block at which they begin; ``block`` is where this rank would begin.

        Raises:
            WaitTimeoutError: ranks are missing for too long.
            ConfigError: other ranks have another batch size.
            StateError: as for `plan`.
        """
        start = self._agree(block, None, self._wait_timeout_s).start
        self._first.stay()
        self.has_begun = True
        return start

    def plan(self, block: int, shuffle: Shuffle, wait_s: float | None = None) -> RankPlan:
        """Return the plan that divides the minibatches of the epoch of ``block``.

        Args:
            wait_s: longest wait for missing ranks, in seconds; default: ``wait_timeout_s``.

        Raises:
            WaitTimeoutError: ranks are missing for too long.
            StateError: other ranks read the epoch in another order, or by a plan that was lost.
            UnreadableError: this rank's session has ended.
        """
        epoch = self._sharding.order.epoch_of(block)
        plan = self._sharding.plans.get(epoch)
        if plan is None or plan.shuffle != shuffle:
            self._agree(block, shuffle, self._wait_timeout_s if wait_s is None else wait_s)
        return self._sharding.plans[epoch]

    def _agree(self, block: int, shuffle: Shuffle | None, wait_s: float) -> RankOrders:
        """Request the plan for a block's epoch, which exists once all ranks have joined."""
        began, first, order = time.monotonic(), self._first, self._sharding.order
        left_over_s = min(wait_s, LEFT_OVER_LEASES * first.info.settings.timeouts.lease_s)
        waited_s, poll_s = 0.0, min(wait_s, POLL_S)
        epoch = order.epoch_of(block)
        while (orders := first.orders(epoch, shuffle, poll_s, max(0.0, wait_s - waited_s))).plan is None:
            report, waited_s = first.report, time.monotonic() - began
            is_unknown = report.rank in orders.missing  # this rank itself: its session has ended
            if is_unknown and self.has_begun:
                # The block was read in that session. The next call for blocks decides whether this consumer may
                # continue.
                raise UnreadableError(for_good=True)
            if is_unknown and waited_s < wait_s:
                cursor = first.cursor
                first.rejoin(Start(cursor, flexible=True) if report.floats else first.start_at(cursor))
            elif orders.others and waited_s >= left_over_s:
                rank, size = min(orders.others.items())
                raise ConfigError(
                    f"all ranks of trial {report.name.trial!r} must have the same batch_size, rank {report.rank} has "
                    f"{report.batch_size} and rank {rank} has {size}"
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
                    f"of {report.name.world_size} that must join feed {first.info.settings.name!r}, rank {missing} "
                    "did not"
                )
        # a floating rank may have been placed at another epoch than requested
        epoch = order.epoch_of(orders.start if first.report.floats else block)
        self._sharding.add_plan(epoch, orders.plan)
        self.caches = orders.caches
        return orders
