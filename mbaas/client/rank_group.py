"""The ranks of a data-parallel trial, as one of them sees the others: where they begin, and whose each sample is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from mbaas.client.rpc import UnreadableError, call_patiently
from mbaas.client.session import LaneSession, Polling
from mbaas.client.sharding import RankSharding
from mbaas.errors import ConfigError, StateError, WaitTimeoutError
from mbaas.messages import POLL_S, ConsumerName, Delivery, RankOrders, RankPlan, RankReport, Start
from mbaas.order import Shuffle
from mbaas.units import seconds

LEFT_OVER_LEASES = 1.5
"""Leases after which ranks of an earlier run of a trial are gone; they may have had another batch size."""


class RankSession(LaneSession):
    """A rank's session in one lane.

    In epochs aside all ranks of a trial stay, so that none of them is an epoch ahead of the others.

    Args:
        coordinator: the lane's actor.
        name: the name of the rank.
        start, polling, born: as for `LaneSession`.
    """

    def runs_short(self, *, are_remote: bool) -> bool:  # noqa: ARG002 - wherever blocks come from
        """Return whether at most one block is left: the rank must know the next one to fetch its rows in time."""
        return len(self.received) <= 1 if self.lane.lanes > 1 else super().runs_short(are_remote=True)

    def _receive(self, delivery: Delivery) -> None:
        """Take in blocks; a rank alone may not be moved to another epoch, as single consumers are."""
        if delivery.blocks[0].number != self.following:
            self._join(self.start_at(self.following), self._polling.wait_timeout_s)
        else:
            super()._receive(delivery)


class EnlistedSession(RankSession):
    """A rank's session in the first lane, of which the feed's main coordinator tells the other ranks.

    Args:
        coordinator: the main coordinator of the feed.
        name: the name of the rank.
        sharding: how minibatches are shared out between the ranks.
        start, polling, born: as for `LaneSession`.

    Attributes:
        report: what the coordinator was told last.
    """

    report: RankReport

    def __init__(
        self, coordinator: Any, name: ConsumerName, sharding: RankSharding, *, start: Start, polling: Polling, born: int
    ) -> None:
        self._sharding = sharding
        super().__init__(coordinator, name, start=start, polling=polling, born=born)

    def _join(self, start: Start, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        super()._join(start, timeout_s)
        # the ranks of a trial that was restored stand where its state says
        self._enlist(end - time.monotonic(), start)

    def _enlist(self, timeout_s: float, start: Start) -> None:
        """Tell the other ranks of this session, and of every new one: a restarted coordinator knows none of them."""
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
            lambda: self._coordinator.enlist_rank.remote(self.report),
            timeout_s,
            f"consumer {self.consumer!r} joins",
        )

    def stay(self) -> None:
        """Note that the ranks have begun: this session cannot begin at another epoch any more."""
        self.report = replace(self.report, floats=False)

    def orders(self, epoch: int, shuffle: Shuffle | None, poll_s: float, timeout_s: float) -> RankOrders:
        """Ask what the main coordinator says to the ranks for an epoch; ``shuffle`` is how that is shuffled, if known.

        It answers after ``poll_s`` at the latest; one that is silent or restarting is waited for ``timeout_s``.
        """
        orders: RankOrders = call_patiently(
            self._coordinator,
            lambda: self._coordinator.rank_orders.remote(self.report, epoch, poll_s, shuffle),
            poll_s + timeout_s,
            f"consumer {self.consumer!r} asks how minibatches are shared out",
        )
        return orders


class RankGroup:
    """Lets one rank agree with the others, through the feed's main coordinator.

    Args:
        first: the rank's session in the first lane.
        sharding: which samples are the rank's; each epoch's plan is added to it.
        wait_timeout_s: the longest wait for missing ranks.

    Attributes:
        caches: node id -> handle of its cache node, which hands out rows.
        has_begun: whether all ranks have agreed where to begin.
        step_s: seconds that the trial works on a block, as measured.
    """

    def __init__(self, first: EnlistedSession, sharding: RankSharding, *, wait_timeout_s: float) -> None:
        self._first, self._sharding, self._wait_timeout_s = first, sharding, wait_timeout_s
        self.caches: Mapping[str, Any] = {}
        self.has_begun = False
        self.step_s = 0.0

    def begin(self, block: int) -> int:
        """Wait for all ranks; return the first lane's own block at which they begin.

        Args:
            block: the feed's block at which this rank would begin.

        Raises:
            WaitTimeoutError: ranks are missing for too long.
            ConfigError: others want minibatches of another size.
            StateError: as for `plan`.
        """
        start = self._agree(block, None, self._wait_timeout_s).start
        self._first.stay()
        self.has_begun = True
        return start

    def plan(self, block: int, shuffle: Shuffle, wait_s: float | None = None) -> RankPlan:
        """Return how the minibatches of the epoch of a feed's block are shared out.

        Args:
            block: the feed's block.
            shuffle: of its epoch.
            wait_s: how long to wait for missing ranks; by default as long as `begin` does.

        Raises:
            WaitTimeoutError: ranks are missing for too long.
            StateError: other ranks went through the epoch in another order, or by a plan that was lost.
            UnreadableError: this rank's session in the first lane, of which the block is one, has ended.
        """
        epoch = self._sharding.order.epoch_of(block)
        plan = self._sharding.plans.get(epoch)
        if plan is None or plan.shuffle != shuffle:
            self._agree(block, shuffle, self._wait_timeout_s if wait_s is None else wait_s)
        return self._sharding.plans[epoch]

    def _agree(self, block: int, shuffle: Shuffle | None, wait_s: float) -> RankOrders:
        """Get the plan for the epoch of a block, which there is when all ranks are."""
        began, first, order = time.monotonic(), self._first, self._sharding.order
        left_over_s = min(wait_s, LEFT_OVER_LEASES * first.info.settings.timeouts.lease_s)
        waited_s, poll_s = 0.0, min(wait_s, POLL_S)
        epoch = order.epoch_of(block)
        while (orders := first.orders(epoch, shuffle, poll_s, max(0.0, wait_s - waited_s))).plan is None:
            report, waited_s = first.report, time.monotonic() - began
            is_unknown = report.rank in orders.missing  # this rank itself: its session has ended
            if is_unknown and self.has_begun and first.lane.has(block):
                # The block was read in that session. The next call for blocks says whether this consumer may go on.
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
                    f"feed, which rank {ranks} has behind it, and how they shared it out is not known any more: load a "
                    "state of the same minibatch in all ranks, or begin the trial anew under another name"
                )
            elif waited_s >= wait_s:
                missing = ", ".join(map(str, orders.missing))
                raise WaitTimeoutError(
                    f"rank {report.rank} of trial {report.name.trial!r} waited {seconds(wait_s)} for the other ranks: "
                    f"of {report.name.world_size} that must join feed {first.info.settings.name!r}, rank {missing} "
                    "did not"
                )
        # one that floats may have been put at another epoch than it asked about
        epoch = order.epoch_of(first.lane.feed_block(orders.start) if first.report.floats else block)
        self._sharding.add_plan(epoch, orders.plan)
        self.caches = orders.caches
        return orders
