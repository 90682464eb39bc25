"""The ranks of a data-parallel trial, as one of them sees the others: where they begin, and whose each sample is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mbaas.client.rpc import CALL_TIMEOUT_S, UnreadableError, call_patiently
from mbaas.client.sharding import RankSharding
from mbaas.client.stream import BlockStream
from mbaas.errors import ConfigError, WaitTimeoutError
from mbaas.messages import POLL_S, RankOrders, RankPlace, RankPlan

LEFT_OVER_LEASES = 1.5
"""So many leases on, ranks of an earlier run of a trial, which may have had minibatches of another size, are gone."""


class RankGroup:
    """One rank's dealings with the others, which it has through the feed's main coordinator.

    Args:
        coordinator: the main one.
        consumer: the rank's name, which ends in ``[rank]``; what comes before is the same for all ranks.
        rank, world_size: of the trial.
        batch_size: samples in a minibatch of all ranks; None: the feed's.
        wait_timeout_s: for missing ranks.

    Attributes:
        course: which samples are the rank's; set before the first block is asked for.
        plans: epoch -> by what its minibatches are shared out; of the one in hand and its neighbours.
        caches: node id -> handle of its cache node, which hands out rows.
        has_begun: whether all ranks have agreed where.
        pace_s: that the trial works on a block.
    """

    course: RankSharding

    def __init__(
        self,
        coordinator: Any,
        consumer: str,
        *,
        rank: int,
        world_size: int,
        batch_size: int | None,
        wait_timeout_s: float,
    ) -> None:
        self._coordinator, self._consumer = coordinator, consumer
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size
        self._wait_timeout_s = wait_timeout_s
        self.plans: dict[int, RankPlan] = {}
        self.caches: Mapping[str, Any] = {}
        self.has_begun = False
        self.pace_s = 0.0

    def enlist(self, first: BlockStream, *, floats: bool) -> None:
        """The rank has opened a session in the first lane: tell the others.

        Args:
            first: its stream there.
            floats: whether the session may begin at another epoch, to begin with the others.
        """
        self._first = first
        settings = first.info.settings
        self._place = RankPlace(
            consumer=self._consumer,
            trial=self._consumer.removesuffix(f"[{self._rank}]"),
            rank=self._rank,
            world_size=self._world_size,
            batch_size=settings.batch_size if self._batch_size is None else self._batch_size,
            session=first.session,
            node=first.node,
            cursor=first.cursor,
            floats=floats,
            plans=self.plans,
        )
        call_patiently(
            lambda: self._coordinator.enlist_rank.remote(self._place),
            CALL_TIMEOUT_S,
            f"consumer {self._consumer!r} joins",
        )

    def begin(self, block: int) -> int:
        """The first lane's own block at which all ranks begin, once they are there.

        Args:
            block: the feed's, at which this rank would.

        Raises:
            WaitTimeoutError: ranks are missing for too long.
            ConfigError: others want minibatches of another size.
        """
        start = self._agree(block, self._wait_timeout_s).start
        self._place = replace(self._place, floats=False)
        self.has_begun = True
        return start

    def plan(self, block: int, wait_s: float | None = None) -> RankPlan:
        """By what the minibatches of the epoch of a feed's block are shared out; ``wait_s`` for missing ranks.

        Raises:
            WaitTimeoutError: ranks are missing for too long.
            UnreadableError: this rank's session in the first lane, of which the block is one, has ended.
        """
        epoch = self._first.info.order.epoch_of(block)
        if epoch not in self.plans:
            self._agree(block, self._wait_timeout_s if wait_s is None else wait_s)
        return self.plans[epoch]

    def _agree(self, block: int, wait_s: float) -> RankOrders:
        """What the ranks must know for the epoch of a block."""
        began = time.monotonic()
        info, lane = self._first.info, self._first.lane
        left_over_s = min(wait_s, LEFT_OVER_LEASES * info.settings.lease_s)
        while (orders := self._ask(block, min(wait_s, POLL_S))).plan is None:
            waited_s = time.monotonic() - began
            if self._rank in orders.missing and self.has_begun and lane.has(block):
                raise UnreadableError(for_good=True)  # what follows for the session, the next call of `ask` says
            if self._rank in orders.missing and waited_s < wait_s:
                self._first.rejoin(self._first.cursor, self._place.floats)
            elif orders.others and waited_s >= left_over_s:
                rank, size = min(orders.others.items())
                raise ConfigError(
                    f"all ranks of trial {self._place.trial!r} must have the same batch_size, rank {self._rank} has "
                    f"{self._place.batch_size} and rank {rank} has {size}"
                )
            elif waited_s >= wait_s:
                missing = ", ".join(map(str, orders.missing))
                raise WaitTimeoutError(
                    f"rank {self._rank} of trial {self._place.trial!r} waited {wait_s:g} s for the other ranks: of "
                    f"{self._world_size} that must join feed {info.settings.name!r}, rank {missing} did not"
                )
        epoch = info.order.epoch_of(lane.feed_block(orders.start) if self._place.floats else block)
        self.plans = {**{e: plan for e, plan in self.plans.items() if e >= epoch - 1}, epoch: orders.plan}
        self.course.plans = self.plans
        self.caches = orders.caches
        return orders

    def _ask(self, block: int, poll_s: float) -> RankOrders:
        epoch = self._first.info.order.epoch_of(block)
        orders: RankOrders = call_patiently(
            lambda: self._coordinator.rank_orders.remote(self._place, epoch, poll_s),
            POLL_S + CALL_TIMEOUT_S,
            f"consumer {self._consumer!r} asks how minibatches are shared out",
        )
        return orders
