"""The coordinator of a further lane of a feed.

It serves the blocks of its lane as the feed's main coordinator, which has the first lane, serves its own. Workers,
placement and reservations are decided there; this one is told how things stand, and reports what it did.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from mbaas import runtime
from mbaas.coordinator.asking import report_bugs_to
from mbaas.coordinator.background import BackgroundTasks, InternalErrors, reports_errors_of_calls
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.lane_messages import LaneConfig, LaneReport, LaneUpdate, Version
from mbaas.coordinator.service import ConsumerApi, ConsumerService, WorkerEvent
from mbaas.coordinator.worker_pool import WorkerHandle
from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.lanes import LANE_BEGIN_S
from mbaas.core.layout import credit
from mbaas.errors import FeedRestartingError, ResourceError
from mbaas.messages import START_TIMEOUT_S, TICK_S, BlockMeta, ConsumerReport
from mbaas.order import SampleOrder
from mbaas.placement import PlacementHistory
from mbaas.settings import FeedSettings

RETRY_S = 0.1
"""Pause before a lane's name is asked for again."""

KEPT_ENTRIES = 10_000
"""Entries kept for a main coordinator that is being restarted; beyond that the oldest are lost to its counters."""


class _LaneCounters(Counters):
    """Counters whose entries are also kept for the next report.

    Attributes:
        made, news: entries and notes that were not reported yet.
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
@reports_errors_of_calls(but={"sync"})  # those of `sync` are reported by the main coordinator, which makes the call
class LaneCoordinator(ConsumerApi):
    """Runs one further lane of a feed.

    Args:
        settings: the feed's options.
        number: which lane it is, from 1.
        main: actor id of the feed's coordinator, with which it ends.
    """

    def __init__(self, settings: FeedSettings, number: int, main: str) -> None:
        self._settings, self._number = settings, number
        self._counters = _LaneCounters()
        self._errors = InternalErrors(self._counters)
        report_bugs_to(self._errors)
        self._tasks = BackgroundTasks(self._errors)
        self._update: LaneUpdate | None = None
        self._service: ConsumerService | None = None
        self._placements: PlacementHistory | None = None
        self._workers: dict[str, WorkerHandle] = {}
        self._given_up: dict[str, tuple[int, WorkerEvent]] = {}  # worker -> in which of its turns, and why
        self._opened = asyncio.Event()
        runtime.end_with(main)

    # ---- life ----

    def _open(self, config: LaneConfig) -> ConsumerService:
        self._placements = PlacementHistory(config.layout.order)
        self._service = ConsumerService(
            config.info,
            config.layout,
            config.layout.lane(self._number, self._settings),
            placements=self._placements,
            worker_of=lambda name: self._workers.get(name),
            report=self._report,
            waits_for=lambda: self._update.waits_for if self._update is not None else (),
            counters=self._counters,
            errors=self._errors,
            spawn=self._tasks.spawn,
        )
        self._tasks.spawn(self._tick_forever(self._service))
        return self._service

    async def _until_open(self) -> ConsumerService:
        try:
            await asyncio.wait_for(self._opened.wait(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            who = f"lane {self._number} of feed {self._settings.name!r}"
            raise FeedRestartingError(f"{who} was not told to begin within {START_TIMEOUT_S:g} s") from None
        assert self._service is not None
        return self._service

    async def _tick_forever(self, service: ConsumerService) -> None:
        while service.core.failed is None:
            await asyncio.sleep(TICK_S)
            with self._errors.reported():
                service.send(ev.Tick())

    # ---- what the main coordinator calls ----

    async def sync(self, update: LaneUpdate | None, config: LaneConfig | None, *, in_full: bool) -> LaneReport:
        """Hear how things stand, where that is news, and tell what was done.

        Args:
            update: None if things stand as they did when it was told last.
            config: for a lane that may not have been told yet.
            in_full: whether to tell what consumers hold.
        """
        service = self._service
        if config is not None and service is None:
            service = self._open(config)
        before = self._update
        if before is not None and update is not None and before.version[0] != update.version[0]:
            self._given_up.clear()  # another main coordinator: it may give the names of workers anew
        if update is not None and (before is None or update.version > before.version):
            self._update = update
        if service is None or self._update is None:
            return LaneReport()
        self._follow(service, self._update, before)
        self._opened.set()
        return self._lane_report(service, self._update.version, in_full)

    def _follow(self, service: ConsumerService, update: LaneUpdate, before: LaneUpdate | None) -> None:
        if update.failed is not None:
            service.fail(update.failed)
            return
        assert self._placements is not None
        newest = self._placements.newest
        if update.placement is not None and (newest is None or newest.version < update.placement.version):
            self._placements.add(update.placement)
        # Compared with the last update, because an update lists what is gone as long as it is remembered. A lane that
        # has none was just started: it knows nobody who could be gone.
        if before is not None:
            for node in update.dead.keys() - before.dead.keys():
                service.send(ev.NodeDown(node, update.dead[node]))
            for consumer, times in update.detached.items():
                if times != before.detached.get(consumer):
                    service.send(ev.DetachedElsewhere(consumer))
        self._follow_workers(service, update)
        if before is None or update.reservations != before.reservations:
            blocks = service.lane.blocks_per_epoch
            service.send(ev.HoldReservations(frozenset((name, epoch * blocks) for name, epoch in update.reservations)))

    def _follow_workers(self, service: ConsumerService, update: LaneUpdate) -> None:
        tasks = service.core.tasks
        self._workers = {worker.name: worker for worker in update.workers}
        listed = self._workers.keys() | update.leaving
        self._given_up = {
            name: (turn, event)
            for name, (turn, event) in self._given_up.items()
            if name in listed and update.turns.get(name, turn) == turn
        }
        for name, worker in list(tasks.workers.items()):
            if name in update.leaving:
                if not worker.leaving:
                    service.send(ev.WorkerLeaves(name))
            elif name not in self._workers:
                service.send(update.gone.get(name) or ev.WorkerDown(name, "it was ended"))
        for handle in update.workers:
            if handle.name not in tasks.workers and handle.name not in self._given_up:
                service.send(ev.WorkerUp(handle.name, credit(self._settings.staging.lanes), handle.node))

    def _lane_report(self, service: ConsumerService, version: Version, in_full: bool) -> LaneReport:
        assert self._placements is not None
        core, counters = service.core, self._counters
        lane_report = LaneReport(
            version=version,
            made=tuple(counters.made),
            notes=tuple(counters.news),
            internal_errors=counters.internal_errors,
            given_up={name: event for name, (_, event) in self._given_up.items()},
            tasks={worker.name: len(worker.tasks) for worker in core.tasks.workers.values()},
            staged_blocks=len(core.window.blocks),
            staged_bytes=core.window.used_bytes,
            held={m.name: m.cursor - m.released for m in core.consumers.by_name.values()} if in_full else {},
            detached=dict(service.detached),
            placements=self._placements.all,
        )
        counters.made.clear()
        counters.news.clear()
        counters.internal_errors = 0
        return lane_report

    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        """Enter nothing: consumers report to the first lane."""

    async def _until_kept(self, report: ConsumerReport) -> None:
        """Wait for nothing: there are no ledgers here."""

    # ---- what is to be said of workers ----

    def _report(self, event: WorkerEvent) -> None:
        """Do without a worker that is gone, or behind, until the main coordinator has heard of it."""
        assert self._service is not None
        match event:
            case cluster.WorkerDied():
                self._give_up(event, ev.WorkerDown(event.worker, event.reason, event.blame))
            case cluster.WorkerBehind():
                self._give_up(event, ev.WorkerDown(event.worker, "it does not know the newest placement", blame=False))
            case cluster.WorkerDone():
                pass  # the next report shows that it has nothing in hand

    def _give_up(self, event: WorkerEvent, down: ev.WorkerDown) -> None:
        assert self._service is not None
        assert self._update is not None
        self._given_up[event.worker] = self._update.turns.get(event.worker, 0), event
        if event.worker in self._service.core.tasks.workers:
            self._service.send(down)


async def start_lanes(settings: FeedSettings) -> tuple[Any, ...]:
    """Start the coordinators of the lanes from 1 on, or find those that an earlier main coordinator left.

    Raises:
        ResourceError: a name stays taken by an actor that is gone.
    """
    # Beside the main coordinator: a machine that dies takes all lanes or none, and messages are exchanged all the time.
    # Restarted by Ray without end, as the main one: a lane that is missing stops every consumer.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"get_if_exists": True, "max_concurrency": 10_000, "max_restarts": -1, "scheduling_strategy": here}
    return tuple([await _start_lane(settings, number, options) for number in range(1, settings.staging.lanes)])


async def _start_lane(settings: FeedSettings, number: int, options: dict[str, Any]) -> Any:
    named = runtime.child_options(settings.name, "lane", str(number))

    async def start() -> Any:
        own_id = ray.get_runtime_context().get_actor_id()
        return LaneCoordinator.options(**named, **options).remote(settings, number, own_id)  # type: ignore[attr-defined]

    # Ray may hold the name of an actor that was just killed, and neither find it nor start it anew.
    is_held = ValueError, ray.exceptions.RayError
    retry = AsyncRetrying(
        retry=retry_if_exception_type(is_held),
        wait=wait_fixed(RETRY_S),
        stop=stop_after_delay(LANE_BEGIN_S),
        reraise=True,
    )
    try:
        return await retry(start)
    except is_held as error:
        raise ResourceError(f"lane {number} of feed {settings.name!r} cannot be started: {error}") from None
