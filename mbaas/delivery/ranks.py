"""A rank's end of the protocol: of each block it reads its own samples, one block ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from mbaas.cache.rows import ROW, Arrays
from mbaas.delivery.calls import CALL_TIMEOUT_S, UnreadableError, call_patiently
from mbaas.delivery.course import Course
from mbaas.delivery.errand import Errand, Wish, find_route, nbytes
from mbaas.delivery.figures import Figures
from mbaas.delivery.stream import Block, BlockStream
from mbaas.errors import ConfigError, WaitTimeoutError
from mbaas.staging.protocol import POLL_S, DeliveredBlock, Delivery
from mbaas.staging.ranks import RankOrders, RankPlace, RankPlan

PACE_MEMORY = 0.8
"""How much of the pace that was measured before is kept with every block."""

LEFT_OVER_LEASES = 1.5
"""So many leases on, ranks of an earlier run of a trial, which may have had minibatches of another size, are gone."""


class RankStream(BlockStream):
    """The blocks of a feed for one rank of a data-parallel trial.

    Blocks hold at least the rank's own samples; see `mbaas.delivery.course.Course` for which these are.

    Args:
        coordinator, start, flexible, wait_timeout_s, figures: as for `BlockStream`.
        consumer: a name that ends in ``[rank]``; what comes before is the same for all ranks.
        rank, world_size: of the trial.
        batch_size: samples in a minibatch of all ranks; None: the feed's.

    Attributes:
        course: which samples are the rank's; set before the first block is asked for.
    """

    course: Course

    def __init__(
        self,
        coordinator: Any,
        consumer: str,
        *,
        rank: int,
        world_size: int,
        batch_size: int | None,
        start: int | None,
        flexible: bool,
        wait_timeout_s: float,
        figures: Figures,
    ) -> None:
        self._trial, self._rank, self._world_size = consumer.removesuffix(f"[{rank}]"), rank, world_size
        self._batch_size = batch_size
        self._caches: Mapping[str, Any] = {}
        self._plans: dict[int, RankPlan] = {}  # by epoch; of this one and its neighbours
        self._errands: dict[int, Errand] = {}  # by block; begun, and not read yet
        self._is_aligned = False
        self._pace_s = 0.0  # that the trial works on a block
        self._handed_out: float | None = None
        super().__init__(
            coordinator, consumer, start=start, flexible=flexible, wait_timeout_s=wait_timeout_s, figures=figures
        )

    def _enter(self, start: int | None, flexible: bool) -> None:
        super()._enter(start, flexible)
        self._errands.clear()
        self._place = RankPlace(
            consumer=self._consumer,
            trial=self._trial,
            rank=self._rank,
            world_size=self._world_size,
            batch_size=self.info.settings.batch_size if self._batch_size is None else self._batch_size,
            session=self.session,
            node=self._node,
            cursor=self.cursor,
            floats=start is None or flexible,
            plans=self._plans,
        )
        call_patiently(
            lambda: self._coordinator.enlist_rank.remote(self._place),
            CALL_TIMEOUT_S,
            f"consumer {self._consumer!r} joins",
        )

    # ---- together with the other ranks ----

    def next(self) -> Block:
        """The block at the cursor; it has all samples that are this rank's, and may have others.

        Raises:
            WaitTimeoutError: also if not all ranks have joined within ``wait_timeout_s``.
        """
        began = time.perf_counter()
        if self._handed_out is not None:
            self._pace_s += (1 - PACE_MEMORY) * (began - self._handed_out - self._pace_s)
        if not self._is_aligned:
            self._align()
            self._figures.waited_s += time.perf_counter() - began
        block = super().next()
        self.look_ahead()
        self._handed_out = time.perf_counter()
        return block

    def _align(self) -> None:
        """Begin where the others begin."""
        start = self._orders(self.cursor, self._wait_timeout_s).start
        if start > self.cursor:
            self.skip_to(start)
        elif start < self.cursor:
            self._enter(start, False)
        self._place = replace(self._place, floats=False)
        self._is_aligned = True

    def _orders(self, block: int, wait_s: float) -> RankOrders:
        """What this rank must know for the epoch of a block.

        Raises:
            WaitTimeoutError: ranks are missing for longer than ``wait_s``.
            ConfigError: others want minibatches of another size, and not only until their lease ends.
        """
        began = time.monotonic()
        left_over_s = min(wait_s, LEFT_OVER_LEASES * self.info.settings.lease_s)
        while (orders := self._ask_for_orders(block, min(wait_s, POLL_S))).plan is None:
            if self._rank in orders.missing and not self._is_aligned:
                self._enter(self.cursor, self._place.floats)
            elif self._rank in orders.missing:  # what follows from that for the session, the next call of `ask` says
                raise UnreadableError(for_good=True)
            elif orders.others and time.monotonic() - began >= left_over_s:
                rank, size = min(orders.others.items())
                raise ConfigError(
                    f"all ranks of trial {self._trial!r} must have the same batch_size, rank {self._rank} has "
                    f"{self._place.batch_size} and rank {rank} has {size}"
                )
            elif time.monotonic() - began >= wait_s:
                feed, missing = self.info.settings.name, ", ".join(map(str, orders.missing))
                raise WaitTimeoutError(
                    f"rank {self._rank} of trial {self._trial!r} waited {wait_s:g} s for the other ranks: of "
                    f"{self._world_size} that must join feed {feed!r}, rank {missing} did not"
                )
        epoch = self.info.sweep.epoch_of(orders.start if self._place.floats else block)
        self._plans = {**{e: plan for e, plan in self._plans.items() if e >= epoch - 1}, epoch: orders.plan}
        self.course.plans = self._plans
        self._caches = orders.caches
        return orders

    def _ask_for_orders(self, block: int, poll_s: float) -> RankOrders:
        epoch = self.info.sweep.epoch_of(block)
        orders: RankOrders = call_patiently(
            lambda: self._coordinator.rank_orders.remote(self._place, epoch, poll_s),
            POLL_S + CALL_TIMEOUT_S,
            f"consumer {self._consumer!r} asks how minibatches are shared out",
        )
        return orders

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

    def _errand(self, block: DeliveredBlock, left_s: float = 0.0) -> Errand:
        """What was begun for a block, or is begun now; the trial works ``left_s`` seconds until it needs it."""
        errand = self._errands.get(block.number)
        if errand is None or errand.block is not block:
            errand = self._errands[block.number] = self._set_out(block, left_s)
        return errand

    def _set_out(self, block: DeliveredBlock, left_s: float) -> Errand:
        sweep = self.info.sweep
        epoch, ids = sweep.epoch_of(block.number), sweep.sample_ids(block.number)
        if epoch not in self._plans:
            self._orders(block.number, self._wait_timeout_s)
        bad_ids = [bad.sample_id for part in block.parts for bad in part.meta.bad]
        bad_rows = np.flatnonzero(np.isin(ids, bad_ids))
        rows = self.course.leg(block.number, bad_ids).rows
        homes = self._plans[epoch].homes
        route = find_route(block, rows, ids[rows], homes=homes, node=self._node, helpers=self._caches)

        def ask(node: str, wish: Wish) -> Any:
            payloads = [part.payload[0] for part in wish.parts]
            return self._caches[node].pick.remote(self._consumer, payloads, wish.rows, bad_rows, left_s)

        return Errand(block, rows, route, ask)

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
        if self.info.sweep.epoch_of(block.number) not in self._plans:
            try:
                self._orders(block.number, 0.0)
            except (WaitTimeoutError, UnreadableError):  # others are done with the feed, or on their way
                return
        self._errand(block, self._pace_s)

    def _take_what_came(self) -> None:
        """Take in an answer that is here already; one that brings no blocks is left to `_wait`."""
        if self._queue or self._in_flight is None or not ray.wait([self._in_flight], timeout=0)[0]:
            return
        try:
            delivery: Delivery = ray.get(self._in_flight)
        except ray.exceptions.RayError:
            return
        if delivery.error is None and delivery.blocks and delivery.blocks[0].number == self._received:
            self._in_flight = None
            self._take(delivery)
            self.ask_ahead()

    def ask_ahead(self) -> None:
        """Ask while a block is left, so that the one after it can be fetched in time."""
        if len(self._queue) <= 1 and self._in_flight is None and not self._expelled:
            self._ask()

    def _take(self, delivery: Delivery) -> None:
        """Take in blocks; a rank alone may not be moved to another epoch, as single consumers are."""
        if delivery.blocks[0].number != self._received:
            self._enter(self._received, False)
        else:
            super()._take(delivery)
