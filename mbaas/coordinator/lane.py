"""The coordinator of a further lane of a feed.

It serves the blocks of its lane as the feed's main coordinator, which has the first lane, serves its own. Workers,
homes and reservations are decided there; this one is told how things stand, and tells what it did.
"""

from __future__ import annotations

import asyncio
from collections import deque

import ray

from mbaas import runtime
from mbaas.coordinator.api import ConsumerApi
from mbaas.coordinator.background import Jobs
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.lane_messages import LaneConfig, LaneReport, LaneUpdate
from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core import events as ev
from mbaas.core.layout import credit
from mbaas.errors import FeedFailedError
from mbaas.messages import START_TIMEOUT_S, TICK_S, BlockMeta
from mbaas.order import SampleOrder
from mbaas.placement import PlacementHistory
from mbaas.settings import FeedSettings

KEPT_ENTRIES = 10_000
"""Entries that wait for a coordinator which is being restarted; what is older is not counted."""


class _LaneCounters(Counters):
    """Books whose entries are also kept to be filed.

    Attributes:
        made, news: entries and notes that were not filed yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: deque[tuple[str, BlockMeta]] = deque(maxlen=KEPT_ENTRIES)
        self.news: deque[str] = deque(maxlen=KEPT_ENTRIES)

    def note(self, text: str) -> None:
        self.news.append(text)

    def finished(self, worker: str, meta: BlockMeta, order: SampleOrder) -> None:
        super().finished(worker, meta, order)
        self.made.append((worker, meta))


@ray.remote(num_cpus=0)
class LaneCoordinator(ConsumerApi):
    """Runs one further lane of a feed.

    Args:
        settings: of the feed.
        number: of the lane, from 1.
    """

    def __init__(self, settings: FeedSettings, number: int) -> None:
        self._settings, self._number = settings, number
        self._counters = _LaneCounters()
        self._jobs = Jobs(self._fail)
        self._update: LaneUpdate | None = None
        self._workers: dict[str, WorkerHandle] = {}
        self._given_up: dict[str, str] = {}
        self._failed: str | None = None
        self._opened = asyncio.Event()
        runtime.end_with(settings.name)

    # ---- life ----

    def _open(self, lane_config: LaneConfig) -> None:
        self._placements = PlacementHistory(lane_config.layout.order)
        self._service = ConsumerService(
            lane_config.info,
            lane_config.layout,
            lane_config.layout.lane(self._number, self._settings),
            placements=self._placements,
            makers=self,
            counters=self._counters,
            spawn=self._jobs.spawn,
            fail=self._fail,
        )
        self._jobs.spawn(self._tick_forever())

    async def _until_open(self) -> None:
        try:
            await asyncio.wait_for(self._opened.wait(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            who = f"lane {self._number} of feed {self._settings.name!r}"
            raise FeedFailedError(f"{who} was not told to begin within {START_TIMEOUT_S:g} s") from None

    async def _tick_forever(self) -> None:
        while self._failed is None:
            await asyncio.sleep(TICK_S)
            self._service.send(ev.Tick())

    def _fail(self, reason: str) -> None:
        self._failed = self._failed or reason
        if hasattr(self, "_service"):
            self._service.fail(reason)

    # ---- what the main coordinator calls ----

    async def sync(self, update: LaneUpdate | None, lane_config: LaneConfig | None, *, in_full: bool) -> LaneReport:
        """Hear how things stand, where that is news, and tell what was done.

        Args:
            standing: None if it is as it was told last.
            charter: for a lane that may not have been told yet.
            in_full: whether to tell what consumers hold.
        """
        if lane_config is not None and not hasattr(self, "_service"):
            self._open(lane_config)
        before = self._update
        if update is not None and (before is None or update.version > before.version):
            self._update = update
        if hasattr(self, "_service") and self._update is not None:
            self._follow(self._update, before)
            self._opened.set()
        return self._lane_report(in_full)

    def _follow(self, update: LaneUpdate, before: LaneUpdate | None) -> None:
        if update.failed is not None:
            self._fail(update.failed)
            return
        newest = self._placements.newest
        if update.placement is not None and (newest is None or newest.version < update.placement.version):
            self._placements.add(update.placement)
        if before is not None:
            for node in update.dead.keys() - before.dead.keys():
                self._service.send(ev.NodeDown(node, update.dead[node]))
            for consumer, times in update.detached.items():
                if times != before.detached.get(consumer):
                    self._service.send(ev.DetachedElsewhere(consumer))
        self._follow_workers(update)
        if before is None or update.reservations != before.reservations:
            blocks = self._service.lane.blocks_per_epoch
            self._service.send(
                ev.HoldReservations(frozenset((name, epoch * blocks) for name, epoch in update.reservations))
            )

    def _follow_workers(self, update: LaneUpdate) -> None:
        tasks = self._service.core.tasks
        self._workers = {worker.name: worker for worker in update.workers}
        listed = self._workers.keys() | update.leaving
        self._given_up = {name: reason for name, reason in self._given_up.items() if name in listed}
        for name, worker in list(tasks.workers.items()):
            if name in update.leaving:
                if not worker.leaving:
                    self._service.send(ev.WorkerLeaves(name))
            elif name not in self._workers:
                self._service.send(ev.WorkerDown(name, update.gone.get(name, "it was ended")))
        for hired in update.workers:
            if hired.name not in tasks.workers and hired.name not in self._given_up:
                self._service.send(ev.WorkerUp(hired.name, credit(self._settings.staging.lanes), hired.node))

    def _lane_report(self, in_full: bool) -> LaneReport:
        if self._update is None or not hasattr(self, "_service"):
            return LaneReport(failed=self._failed)
        core, counters = self._service.core, self._counters
        lane_report = LaneReport(
            version=self._update.version,
            made=tuple(counters.made),
            notes=tuple(counters.news),
            given_up=dict(self._given_up),
            tasks={worker.name: len(worker.tasks) for worker in core.tasks.workers.values()},
            staged_blocks=len(core.window.blocks),
            staged_bytes=core.window.used_bytes,
            held={m.name: m.cursor - m.released for m in core.consumers.by_name.values()} if in_full else {},
            detached=dict(self._service.detached),
            failed=self._failed,
        )
        counters.made.clear()
        counters.news.clear()
        return lane_report

    # ---- workers, for the desk ----

    def worker(self, name: str) -> WorkerHandle | None:
        """A worker that is up, or None."""
        return self._workers.get(name)

    async def lost(self, name: str, reason: str) -> None:
        """A worker is gone: do without it, whatever the main coordinator makes of that."""
        if name in self._service.core.tasks.workers:
            self._given_up[name] = reason
            self._service.send(ev.WorkerDown(name, reason))

    def retire(self, name: str, reason: str) -> None:
        """A worker is stuck: the main coordinator will end it."""
        self._given_up[name] = reason

    def dismiss(self, name: str) -> None:
        """A worker that leaves is free, as far as this lane is concerned: the next filing says so."""
